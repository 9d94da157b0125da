# SPDX-License-Identifier: Apache-2.0
"""`explain`: report which backend would serve a call, and why the others would not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.kernels.attention.contract import AttentionProblem
from dynaxx.kernels.decode.contract import DecodeProblem
from dynaxx.kernels.device import gpu_of
from dynaxx.kernels.proven import never_ran
from dynaxx.kernels.registry import ATTENTION, DECODE, SELECTION
from dynaxx.kernels.selection.contract import SelectionProblem
from dynaxx.layout import BlockLayout, PackedLayout
from dynaxx.layout.host import never_traced
from dynaxx.layout.paging import PagedCache
from dynaxx.ops.checks import check_inputs, check_packed
from dynaxx.ops.decode_checks import check_cache, check_queries, decode_problem
from dynaxx.ops.dispatch import with_bias
from dynaxx.ops.position_bias import PositionBias, bias_by_distance
from dynaxx.selection.base import Hybrid, Selector, selection_grid
from dynaxx.selection.device import selection_problem


@dataclass(frozen=True)
class Explanation:
    """Result of `explain`. Print it or read its fields."""

    problem: AttentionProblem | DecodeProblem | SelectionProblem
    chosen: str
    reasons: Mapping[str, list[str]]  # by backend; empty list if the backend could serve
    density: float | None = None  # visited / causally visible blocks of the layout, if there is one
    operation: str = field(default="attention", kw_only=True)  # of `kernels.proven.OPERATIONS`

    @property
    def unproven(self) -> str:
        """Return a warning if the chosen GPU kernels never ran on a GPU like this one; "" if they did."""
        if self.chosen != "triton":
            return ""
        return never_ran(gpu_of(self.problem.device), self.operation)

    def __str__(self) -> str:
        """Return a line per backend: whether it would run, or the reasons against it."""
        lines = [str(self.problem)]
        if self.density is not None:
            lines.append(f"visited blocks: {self.density:.1%} of the causally visible blocks")
        for name, why in self.reasons.items():
            verdict = "would run" if name == self.chosen else "; ".join(why) or "could serve, but is less preferred"
            lines.append(f"  {name:<10} {verdict}")
        return "\n".join([*lines, *filter(None, [self.unproven])])


@never_traced
@typed
def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    *,
    softcap: float | None = None,
    position_bias: PositionBias | None = None,
    backend: str = "auto",
) -> Explanation:
    """Report which backend `sparse_attention` would run for these arguments, and why the others would not.

    See `explain_decode`, `explain_selected` and `explain_selection` for the other operations.

    Args:
        q: queries, as for `sparse_attention`; packed inputs are allowed.
        k: keys, as for `sparse_attention`.
        v: values, as for `sparse_attention`.
        layout: as for `sparse_attention`.
        softcap: as for `sparse_attention`.
        position_bias: as for `sparse_attention`, whose other arguments do not affect the choice.
        backend: "auto" or a backend's name.

    Raises:
        ValueError, TypeError, UnsupportedInputError: like `sparse_attention`.
    """
    if isinstance(layout, PackedLayout) and q.ndim == 3:
        check_packed(q, k, v, layout, None, None)
        q, k, v = q[None], k[None], v[None]
    bias = bias_by_distance(position_bias, q, k, layout)
    problem = with_bias(check_inputs(q, k, v, layout, softcap=softcap), bias)
    return Explanation(problem, ATTENTION.resolve(problem, backend), ATTENTION.explain(problem), layout.density())


@never_traced
@typed
def explain_decode(q: Tensor, cache: PagedCache, *, backend: str = "auto") -> Explanation:
    """Report which backend `sparse_decode` would run for these arguments, and why the others would not.

    Args:
        q: queries, as for `sparse_decode`.
        cache: as for `sparse_decode`, whose other arguments do not affect the choice.
        backend: "auto" or a backend's name.

    Raises:
        ValueError, TypeError, UnsupportedInputError: like `sparse_decode`.
    """
    check_cache(cache)
    check_queries(q, cache)
    problem = decode_problem(cache, q)
    return Explanation(problem, DECODE.resolve(problem, backend), DECODE.explain(problem), operation="decode")


@never_traced
@typed
def explain_selection(
    q: Tensor, k: Tensor, rule: Selector | Hybrid, *, causal: bool = True, block_size: int | tuple[int, int] = 64
) -> Explanation:
    """Report whether `select_blocks` would run GPU kernels or torch code ("torch"), and why.

    Args:
        q: queries, as for `select_blocks`.
        k: keys, as for `select_blocks`.
        rule: a selector or a hybrid.
        causal: hide keys after the query.
        block_size: as for `select_blocks`, whose other arguments do not affect the choice.

    Raises:
        ValueError, TypeError: like `select_blocks`.
    """
    selector = rule.selector if isinstance(rule, Hybrid) else rule
    problem = selection_problem(q, selection_grid(q, k, block_size, causal), selector)
    reasons: dict[str, list[str]] = {**SELECTION.explain(problem), "torch": []}
    chosen = next(name for name, why in reasons.items() if not why)
    return Explanation(problem, chosen, reasons, operation="selection")
