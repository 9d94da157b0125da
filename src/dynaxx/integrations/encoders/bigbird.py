# SPDX-License-Identifier: Apache-2.0
"""BigBird's attention on dynaxx: a window of three blocks, the first and last block global, random blocks, or dense.

Shapes: B batch, N tokens, H heads, D head_dim; `blocks` is N / the model's block size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdSelfAttention
from transformers.models.bigbird_pegasus.modeling_bigbird_pegasus import (
    BigBirdPegasusBlockSparseAttention,
    BigBirdPegasusSelfAttention,
)

from dynaxx.integrations.encoders.bigbird_blocks import Visits, draw_random_blocks, layout_block, visits_of
from dynaxx.integrations.encoders.shared import Replaced
from dynaxx.layout import BLOCK_SIZES, BlockLayout
from dynaxx.layout.hide_keys import hide_keys
from dynaxx.ops import merge_states, sparse_attention
from dynaxx.patterns import Full

DENSE_BLOCK = 64  # tokens per block of layers with dense attention


class _BigBirdAttention(Replaced):
    """The base of both kinds of BigBird attention."""

    def _project(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v, each (B, N, H, D)."""
        heads = (self.num_attention_heads, self.attention_head_size)
        q, k, v = (project(hidden).unflatten(-1, heads) for project in (self.query, self.key, self.value))
        return q, k, v

    def _dense_reason(self, kwargs: dict[str, Any]) -> str | None:
        if torch.compiler.is_compiling():
            return "compiled or exported"
        wanted = kwargs.get("output_attentions")
        if wanted or (wanted is None and self.dynaxx.wants_attentions):
            return "output_attentions"
        return None

    def _count(self, reason: str) -> None:
        if not torch.compiler.is_compiling():
            self.dynaxx.dense[reason] += 1


class _BlockSparseAttention(_BigBirdAttention):
    """The forward of block-sparse attention, for subclasses of `BigBirdBlockSparseAttention` and similar classes."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        band_mask: Tensor | None = None,
        from_mask: Tensor | None = None,
        to_mask: Tensor | None = None,
        from_blocked_mask: Tensor | None = None,
        to_blocked_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return ((B, N, H * D), None) from hidden states and masks of blocks (B, blocks, block size)."""
        reason = self._dense_reason(kwargs) or self._mask_reason(hidden_states, from_blocked_mask, to_blocked_mask)
        if reason is not None:
            self._count(reason)
            masks = (band_mask, from_mask, to_mask, from_blocked_mask, to_blocked_mask)
            return super().forward(hidden_states, *masks, **kwargs)  # type: ignore[misc]
        assert from_blocked_mask is not None, "`_mask_reason` must have refused a missing mask"
        self.dynaxx.sparse += 1
        rows = self.dynaxx.once_per_mask(from_blocked_mask, "rows", lambda: from_blocked_mask.flatten(1) == 0)
        out = self._attend(*self._project(hidden_states), to_blocked_mask)
        return out.masked_fill(rows[:, :, None, None], 0.0).flatten(2), None

    def _attend(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        visits = self.visits_of(q.shape[1], q.device)
        once = self.dynaxx.once_per_mask
        visible = once(mask, "keys", lambda: mask.flatten(1) != 0)
        layouts = once(mask, visits, lambda: [(m, hide_keys(layout, visible)) for m, layout in visits.by_count])
        states = [(sparse_attention(q, k, v, layout, return_lse=True), m) for m, layout in layouts]
        return merge_states([(out, lse + math.log(m)) for (out, lse), m in states]).out

    def visits_of(self: Any, seqlen: int, device: torch.device) -> Visits:
        """Return the visited blocks. They are drawn once per length, since the layer's seed makes every draw equal."""
        known = self.__dict__.setdefault("dynaxx_drawn", {})
        key = (seqlen, self.training)
        if key not in known or self.seed is None:
            known[key] = draw_random_blocks(self, seqlen)
        drawn = known[key]
        return visits_of(drawn.numpy().tobytes(), tuple(drawn.shape), self.block_size, device)

    def _mask_reason(self: Any, hidden: Tensor, from_mask: Tensor | None, to_mask: Tensor | None) -> str | None:
        if from_mask is None or to_mask is None:
            return "no mask"
        if hidden.shape[1] % self.block_size:
            return "length is not a multiple of the block size"  # the base class refuses it
        for mask in (from_mask, to_mask):
            if not self.dynaxx.once_per_mask(mask, "binary", lambda mask=mask: bool(((mask == 0) | (mask == 1)).all())):
                return "mask is not 0 or 1"
        return None


class _DenseAttention(_BigBirdAttention):
    """The forward of dense attention, for subclasses of `BigBirdSelfAttention` and similar classes."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return ((B, N, H * D), None) from hidden states and an additive mask (B, 1, N, N)."""
        past_key_values = cache if past_key_values is None else past_key_values  # `cache` from transformers 5.24 on
        layout = self._dense_reason(kwargs)
        if layout is None and (encoder_hidden_states is not None or past_key_values is not None):
            layout = "cross attention or a cache"
        if layout is None and self.training and self.dropout.p:
            layout = "attention dropout"
        layout = layout or self._layout(hidden_states, attention_mask)
        if isinstance(layout, str):
            self._count(layout)
            others = (attention_mask, encoder_hidden_states, encoder_attention_mask, past_key_values)
            return super().forward(hidden_states, *others, **kwargs)  # type: ignore[misc]
        self.dynaxx.sparse += 1
        q, k, v = self._project(hidden_states)
        return sparse_attention(q, k, v, layout).flatten(2), None

    def _layout(self: Any, hidden: Tensor, mask: Tensor | None) -> BlockLayout | str:
        """Return the layout of all pairs without masked keys, or the reason why the mask does not mask keys."""
        seqlen = hidden.shape[1]
        layout = Full().layout(seqlen, causal=False, block_size=DENSE_BLOCK, device=hidden.device)
        if mask is None:
            return layout
        return self.dynaxx.once_per_mask(mask, "dense", lambda: _masked(layout, mask))


def _masked(layout: BlockLayout, mask: Tensor) -> BlockLayout | str:
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[3] != layout.seqlen_k:
        return "mask is not of keys"
    keys = mask[:, 0, 0]
    if not bool((mask == keys[:, None, None]).all()):
        return "mask differs by query"
    visible = keys if keys.dtype == torch.bool else keys == 0
    hidden = ~keys if keys.dtype == torch.bool else keys <= torch.finfo(keys.dtype).min
    if not bool((visible | hidden).all()):
        return "mask is a bias"
    if not bool(visible.any(1).all()):
        return "a sequence without keys"
    return hide_keys(layout, visible)


def refusals(module: nn.Module) -> list[str]:
    """Return the reasons why this attention module cannot be served exactly."""
    size = getattr(module, "block_size", None)
    if isinstance(size, int) and layout_block(size) is None:
        return [f"its config has blocks of {size} tokens; they must be a multiple of {BLOCK_SIZES[0]}"]
    return []


class SparseBigBird(_BlockSparseAttention, BigBirdBlockSparseAttention):  # type: ignore[misc]
    """`BigBirdBlockSparseAttention` on dynaxx."""


class SparseBigBirdPegasus(_BlockSparseAttention, BigBirdPegasusBlockSparseAttention):  # type: ignore[misc]
    """`BigBirdPegasusBlockSparseAttention` on dynaxx."""


class DenseBigBird(_DenseAttention, BigBirdSelfAttention):  # type: ignore[misc]
    """`BigBirdSelfAttention` on dynaxx."""


class DenseBigBirdPegasus(_DenseAttention, BigBirdPegasusSelfAttention):  # type: ignore[misc]
    """`BigBirdPegasusSelfAttention` on dynaxx."""


REPLACEMENTS = {
    BigBirdBlockSparseAttention: SparseBigBird,
    BigBirdPegasusBlockSparseAttention: SparseBigBirdPegasus,
    BigBirdSelfAttention: DenseBigBird,
    BigBirdPegasusSelfAttention: DenseBigBirdPegasus,
}
