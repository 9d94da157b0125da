# SPDX-License-Identifier: Apache-2.0
"""`PortableModel`: a transformers model with attention in plain tensor operations and an explicit KV cache.

It uses the `AttentionInterface` of transformers, so the model's forward method does not change, and the caller's model
is unchanged between calls. `torch.export` and the ONNX and OpenVINO converters can trace it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dynaxx.engines.portable.attention import Known, attend_by_rules
from dynaxx.engines.portable.plans import PortableRules, is_causal, own_window, portable_rules
from dynaxx.errors import UnsupportedInputError
from dynaxx.integrations.transformers.decoder import Decoder, cache_name
from dynaxx.policy import Policy

NAME = "dynaxx_portable"  # name in the registry of transformers
UNSERVED = {"s_aux": "learned sinks", "position_bias": "a position bias", "block_indices": "block indices"}

EXPERTS = (
    "in a mixture of experts the data choose each token's weights, which plain operations would compute for every "
    "expert: serve the model with dynaxx.apply or vLLM"
)


class Attend(Protocol):
    """Computes a layer's attention."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
        """Attend: q (B, Hq, N, D), k and v (B, H, M, D), mask (B, M) bool or None; to (B, N, Hq, D)."""


class PortableModel(nn.Module):
    """A model and its rules, in plain operations.

    A decoder takes `input_ids` (batch, seqlen) and a list of two tensors per layer, the keys and values of its cache
    (batch, kv_heads, past, head_dim), in the order key 0, value 0, key 1, ... . It returns the logits (batch, kept,
    vocabulary) and the grown cache in the same order; for an empty list the logits alone. All sequences of a batch have
    one length, without padding. An encoder takes `input_ids` and a list of one `attention_mask` (batch, seqlen), 1 for
    a token and 0 for padding, and returns its first output.

    Args:
        model: a decoder or an encoder of transformers, in eval mode.
        policy: policy with static rules; None uses only the model's own windows.
        window: window of an encoder.
        last_logits: return only the logits of the last token, (batch, 1, vocabulary).
        attend: function that replaces the attention; None uses plain operations.

    Raises:
        PolicyError: the policy is for another model.
        UnsupportedInputError: plain operations do not support the model or the policy.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Policy | None = None,
        *,
        window: int | tuple[int, int] | None = None,
        last_logits: bool = True,
        attend: Attend | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.last_logits = last_logits
        found = Decoder.of(model)
        if any(x.dim() == 3 and ("expert" in name or "moe" in name) for name, x in model.named_parameters()):
            raise UnsupportedInputError(f"an export of {found.facts.model_type}", {"portable": [EXPERTS]})
        self.config, self.layers, self.causal = found.config, len(found.layers), is_causal(found)
        self.owner = found.owner
        self._cache_name = cache_name(model)  # here, since a trace of `forward` cannot read signatures
        self.windows = {index: own_window(found, index) for index in found.layers}
        self.rules: dict[int, PortableRules] = {}
        if attend is None:
            self.rules = portable_rules(model, policy, window)
        self.attend: Attend = self._attend if attend is None else attend
        self._known: Known = {}
        self._calls = 0
        _register()

    def forward(self, input_ids: Tensor, others: Sequence[Tensor]) -> Any:
        """Run the model. `others` is the cache of a decoder or the mask of an encoder; see the class."""
        self._known, self._calls = {}, 0
        with self._running():
            if not self.causal:
                return self.model(input_ids=input_ids, attention_mask=others[0], return_dict=True)[0]
            cache, past = (_cache(others), others[0].shape[2]) if others else (None, 0)
            positions = (torch.arange(input_ids.shape[1], device=input_ids.device) + past)[None]
            kept: dict[str, Any] = {"logits_to_keep": 1} if self.last_logits else {}
            if cache is None:
                return (self.model(input_ids=input_ids, position_ids=positions, use_cache=False, **kept).logits,)
            kept[self._cache_name] = cache
            out = self.model(input_ids=input_ids, position_ids=positions, use_cache=True, **kept)
            return (out.logits, *(x for layer in cache.layers for x in (layer.keys, layer.values)))

    def number_of(self, module: nn.Module) -> int:
        """Return the layer of an attention call; modules of some encoders do not know it, and are called in order."""
        own = getattr(module, "layer_idx", None)
        number = int(own) if isinstance(own, int) else self._calls % self.layers
        self._calls += 1
        return number

    def empty_cache(self, batch: int = 1, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Return an empty cache in the order of `forward`."""
        shape = (batch, *cache_heads(self.config))
        return [torch.zeros(shape[0], shape[1], 0, shape[2], dtype=dtype, device="cpu") for _ in range(2 * self.layers)]

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        before = self.owner.config._attn_implementation
        self.owner.set_attn_implementation(NAME)
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)
            self.owner.set_attn_implementation(before)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
        return attend_by_rules(self.rules[layer], q, k, v, scale, mask, causal=self.causal, known=self._known)


def cache_heads(config: Any) -> tuple[int, int]:
    """Return the kv heads and head_dim of a decoder's cache."""
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return kv_heads, head_dim


def _cache(tensors: Sequence[Tensor]) -> Any:
    """Return a cache of these keys and values. Built from pairs, it would put a Concat before each in the graph."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    cache = DynamicCache()
    for keys, values in zip(tensors[::2], tensors[1::2], strict=True):
        layer = DynamicLayer()
        layer.keys, layer.values, layer.is_initialized = keys, values, True
        layer.dtype, layer.device = keys.dtype, keys.device
        cache.layers.append(layer)
    return cache


_CURRENT: ContextVar[PortableModel | None] = ContextVar("dynaxx_portable", default=None)


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def _mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Return only the mask of keys; the layers know the visible pairs of their rules."""
    return attention_mask


def _attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend with the signature of `AttentionInterface`."""
    current = _CURRENT.get()
    if current is None:
        raise RuntimeError("this model's attention was set by a PortableModel that is not running")
    wrong = [said for name, said in UNSERVED.items() if kwargs.get(name) is not None]
    wrong += ["capped scores"] if kwargs.get("softcap") else []
    window, layer = kwargs.get("sliding_window"), current.number_of(module)
    if current.causal and (window or None) != current.windows[layer]:
        wrong += [f"a window of {window} that is not in its config"]
    if wrong:
        raise UnsupportedInputError(type(module).__name__, {"portable": [f"{said} are not served" for said in wrong]})
    scale = kwargs.get("scaling")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    mask = None if mask is None else mask.to(torch.bool)
    return current.attend(layer, q, k, v, scale, mask), None
