"""The definition of every op, in torch."""

from dynaxx.kernels.reference.attention import attention_forward, unsupported_reasons

__all__ = ["attention_forward", "unsupported_reasons"]
