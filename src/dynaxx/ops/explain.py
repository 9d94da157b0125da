# SPDX-License-Identifier: Apache-2.0
"""Which backend would serve a call, and why the others would not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.kernels.problem import AttentionProblem, DecodeProblem, SelectionProblem
from dynaxx.kernels.registry import ATTENTION, DECODE, SELECTION
from dynaxx.layout import BlockLayout, PackedLayout
from dynaxx.layout.paging import PagedCache
from dynaxx.ops.checks import check_inputs, check_packed
from dynaxx.ops.decode_checks import check_cache, check_queries
from dynaxx.ops.decode_dispatch import decode_problem
from dynaxx.selection.base import Hybrid, Selector, selection_grid
from dynaxx.selection.device import selection_problem


@dataclass(frozen=True)
class Explanation:
    """What `explain` found: print it, or read its fields."""

    problem: AttentionProblem | DecodeProblem | SelectionProblem
    chosen: str
    reasons: Mapping[str, list[str]]  # by backend; empty where it could serve
    density: float | None = None  # visited / causally visible blocks, of a layout

    def __str__(self) -> str:
        lines = [str(self.problem)]
        if self.density is not None:
            lines.append(f"visited blocks: {self.density:.1%} of the causally visible ones")
        for name, why in self.reasons.items():
            verdict = "would run" if name == self.chosen else "; ".join(why) or "could serve, comes later in the order"
            lines.append(f"  {name:<10} {verdict}")
        return "\n".join(lines)


@typed
def explain(
    q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, *, softcap: float | None = None, backend: str = "auto"
) -> Explanation:
    """Say which backend `sparse_attention` would run on the same arguments, and why the others would not.

    See `explain_decode`, `explain_selected` and `explain_selection` for the other operations.

    Args:
        q, k, v, layout, softcap, backend: as `sparse_attention`, packed inputs included; its other arguments do not
            change the choice.

    Raises:
        ValueError, TypeError, UnsupportedInputError: as `sparse_attention` would.
    """
    if isinstance(layout, PackedLayout) and q.ndim == 3:
        check_packed(q, k, v, layout, None, None)
        q, k, v = q[None], k[None], v[None]
    problem = check_inputs(q, k, v, layout, softcap=softcap)
    return Explanation(problem, ATTENTION.resolve(problem, backend), ATTENTION.explain(problem), layout.density())


@typed
def explain_decode(q: Tensor, cache: PagedCache, *, backend: str = "auto") -> Explanation:
    """Say which backend `sparse_decode` would run on the same arguments, and why the others would not.

    Args:
        q, cache, backend: as `sparse_decode`; its other arguments do not change the choice.

    Raises:
        ValueError, TypeError, UnsupportedInputError: as `sparse_decode` would.
    """
    check_cache(cache)
    check_queries(q, cache)
    problem = decode_problem(cache, q)
    return Explanation(problem, DECODE.resolve(problem, backend), DECODE.explain(problem))


@typed
def explain_selection(
    q: Tensor, k: Tensor, rule: Selector | Hybrid, *, causal: bool = True, block_size: int | tuple[int, int] = 64
) -> Explanation:
    """Say whether `select_blocks` would choose by GPU kernels or in torch ("torch"), and why.

    Args:
        q, k, rule, causal, block_size: as `select_blocks`; its other arguments do not change the choice.

    Raises:
        ValueError, TypeError: as `select_blocks` would.
    """
    selector = rule.selector if isinstance(rule, Hybrid) else rule
    problem = selection_problem(q, selection_grid(q, k, block_size, causal), selector)
    reasons: dict[str, list[str]] = {**SELECTION.explain(problem), "torch": []}
    return Explanation(problem, next(name for name, why in reasons.items() if not why), reasons)
