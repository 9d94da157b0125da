"""The definition of every op, in torch."""

from dynaxx.kernels.reference.attention import attention_backward, attention_forward, unsupported_reasons

__all__ = ["attention_backward", "attention_forward", "unsupported_reasons"]
