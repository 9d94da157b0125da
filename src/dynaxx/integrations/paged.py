"""Attention of a serving engine's step: sequences of any length over a paged cache, sparse by a plan or dense.

Knows no engine. An adapter says where the sequences lie (`Step`) and hands over q and the cache of one layer.
Pages are (num_pages, kv_heads, page_size, 2 * head_dim), a token's k and v side by side, any strides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from dynaxx.layout import BlockLayout
from dynaxx.layout.paging import PagedCache
from dynaxx.ops import sparse_attention
from dynaxx.ops.decode import sparse_decode
from dynaxx.patterns import Causal
from dynaxx.policy import LayerPlan


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a step, in tokens; its queries are the last of its keys."""

    index: int  # its row of the page table
    start: int  # where its queries begin among the step's tokens
    seqlen_q: int
    seqlen_k: int

    @property
    def tokens(self) -> slice:
        """Its queries among the step's tokens."""
        return slice(self.start, self.start + self.seqlen_q)


class Split(NamedTuple):
    """Which sequences of a step a layer runs sparse, and which dense, by reason."""

    sparse: tuple[Row, ...]
    dense: tuple[Row, ...]
    reasons: dict[str, int]


class Step:
    """What one step of the engine computes: shared by all layers that read one page table.

    Args:
        page_table: (num_seqs, max_pages) int32, on the device.
        seqused_k: (num_seqs,) int32, keys of each sequence, those of this step included, on the device.
        starts: (num_seqs + 1,) where each sequence's queries begin.
        seqlens_k: `seqused_k` on the host; for sequences with one query an upper bound does.
    """

    def __init__(self, page_table: Tensor, seqused_k: Tensor, starts: Sequence[int], seqlens_k: Sequence[int]) -> None:
        self.page_table = page_table
        self.seqused_k = seqused_k
        self.rows = tuple(
            Row(index, starts[index], starts[index + 1] - starts[index], seqlen_k)
            for index, seqlen_k in enumerate(seqlens_k)
            if starts[index + 1] > starts[index]  # engines pad
        )
        self._splits: dict[tuple[int, int, bool], Split] = {}

    def with_page_table(self, page_table: Tensor) -> Step:
        """The same step for layers whose pages lie elsewhere."""
        other = Step(page_table, self.seqused_k, [], [])
        other.rows, other._splits = self.rows, self._splits
        return other

    def split(self, q_block: int, sparse_from: int, enabled: bool) -> Split:
        """Decide for each sequence by its own lengths alone, so that its neighbours in the batch change nothing."""
        key = (q_block, sparse_from, enabled)
        if key not in self._splits:
            self._splits[key] = self._split(*key)
        return self._splits[key]

    def _split(self, q_block: int, sparse_from: int, enabled: bool) -> Split:
        sparse, dense, reasons = [], [], Counter[str]()
        for row in self.rows:
            reason = _why_dense(row, q_block, sparse_from) if enabled else "switched off"
            if reason:
                dense.append(row)
                reasons[reason] += 1
            else:
                sparse.append(row)
        return Split(tuple(sparse), tuple(dense), dict(reasons))


def _why_dense(row: Row, q_block: int, sparse_from: int) -> str:
    if row.seqlen_q == 1:
        return "decode"
    if row.seqlen_q < q_block:
        return "fewer queries than one block"
    return "below dense_below" if row.seqlen_k < sparse_from else ""


@dataclass
class Counts:
    """What ran, over all layers of a process since the start or `clear`."""

    sparse: int = 0  # layer calls of a sequence
    dense: Counter[str] = field(default_factory=Counter)  # layer calls of a sequence, by reason
    visited_blocks: int = 0  # of sparse calls
    visible_blocks: int = 0  # what dense calls would have visited instead

    def add(self, split: Split) -> None:
        """Count one call of a layer."""
        self.sparse += len(split.sparse)
        self.dense.update(split.reasons)

    @property
    def density(self) -> float | None:
        """Visited / causally visible blocks of the sparse calls; None if there was none."""
        return self.visited_blocks / self.visible_blocks if self.visible_blocks else None

    def clear(self) -> None:
        """Start from zero."""
        self.sparse = self.visited_blocks = self.visible_blocks = 0
        self.dense.clear()


@dataclass
class PagedLayer:
    """One attention layer under a policy. Sequences only grow, so one border is the policy's hysteresis."""

    index: int  # of the layer in the model
    plan: LayerPlan  # of the heads that this process has
    sparse_from: int  # sequences of fewer keys are dense
    scale: float  # of the softmax
    counts: Counts
    enabled: Callable[[], bool] = lambda: True

    def split(self, step: Step) -> Split:
        """Which sequences of a step run sparse."""
        return step.split(self.plan.block_size[0], self.sparse_from, self.enabled())

    def sparse(self, q: Tensor, pages: Tensor, step: Step, rows: Sequence[Row], out: Tensor) -> None:
        """Attend by the plan, one sequence at a time.

        Args:
            q: (tokens, q_heads, head_dim), all tokens of the step.
            pages: of this layer, with the keys of this step.
            out: as q; what belongs to `rows` is written.
        """
        for row in rows:
            queries = q[None, row.tokens]
            k, v = sequence(pages, step.page_table[row.index], row.seqlen_k)
            layout = self.plan.layout(queries, k, scale=self.scale)
            self._count(layout)
            out[row.tokens] = sparse_attention(queries, k, v, layout, scale=self.scale)[0]

    def dense(self, q: Tensor, pages: Tensor, step: Step, rows: Sequence[Row], out: Tensor) -> None:
        """Attend to all visible keys; as `sparse`. Sequences with one query go together."""
        single = [row for row in rows if row.seqlen_q == 1]
        if single:
            at = torch.tensor([(row.start, row.index) for row in single], device=q.device)
            cache = as_cache(pages, step.page_table[at[:, 1]], step.seqused_k[at[:, 1]])
            out[at[:, 0]] = sparse_decode(q[at[:, 0], None], cache, scale=self.scale)[:, 0]
        for row in rows:
            if row.seqlen_q > 1:
                k, v = sequence(pages, step.page_table[row.index], row.seqlen_k)
                layout = Causal().layout(row.seqlen_q, row.seqlen_k, block_size=DENSE_BLOCK, device=q.device)
                out[row.tokens] = sparse_attention(q[None, row.tokens], k, v, layout, scale=self.scale)[0]

    def _count(self, layout: BlockLayout) -> None:
        if layout.device.type == "cpu":  # on a GPU counting would wait for it
            grid, heads = layout.grid(), self.plan.q_heads
            self.counts.visited_blocks += layout.nnz * (heads // layout.layout_heads)
            self.counts.visible_blocks += int(grid.causal_kv_blocks(grid.rows()).sum()) * heads


DENSE_BLOCK = 64


def as_cache(pages: Tensor, page_table: Tensor, seqused_k: Tensor) -> PagedCache:
    """The cache of some sequences, as views."""
    k, v = _tokens_first(pages)
    return PagedCache(k, v, seqused_k, page_table)


def sequence(pages: Tensor, page_table: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
    """k and v of one sequence, (1, seqlen_k, kv_heads, head_dim): views of one ordered copy.

    Args:
        page_table: (max_pages,) its row.
    """
    num_pages, heads, page_size, width = pages.shape
    used = page_table[: -(-seqlen_k // page_size)].long()
    if pages.is_contiguous():  # whole pages are copied, each head's behind one another: twice as fast
        order = used * heads + torch.arange(heads, device=used.device)[:, None]
        both = pages.view(num_pages * heads, page_size * width).index_select(0, order.flatten())
    else:
        both = pages[used].transpose(0, 1)
    both = both.reshape(heads, -1, width)[:, :seqlen_k].transpose(0, 1)[None]
    k, v = both.chunk(2, dim=-1)
    return k, v


def write(pages: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Store tokens in their pages.

    Args:
        k, v: (tokens, kv_heads, head_dim); rows past the last slot are padding.
        slots: (n,) integers, page * page_size + place in the page; negative ones are padding. On a CPU.
    """
    k, v = k[: len(slots)], v[: len(slots)]
    kept = slots >= 0
    if not bool(kept.all()):
        k, v, slots = k[kept], v[kept], slots[kept]
    at = (slots // pages.shape[2], slots % pages.shape[2])
    to_k, to_v = _tokens_first(pages)
    to_k[at], to_v[at] = k, v


def _tokens_first(pages: Tensor) -> tuple[Tensor, Tensor]:
    """k and v as (num_pages, page_size, kv_heads, head_dim) views."""
    k, v = pages.transpose(1, 2).chunk(2, dim=-1)
    return k, v
