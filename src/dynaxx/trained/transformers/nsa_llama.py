# SPDX-License-Identifier: Apache-2.0
"""A transformers Llama with Native Sparse Attention in every layer, converted from a dense Llama.

Importing this module registers it with transformers' `AutoConfig` and `AutoModelForCausalLM`.
"""

from __future__ import annotations

import weakref
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from dynaxx.layout.host import never_traced
from dynaxx.layout.paging import PagedCache
from dynaxx.trained.nn.compression import COMPRESSIONS
from dynaxx.trained.nn.nsa import NEAR_DENSE, NativeSparseAttention
from dynaxx.trained.nn.projection import attend_outside_of_graphs
from dynaxx.trained.nsa.compressed_pages import CompressedPages, compressed_of
from dynaxx.trained.nsa.decode import Pooling, compress_pages, nsa_decode
from dynaxx.trained.nsa.spans import NsaSizes
from dynaxx.trained.transformers.llama import (
    become_llama_layer,
    hides_more_than_the_future,
    refuse_other_models,
    with_other_attention,
)

SPARE_BLOCKS = 64  # selection blocks by which the compressed tokens grow at a time


@dataclass
class _CompressedLayer:
    """The compressed tokens of one layer of a cache."""

    compressed: CompressedPages
    keys: weakref.ref[Tensor]  # the compressed tensor
    covered: int  # number of first keys whose windows are compressed


_memories: weakref.WeakKeyDictionary[Any, dict[int, _CompressedLayer]] = weakref.WeakKeyDictionary()


class NsaMemory:
    """One layer's part of a cache's memory, for one call. Create it before the cache appends new keys."""

    def __init__(self, cache: Any, layer: int) -> None:
        self._of, self._layer = _memories.setdefault(cache, {}), layer
        layers = getattr(cache, "layers", ())
        keys = getattr(layers[layer], "keys", None) if layer < len(layers) else None
        known = self._of.pop(layer, None)
        self._known = known if known is not None and keys is not None and known.keys() is keys else None

    def extended(self, keys: Tensor) -> None:
        """Make `keys`, the previous keys with new ones appended, the cache's tensor."""
        if self._known is not None:
            self._of[self._layer] = replace(self._known, keys=weakref.ref(keys))

    @torch.no_grad()
    def pages(
        self, keys: Tensor, values: Tensor, sizes: NsaSizes, compress_k: Pooling, compress_v: Pooling
    ) -> PagedCache:
        """Return the cache's (batch, kv_heads, seqlen, dim) tensors in the form for `nsa_decode`."""
        k, v = keys.transpose(1, 2), values.transpose(1, 2)
        cache, used, known = PagedCache.contiguous(k, v, page_size=sizes.slc_block), k.shape[1], self._known
        if known is None or known.compressed.sizes.cmp_stride != sizes.cmp_stride:
            cache = compress_pages(cache, sizes, compress_k, compress_v)
        else:
            kept, positions = known.compressed, used // sizes.cmp_stride
            if kept.k.shape[1] < positions:
                kept = kept.grown(positions + SPARE_BLOCKS * sizes.slc_block // sizes.cmp_stride)
            cache = replace(cache, compressed=replace(kept, sizes=sizes))
            cache = compress_pages(cache, sizes, compress_k, compress_v, new_tokens=used - known.covered)
        self._of[self._layer] = _CompressedLayer(compressed_of(cache), weakref.ref(keys), used)
        return cache


class NsaLlamaConfig(LlamaConfig):  # type: ignore[misc]
    """The config of a Llama with the settings of its native sparse attention.

    Args:
        nsa_sizes: the fields of `NsaSizes`.
        nsa_compression: "mean", "weighted" or "mlp".
        nsa_gate_init: initial values of the gates, in the order compressed, selected, window.
    """

    model_type = "dynaxx_native_llama"  # as saved models have it
    nsa_sizes: dict[str, Any] | None = None
    nsa_compression: str = "mlp"
    nsa_gate_init: list[float] | None = None

    @property
    def sizes(self) -> NsaSizes:
        """Return the block sizes of native sparse attention."""
        return NsaSizes(**(self.nsa_sizes or {}))


class NsaLlamaAttention(NativeSparseAttention):
    """`NativeSparseAttention` with the interface and parameter names of a Llama layer.

    Keys and values are in the cache of transformers. A step of one token reads it with `nsa_decode`. The compressed
    tokens are kept as long as the cache keeps its tensors, and recomputed otherwise.
    """

    layer_idx: int

    def __init__(self, config: NsaLlamaConfig, layer_idx: int) -> None:
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None),
            bias=config.attention_bias,
            sizes=config.sizes,
            compression=config.nsa_compression,  # type: ignore[arg-type]
            gate_init=tuple(config.nsa_gate_init or NEAR_DENSE),  # type: ignore[arg-type]
        )
        become_llama_layer(self, config, layer_idx)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attend. Input and output are (batch, seqlen, hidden_size); `cache` is the name that transformers 5.24 uses.

        Raises:
            ValueError: the batch is padded, or the cache has a fixed length.
        """
        q, k, v = self.projected(hidden_states, position_embeddings, None)
        memory = None
        past_key_values = cache if past_key_values is None else past_key_values
        if past_key_values is not None:
            memory = NsaMemory(past_key_values, self.layer_idx)
            length = past_key_values.get_seq_length(self.layer_idx) + k.shape[1]
            keys, values = past_key_values.update(k.transpose(1, 2), v.transpose(1, 2), self.layer_idx)
            memory.extended(keys)
            k, v = keys.transpose(1, 2), values.transpose(1, 2)
            if k.shape[1] != length:
                raise ValueError(
                    "native sparse attention needs a growing cache such as DynamicCache; "
                    f"this one holds {length} tokens and returned {k.shape[1]}"
                )
        ends = self._packed_lengths(kwargs, q, k)
        if ends is None and hides_more_than_the_future(attention_mask, q.shape[1], k.shape[1]):
            raise ValueError(
                "native sparse attention does not support padding; use sequences of equal length, or pack them with "
                "transformers' DataCollatorWithFlattening"
            )
        decodes = q.shape[1] == 1 < k.shape[1] and not (self.dense or torch.is_grad_enabled())
        if memory is not None and ends is None and decodes:
            out = self.step(hidden_states, q, memory, keys, values)
        elif ends is None:
            out = attend_outside_of_graphs(self, hidden_states, q, k, v, None, None)
        else:
            out = attend_outside_of_graphs(self, hidden_states[0], q[0], k[0], v[0], ends, None)[None]
        return self.o_proj(out.flatten(-2)), None

    @never_traced
    def step(self, x: Tensor, q: Tensor, memory: NsaMemory, keys: Tensor, values: Tensor) -> Tensor:
        """Attend from one token to the whole cache; return (batch, 1, q_heads, head_dim).

        Args:
            x: (batch, 1, hidden_size), from which the gates are computed.
            q: (batch, 1, q_heads, head_dim).
            memory: the compressed tokens of the cache.
            keys: (batch, kv_heads, seqlen, head_dim), as in transformers' cache.
            values: like `keys`.
        """
        pages = memory.pages(keys, values, self.sizes, self.compress_k.pooling, self.compress_v.pooling)
        gates = self.gate(x).sigmoid().unflatten(-1, (self.q_heads, 3))
        return nsa_decode(q, pages, gates, scale=self.scale).out

    @staticmethod
    def _packed_lengths(kwargs: dict[str, Any], q: Tensor, k: Tensor) -> Tensor | None:
        """Return the lengths of packed sequences, if the caller passes them (as DataCollatorWithFlattening does)."""
        ends: Tensor | None = kwargs.get("cu_seq_lens_q")
        if ends is not None and (q.shape[0] != 1 or q.shape[1] != k.shape[1]):
            raise ValueError("packed sequences must come as a batch of one, without a cache")
        return ends


class NsaLlamaForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """A Llama whose layers use `NsaLlamaAttention`."""

    config_class = NsaLlamaConfig

    def __init__(self, config: NsaLlamaConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = NsaLlamaAttention(config, index)
        self.post_init()

    def set_slc_count(self, count: int) -> None:
        """Set the number of selected blocks per query. Lower it gradually to go from dense to sparse."""
        for layer in self.model.layers:
            layer.self_attn.sizes = replace(layer.self_attn.sizes, slc_count=count)
        self.config.nsa_sizes = asdict(replace(self.config.sizes, slc_count=count))


AutoConfig.register(NsaLlamaConfig.model_type, NsaLlamaConfig, exist_ok=True)
AutoModelForCausalLM.register(NsaLlamaConfig, NsaLlamaForCausalLM, exist_ok=True)


def convert_to_nsa(
    model: Any,
    sizes: NsaSizes | None = None,
    *,
    compression: str = "mlp",
    gate_init: tuple[float, float, float] = NEAR_DENSE,
) -> NsaLlamaForCausalLM:
    """Convert a dense Llama to native sparse attention, with equal weights, new gates and new compression.

    With the default gates the result starts close to dense: up to slc_count * slc_block tokens the selected branch is
    dense attention, and the other gates are nearly closed. Fine-tune it afterwards.

    Args:
        model: a transformers `LlamaForCausalLM`. Its weights are copied; the model is unchanged.
        sizes: sizes of the branches.
        compression: "mean", "weighted" or "mlp".
        gate_init: initial values of the gates, in the order compressed, selected, window.

    Raises:
        UnsupportedInputError: the model is not a dense `LlamaForCausalLM`.
        ValueError: the compression is unknown, or a gate is not between 0 and 1.
    """
    refuse_other_models(model)
    if compression not in COMPRESSIONS:
        raise ValueError(f"`compression` must be one of {tuple(COMPRESSIONS)}, got {compression!r}")
    made, _ = with_other_attention(
        model,
        NsaLlamaForCausalLM,
        nsa_sizes=asdict(NsaSizes() if sizes is None else sizes),
        nsa_compression=compression,
        nsa_gate_init=list(gate_init),
    )
    converted: NsaLlamaForCausalLM = made
    for layer in converted.model.layers:
        layer.self_attn.reset_new_parameters()
    return converted
