"""BigBird's attention on dynaxx: a window of three blocks, the first and last block global, random blocks, or dense.

Which random blocks a layer attends to is drawn by the model's own code. Out of training that code draws none: every
random slot holds block 0, so the first block is attended to 1 + `num_random_blocks` times, and its keys weigh that much
more in the softmax. In training a random block may be one of the window or the last one, which is then attended to
twice. Both are part of what transformers computes, so both are kept: a block that is visited m times counts m times.

B batch, N tokens, H heads, D head_dim; `blocks` = N / the model's block size.
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdSelfAttention
from transformers.models.bigbird_pegasus.modeling_bigbird_pegasus import (
    BigBirdPegasusBlockSparseAttention,
    BigBirdPegasusSelfAttention,
)

from dynaxx.layout import BLOCK_SIZES, FULL, BlockGrid, BlockLayout, ElementMasks
from dynaxx.layout.hide import hide_keys
from dynaxx.ops import merge_states, sparse_attention
from dynaxx.patterns import Full

if TYPE_CHECKING:
    from dynaxx.integrations.encoders import Shared

DENSE_BLOCK = 64  # tokens per block where the model attends densely


class Visits:
    """How often each block of queries attends to each block of keys, and the layouts that say so.

    Attributes:
        counts: (heads | 1, blocks, blocks) int64.
    """

    def __init__(self, drawn: Tensor, block_size: int, device: torch.device) -> None:
        """From the random blocks (heads, blocks - 2, slots) int64 of every block of queries but the first and last."""
        if bool((drawn == drawn[:1]).all()):
            drawn = drawn[:1]
        heads, blocks = drawn.shape[0], drawn.shape[1] + 2
        counts = torch.zeros(heads, blocks, blocks, dtype=torch.int64)
        middle = torch.arange(1, blocks - 1)
        for shift in (-1, 0, 1):
            counts[:, middle, middle + shift] = 1
        counts[:, :, (0, -1)] = 1
        counts[:, (0, -1)] = 1
        counts[:, 1:-1].scatter_add_(2, drawn, torch.ones_like(drawn))
        self.counts = counts
        self._block_size = block_size
        self._device = device

    @cached_property
    def by_count(self) -> list[tuple[int, BlockLayout]]:
        """For each count m that occurs, the layout of the blocks that are visited m times."""
        return [(m, self._layout(self.counts == m)) for m in self.counts.unique().tolist() if m]

    @cached_property
    def with_copies(self) -> tuple[Tensor, BlockLayout]:
        """Blocks to append to the keys, (copies,) int64, and the layout on them in which a repeated visit is one more
        block."""
        extra = [
            (m, col)
            for m in range(2, int(self.counts.amax()) + 1)
            for col in (self.counts >= m).flatten(0, 1).any(0).nonzero().flatten().tolist()
        ]
        columns = [self.counts[..., col] >= m for m, col in extra]
        visited = torch.cat([self.counts >= 1, *(column[..., None] for column in columns)], dim=2)
        return torch.tensor([col for _, col in extra], dtype=torch.int64, device=self._device), self._layout(visited)

    def _layout(self, visited: Tensor) -> BlockLayout:
        """From (heads, q blocks, kv blocks) bool in blocks of the model, each of which may be several of the layout."""
        size = _layout_block(self._block_size)
        assert size is not None, "refused before"
        scale = self._block_size // size
        fine = visited.repeat_interleave(scale, 1).repeat_interleave(scale, 2)
        head, row, col = fine.nonzero(as_tuple=True)
        heads, rows, cols = fine.shape
        grid = BlockGrid(rows * size, cols * size, (size, size), causal=False)
        codes = torch.full_like(col, FULL)
        masks = ElementMasks.empty(grid.block_size)
        layout = BlockLayout.from_entries(grid, head * rows + row, col, codes, masks, layout_heads=heads)
        return layout.to(self._device)


@lru_cache(maxsize=64)
def _visits(drawn: bytes, shape: tuple[int, ...], block_size: int, device: torch.device) -> Visits:
    """Layers that drew the same share one."""
    blocks = torch.frombuffer(bytearray(drawn), dtype=torch.int64) if drawn else torch.zeros(0, dtype=torch.int64)
    return Visits(blocks.view(shape), block_size, device)


class _Drawn(Exception):
    """Carries the random blocks out of the model's code."""


def draw_random_blocks(module: Any, seqlen: int) -> Tensor:
    """The random blocks that `module` attends to, (heads, blocks - 2, slots) int64, drawn by its own code.

    That code seeds numpy's global generator in training and draws in the midst of attention. It runs on a stand-in
    with the module's settings that leaves as soon as they are drawn, and the generator is put back as it was.
    """

    def leave(_from: Any, _to: Any, rand_attn: Tensor, *_: Any) -> None:
        raise _Drawn(rand_attn[0])

    kind: Any = type(module)
    stand_in = kind.__new__(kind)
    stand_in.__dict__.update(module.__dict__)
    stand_in.__dict__["_create_rand_mask_from_inputs"] = leave
    state = np.random.get_state()
    try:
        stand_in.bigbird_block_sparse_attention(
            query_layer=torch.empty(0),
            key_layer=None,
            value_layer=None,
            band_mask=None,
            from_mask=None,
            to_mask=None,
            from_blocked_mask=None,
            to_blocked_mask=None,
            n_heads=module.num_attention_heads,
            n_rand_blocks=module.num_random_blocks,
            attention_head_size=module.attention_head_size,
            from_block_size=module.block_size,
            to_block_size=module.block_size,
            batch_size=1,
            from_seq_len=seqlen,
            to_seq_len=seqlen,
            seed=module.seed,
            plan_from_length=None,
            plan_num_rand_blocks=None,
        )
    except _Drawn as drawn:
        found: Tensor = drawn.args[0]
        return found
    finally:
        np.random.set_state(state)
    raise RuntimeError(f"{type(module).__name__} drew no random blocks: its code is not what dynaxx knows")


class _Attention:
    """What both kinds of attention of a BigBird layer share."""

    dynaxx: Shared  # given by `encoders._sharing`

    def _project(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v, each (B, N, H, D)."""
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


class _BlockSparseAttention(_Attention):
    """The forward of `BigBirdBlockSparseAttention` and its like, for a subclass of one of them."""

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
        """As the base class: ((B, N, H * D), None) from hidden states and masks of blocks (B, blocks, block size)."""
        reason = self._dense_reason(kwargs) or self._mask_reason(hidden_states, from_blocked_mask, to_blocked_mask)
        if reason is not None:
            self._count(reason)
            masks = (band_mask, from_mask, to_mask, from_blocked_mask, to_blocked_mask)
            return super().forward(hidden_states, *masks, **kwargs)  # type: ignore[misc]
        assert from_blocked_mask is not None, "without one there is a reason"
        self.dynaxx.sparse += 1
        rows = self.dynaxx.once_per_mask(from_blocked_mask, "rows", lambda: from_blocked_mask.flatten(1) == 0)
        out = self._attend(*self._project(hidden_states), to_blocked_mask)
        return out.masked_fill(rows[:, :, None, None], 0.0).flatten(2), None

    def _attend(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        visits = self._visits(q.shape[1], q.device)
        once = self.dynaxx.once_per_mask
        visible = once(mask, "keys", lambda: mask.flatten(1) != 0)
        if self.dynaxx.global_keys == "fused":
            copies, layout = visits.with_copies
            k, v, shown = (_append_blocks(x, copies, self.block_size) for x in (k, v, visible))
            layout = once(mask, visits, lambda: hide_keys(layout, shown))
            return sparse_attention(q, k, v, layout)
        layouts = once(mask, visits, lambda: [(m, hide_keys(layout, visible)) for m, layout in visits.by_count])
        states = [(sparse_attention(q, k, v, layout, return_lse=True), m) for m, layout in layouts]
        return merge_states([(out, lse + math.log(m)) for (out, lse), m in states]).out

    def _visits(self: Any, seqlen: int, device: torch.device) -> Visits:
        """Drawn once for each length where the layer has a seed; another draw would be the same."""
        known = self.__dict__.setdefault("_dynaxx_drawn", {})
        key = (seqlen, self.training)
        if key not in known or self.seed is None:
            known[key] = draw_random_blocks(self, seqlen)
        drawn = known[key]
        return _visits(drawn.numpy().tobytes(), tuple(drawn.shape), self.block_size, device)

    def _mask_reason(self: Any, hidden: Tensor, from_mask: Tensor | None, to_mask: Tensor | None) -> str | None:
        if from_mask is None or to_mask is None:
            return "no mask"
        if hidden.shape[1] % self.block_size:
            return "length is no multiple of the block size"  # which the base class refuses
        for mask in (from_mask, to_mask):
            if not self.dynaxx.once_per_mask(mask, "binary", lambda mask=mask: bool(((mask == 0) | (mask == 1)).all())):
                return "mask is not 0 or 1"
        return None


class _DenseAttention(_Attention):
    """The forward of `BigBirdSelfAttention` and its like, for a subclass of one of them."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As the base class: ((B, N, H * D), None) from hidden states and an additive mask (B, 1, N, N)."""
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
        """Every pair but for masked keys; or why the mask is not one of keys."""
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


def _append_blocks(x: Tensor, blocks: Tensor, block_size: int) -> Tensor:
    """(B, N, ...) with some of its blocks again behind it."""
    if not len(blocks):
        return x
    return torch.cat([x, x.unflatten(1, (-1, block_size))[:, blocks].flatten(1, 2)], dim=1)


def _layout_block(block_size: int) -> int | None:
    return max((size for size in BLOCK_SIZES if block_size % size == 0), default=None)


def refusals(module: nn.Module) -> list[str]:
    """Why this attention module cannot be served rightly."""
    size = getattr(module, "block_size", None)
    if isinstance(size, int) and _layout_block(size) is None:
        return [f"its config has blocks of {size} tokens; blocks must be multiples of {BLOCK_SIZES[0]}"]
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
