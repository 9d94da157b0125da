# SPDX-License-Identifier: Apache-2.0
"""A transformers Llama whose layers attend to the tokens that an indexer chose: converted from a dense one.

Importing this module registers it with transformers' `AutoConfig` and `AutoModelForCausalLM`.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from dynaxx.trained.nn.indexed import IndexedSparseAttention, IndexerOutput
from dynaxx.trained.tokens.choice import TopKTokens
from dynaxx.trained.tokens.indexer import Precision
from dynaxx.trained.transformers.llama import (
    become_llama_layer,
    hides_more_than_the_future,
    refuse_other_models,
    with_other_attention,
)


class IndexedLlamaConfig(LlamaConfig):  # type: ignore[misc]
    """A Llama's config, and what its attention needs to know.

    Args:
        index_tokens: tokens that each query attends to.
        index_block_size: neighbouring tokens that are chosen together.
        index_heads, index_dim, index_precision: of the indexer.
    """

    model_type = "dynaxx_indexed_llama"
    index_tokens: int = 2048
    index_block_size: int = 1
    index_heads: int = 4
    index_dim: int = 64
    index_precision: str = "fp32"


class IndexedLlamaAttention(IndexedSparseAttention):
    """`IndexedSparseAttention` as a Llama layer calls it; the projections have the names that they have there.

    Keys come from transformers' own cache. The indexer's keys are kept beside it, as long as it grows step by step.
    """

    layer_idx: int

    def __init__(self, config: IndexedLlamaConfig, layer_idx: int) -> None:
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None),
            bias=config.attention_bias,
            choice=TopKTokens(config.index_tokens, config.index_block_size),
            index_heads=config.index_heads,
            index_dim=config.index_dim,
            precision=_precision(config.index_precision),
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
        """Attend, (batch, seqlen, hidden_size) as in and out; `cache` is the name that transformers 5.24 uses.

        Raises:
            ValueError: padding, packed sequences, a cache of fixed length, or one that was cut or filled elsewhere.
        """
        if kwargs.get("cu_seq_lens_q") is not None:
            raise ValueError("an indexed Llama serves sequences of a batch, not packed ones")
        q, k, v = self.projected(hidden_states, position_embeddings, None)
        indexed = self.indexer(hidden_states, position_embeddings)
        past_key_values = cache if past_key_values is None else past_key_values
        if past_key_values is not None:
            index_k = _index_keys_before(past_key_values, self.layer_idx, indexed.k)
            keys, values = past_key_values.update(k.transpose(1, 2), v.transpose(1, 2), self.layer_idx)
            k, v = keys.transpose(1, 2), values.transpose(1, 2)
            if k.shape[1] != index_k.shape[1]:
                raise ValueError(
                    f"an indexed Llama needs a cache that grows, as DynamicCache: it gave {k.shape[1]} tokens for "
                    f"{index_k.shape[1]}"
                )
            kept = _index_keys.setdefault(past_key_values, {})
            kept[self.layer_idx] = _LayerKeys(index_k.detach(), weakref.ref(keys))
            indexed = IndexerOutput(indexed.q, index_k, indexed.weights)
        if hides_more_than_the_future(attention_mask, q.shape[1], k.shape[1]):
            raise ValueError("an indexed Llama does not support padding; use sequences of equal length")
        out = self.attend_indexed(indexed, q, k, v, None)
        return self.o_proj(out.flatten(-2)), None


def _precision(name: str) -> Precision:
    """Return the name of a precision that there is."""
    if name not in ("fp32", "bf16", "fp8", "int8"):
        raise ValueError(f"`index_precision` must be 'fp32', 'bf16', 'fp8' or 'int8', got {name!r}")
    return name  # type: ignore[return-value]


class _LayerKeys(NamedTuple):
    """The indexer's keys of one layer, and the cache's tensor that they belong to."""

    index_k: Tensor  # (batch, seqlen, index_dim)
    keys: weakref.ref[Tensor]


_index_keys: weakref.WeakKeyDictionary[Any, dict[int, _LayerKeys]] = weakref.WeakKeyDictionary()


def _index_keys_before(cache: Any, layer: int, new: Tensor) -> Tensor:
    """Return the indexer's keys of a cache's tokens and the new ones.

    Raises:
        ValueError: the cache holds tokens whose keys were never seen here, or was reordered or cut since.
    """
    length = cache.get_seq_length(layer)
    if not length:
        return new
    known = _index_keys.get(cache, {}).get(layer)
    if known is None or known.keys() is not cache.layers[layer].keys or known.index_k.shape[1] != length:
        raise ValueError(
            f"the cache holds {length} tokens that this model did not put there, or was reordered or cut: beam search, "
            "assisted decoding and caches of other models are not served"
        )
    return torch.cat([known.index_k, new], 1)


class IndexedLlamaForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """A Llama whose layers attend by `IndexedLlamaAttention`. In training mode its loss contains the indexers'."""

    config_class = IndexedLlamaConfig

    def __init__(self, config: IndexedLlamaConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = IndexedLlamaAttention(config, index)
        self.post_init()

    def set_dense(self, dense: bool) -> None:
        """Attend to everything while the indexers learn (True), or to what they choose (False)."""
        for layer in self.model.layers:
            layer.self_attn.dense = dense

    def index_loss(self) -> tuple[Tensor, Tensor]:
        """Return the sum of the indexers' losses of the last call in training mode, and their mean recall.

        Raises:
            ValueError: there was no such call.
        """
        found = [layer.self_attn.index_loss for layer in self.model.layers]
        if any(each is None for each in found):
            raise ValueError("`index_loss` needs a call in training mode, with gradients, before it")
        return torch.stack([x.loss for x in found]).sum(), torch.stack([x.recall for x in found]).mean()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; with labels, in training mode, the loss contains that of the indexers."""
        result = super().forward(*args, **kwargs)
        if getattr(result, "loss", None) is not None and self.training and torch.is_grad_enabled():
            result.loss = result.loss + self.index_loss()[0]
        return result


AutoConfig.register(IndexedLlamaConfig.model_type, IndexedLlamaConfig, exist_ok=True)
AutoModelForCausalLM.register(IndexedLlamaConfig, IndexedLlamaForCausalLM, exist_ok=True)


def convert_to_indexed(
    model: Any,
    choice: TopKTokens | None = None,
    *,
    index_heads: int = 8,
    index_dim: int = 128,
    precision: str = "fp32",
    sample: Tensor | None = None,
) -> IndexedLlamaForCausalLM:
    """Make a model that attends to chosen tokens from a dense Llama: equal weights, new indexers.

    Up to `choice.k` tokens it is the dense model. Longer sequences need indexers that have learned: train them with
    `set_dense(True)` first, then without.

    Args:
        model: a transformers `LlamaForCausalLM`. Its weights are copied; it stays as it is.
        choice: how many tokens each query attends to; 2,048 one by one by default.
        index_heads: heads of each indexer.
        index_dim: width of its queries and keys; best twice the head_dim of attention.
        precision: "fp32", "bf16", "fp8" or "int8"; see `index_tokens`.
        sample: (batch, seqlen) tokens of a text, 1,000 or so. With them, indexers start as some heads of attention (see
            `IndexedSparseAttention.start_indexer`), and learn in far fewer steps to find single tokens.

    Raises:
        UnsupportedInputError: another kind of model.
        ValueError: sizes below 1, an unknown precision, or a sample of less than 2 tokens.
    """
    refuse_other_models(model)
    choice = TopKTokens(2048) if choice is None else choice
    made, missing = with_other_attention(
        model,
        IndexedLlamaForCausalLM,
        index_tokens=choice.k,
        index_block_size=choice.block_size,
        index_heads=index_heads,
        index_dim=index_dim,
        index_precision=_precision(precision),
    )
    assert all(".indexer." in name for name in missing), "everything else is a Llama's"
    if sample is not None:
        _start_indexers(made, model, sample)
    converted: IndexedLlamaForCausalLM = made
    return converted


@torch.no_grad()
def _start_indexers(made: IndexedLlamaForCausalLM, dense: Any, sample: Tensor) -> None:
    """Run the dense model over sample tokens, and set the indexers' weights by what each layer's attention gets."""
    if sample.ndim != 2 or sample.numel() < 2:
        raise ValueError(f"`sample` must be (batch, seqlen) tokens, 2 at least, got {tuple(sample.shape)}")

    def start(attention: Any) -> Any:
        return lambda _, args, kwargs: attention.start_indexer(kwargs["hidden_states"] if not args else args[0])

    hooks = [
        old.self_attn.register_forward_pre_hook(start(new.self_attn), with_kwargs=True)
        for old, new in zip(dense.model.layers, made.model.layers, strict=True)
    ]
    try:
        dense.model(sample.to(dense.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
