# SPDX-License-Identifier: Apache-2.0
"""`Selector`, a rule over data that gives a `BlockLayout`, and `Hybrid`, a pattern combined with a selector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.derivatives import refuse_transforms
from dynaxx.kernels.scale import softmax_scale
from dynaxx.layout import BlockGrid, BlockLayout, as_block_size
from dynaxx.layout.host import lasting, never_traced
from dynaxx.patterns.base import Pattern
from dynaxx.selection import in_core
from dynaxx.selection.choice import Choice
from dynaxx.selection.device import select_on_device, serves
from dynaxx.selection.in_torch import select_in_torch
from dynaxx.selection.scorers.base import GPU_MEMORY_BUDGET, MEMORY_BUDGET
from dynaxx.settings import Configured


class Selector(Choice):
    """A choice of blocks per q head that depends on the data.

    Selectors are immutable and hashable; `pattern | selector` is a `Hybrid`. The constructors of selectors and scorers
    raise TypeError or ValueError if a setting has a wrong type or is out of range. A subclass must define `choose`,
    `scorer` and `budget_field`.
    """

    @typed
    def select(
        self,
        q: Tensor,
        k: Tensor,
        *,
        causal: bool = True,
        block_size: int | tuple[int, int] = 64,
        scale: float | None = None,
        memory_budget: int | None = None,
    ) -> BlockLayout:
        """Choose kv blocks for every q block. See `select_blocks`."""
        return _select(q, k, None, self, causal, block_size, scale, memory_budget)

    def __or__(self, pattern: object) -> Hybrid:
        """Return the hybrid `pattern | selector`, in either order."""
        return Hybrid(pattern, self) if isinstance(pattern, Pattern) else NotImplemented

    __ror__ = __or__


@dataclass(frozen=True)
class Hybrid(Configured, kind="hybrid"):
    """A pattern that is always visible, and a selector that spends its budget on the rest."""

    pattern: Pattern
    selector: Selector

    @typed
    def select(
        self,
        q: Tensor,
        k: Tensor,
        *,
        causal: bool = True,
        block_size: int | tuple[int, int] = 64,
        scale: float | None = None,
        memory_budget: int | None = None,
    ) -> BlockLayout:
        """Choose kv blocks beside the pattern's. See `select_blocks`."""
        return _select(q, k, self.pattern, self.selector, causal, block_size, scale, memory_budget)

    def __or__(self, pattern: object) -> Hybrid:
        """Return the hybrid that also shows what `pattern` shows."""
        return Hybrid(self.pattern | pattern, self.selector) if isinstance(pattern, Pattern) else NotImplemented

    __ror__ = __or__

    @property
    def needs_tokens(self) -> bool:
        """Return whether the pattern depends on a request's tokens. See `Pattern.needs_tokens`."""
        return self.pattern.needs_tokens

    def resolve(self, input_ids: Tensor | Sequence[int]) -> Hybrid:
        """Return this rule for one request. See `Pattern.resolve`."""
        return Hybrid(self.pattern.resolve(input_ids), self.selector)

    def __repr__(self) -> str:
        """Return the pattern and the selector, joined by `|`."""
        return f"{self.pattern!r} | {self.selector!r}"


@never_traced
@typed
def select_blocks(
    q: Tensor,
    k: Tensor,
    rule: Pattern | Selector | Hybrid,
    *,
    causal: bool = True,
    block_size: int | tuple[int, int] = 64,
    scale: float | None = None,
    memory_budget: int | None = None,
) -> BlockLayout:
    """Build the layout of a pattern, a selector, or both for the given queries and keys.

    Args:
        q: (batch, seqlen_q, q_heads, head_dim).
        k: (batch, seqlen_k, kv_heads, head_dim); q_heads must be a multiple of kv_heads.
        rule: a pattern, a selector, or `pattern | selector`. A pattern alone ignores the data, and all heads share its
            layout.
        causal: hide keys after the query.
        block_size: tokens per block, or (q_block, kv_block).
        scale: softmax scale, default head_dim ** -0.5; estimates of attention mass depend on it.
        memory_budget: bytes of temporary memory for scoring and choosing, 64 MiB by default and 1 GiB on a GPU. A
            smaller budget takes more, smaller steps. The budget excludes q, k, and the layout (about 100 bytes per
            visited block while it is built). Summaries of all keys (docs/guides/selection.md lists their sizes) and
            the scores of one row of q blocks cannot be split and may exceed it.

    Returns:
        A layout per batch entry and q head. No gradient flows through the choice.

    Raises:
        TypeError: `rule` is not a rule.
        ValueError: shapes do not fit, the scale is not finite, the memory budget is below 1, or a per-head budget is
            for another number of heads.
    """
    if isinstance(rule, Pattern):
        return rule.layout(q.shape[1], k.shape[1], causal=causal, block_size=block_size, device=q.device)
    if not isinstance(rule, Selector | Hybrid):
        raise TypeError(f"`rule` must be a pattern, a selector or pattern | selector, got {type(rule).__name__}")
    return rule.select(q, k, causal=causal, block_size=block_size, scale=scale, memory_budget=memory_budget)


@never_traced
@torch.no_grad()
@lasting
def _select(
    q: Tensor,
    k: Tensor,
    pattern: Pattern | None,
    selector: Selector,
    causal: bool,
    block_size: int | tuple[int, int],
    scale: float | None,
    memory_budget: int | None,
) -> BlockLayout:
    refuse_transforms("`select_blocks`", q, k, fix="choose blocks outside the transformed function")
    grid = selection_grid(q, k, block_size, causal)
    if memory_budget is None:
        memory_budget = GPU_MEMORY_BUDGET if q.is_cuda else MEMORY_BUDGET
    if memory_budget < 1:
        raise ValueError(f"`memory_budget` must be >= 1 byte, got {memory_budget}")
    scale = softmax_scale(scale, q.shape[3])
    if serves(q, grid, selector):
        return select_on_device(q, k, pattern, selector, grid, scale, memory_budget)
    if in_core.serves(q, k, grid, selector, memory_budget):
        return in_core.select_in_core(q, k, pattern, selector, grid, scale)
    return select_in_torch(q, k, pattern, selector, grid, scale, memory_budget)


def selection_grid(q: Tensor, k: Tensor, block_size: int | tuple[int, int], causal: bool) -> BlockGrid:
    """Check the shapes of q and k, and return the grid of blocks among which a selector chooses."""
    for name, tensor in (("q", q), ("k", k)):
        if tensor.ndim != 4 or not tensor.is_floating_point():
            raise ValueError(
                f"`{name}` must be (batch, seqlen, heads, head_dim) of floats, got {tensor.dtype} {tuple(tensor.shape)}"
            )
    fit = q.shape[0] == k.shape[0] and q.shape[-1] == k.shape[-1]
    if not fit or 0 in (q.shape[2], k.shape[2]) or q.shape[2] % k.shape[2]:
        raise ValueError(
            "`q` and `k` must agree in batch and head_dim, q_heads >= 1 a multiple of kv_heads, "
            f"got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    return BlockGrid(q.shape[1], k.shape[1], as_block_size(block_size), causal)
