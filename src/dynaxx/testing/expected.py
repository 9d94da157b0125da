# SPDX-License-Identifier: Apache-2.0
"""`Expected`: fp64 and eager results of one problem, computed once and compared with any number of backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from dynaxx.testing.oracle import AttendAll, ErrorReport, error_reports, generator_of_gradients
from dynaxx.testing.problems import Problem
from dynaxx.testing.rounding import rounding_errors


class Expected:
    """Results and gradients of one problem in fp64, and the rounding errors of the same math in q's dtype.

    Args:
        problem: the problem.
        seed: seed of the gradients of out and lse.
    """

    def __init__(self, problem: Problem, seed: int = 0) -> None:
        self._inputs = problem.inputs
        q, v = self._inputs["q"], self._inputs["v"]
        generator = generator_of_gradients(seed, torch.device("cpu"))
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu").to(q.device)
        self._do = draw(*q.shape[:3], v.shape[-1]).to(q.dtype)
        self._dlse = draw(q.shape[0], q.shape[2], q.shape[1])
        self._exact = self._run(problem.exact, torch.float64)
        self._eager = self._run(problem.eager or problem.exact, q.dtype)
        self._rounded = rounding_errors(
            self._inputs,
            problem.visible,
            self._do,
            self._dlse if "lse" in self._exact else None,
            scale=problem.scale,
            softcap=problem.asks.softcap,
            bias=problem.bias,
            merged=problem.eager is not None,
        )

    def reports(self, attend: AttendAll, move: Callable[[Tensor], Tensor] | None = None) -> list[ErrorReport]:
        """Report the errors of a function: results with and without gradients, and the gradients.

        Args:
            attend: the function.
            move: copies the gradient of out to another memory layout before it reaches `attend`.
        """
        alone = self.forward(attend)
        return [replace(each, name=f"{each.name} without grad") for each in alone] + self.with_gradients(attend, move)

    def forward(self, attend: AttendAll) -> list[ErrorReport]:
        """Report the errors of a function's results, computed without gradients."""
        with torch.no_grad():
            return self._compare(_named(*attend(*self._inputs.values())))

    def with_gradients(self, attend: AttendAll, move: Callable[[Tensor], Tensor] | None = None) -> list[ErrorReport]:
        """Report the errors of a function's results and gradients; `move` is that of `reports`."""
        return self._compare(self._run(attend, self._inputs["q"].dtype, move))

    def _compare(self, got: dict[str, Tensor]) -> list[ErrorReport]:
        pick = lambda found: tuple(found[name] for name in got)
        return error_reports(tuple(got), pick(got), pick(self._eager), pick(self._exact), self._rounded)

    def _run(
        self, attend: AttendAll, dtype: torch.dtype, move: Callable[[Tensor], Tensor] | None = None
    ) -> dict[str, Tensor]:
        leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in self._inputs.items()}
        out, lse = attend(*leaves.values())
        given, grads = [out], [self._do.to(out.dtype)]
        if move is not None:
            out.register_hook(move)
        if lse is not None:
            seen = lse.isfinite()
            given, grads = [out, lse[seen]], [*grads, self._dlse.to(lse.dtype)[seen]]
        found = torch.autograd.grad(given, list(leaves.values()), grads)
        return _named(out.detach(), lse) | {f"d{name}": grad for name, grad in zip(leaves, found, strict=True)}


def _named(out: Tensor, lse: Tensor | None) -> dict[str, Tensor]:
    return {"out": out} if lse is None else {"out": out, "lse": lse.detach()}
