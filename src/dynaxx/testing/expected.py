"""What one problem's answers must be: fp64 and eager results, computed once for any number of backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from dynaxx.testing.oracle import ErrorReport, cancellation, error_reports

FEW = 256  # rows; the eager error of fewer is a matter of chance, and four roundings more are allowed

AttendAll: TypeAlias = Callable[..., tuple[Tensor, Tensor | None]]  # (q, k, v, ...) -> (out, lse, None if it has none)


class Expected:
    """Answers and gradients of one problem in fp64, and what the same math loses when done eagerly in q's dtype.

    Args:
        inputs: q, k, v of (batch, seqlen, heads, head_dim), and what else has gradients, by name.
        exact: the formula, run in fp64.
        eager: the same math in the dtype of the inputs, `exact` where that is all it is.
        scale: softmax scale, default head_dim ** -0.5; says how much cancels in dq and dk.
        seed: of the gradients of out and lse.
    """

    def __init__(
        self,
        inputs: dict[str, Tensor],
        exact: AttendAll,
        eager: AttendAll | None = None,
        *,
        scale: float | None = None,
        seed: int = 0,
    ) -> None:
        self._inputs = inputs
        q, v = inputs["q"], inputs["v"]
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=generator).to(q.device)
        self._do = draw(*q.shape[:3], v.shape[-1]).to(q.dtype)
        self._dlse = draw(q.shape[0], q.shape[2], q.shape[1])
        self._exact = self._run(exact, torch.float64)
        self._eager = self._exact if q.dtype == torch.float64 and eager is None else self._run(eager or exact, q.dtype)
        self._extra = self._beside_the_eager_error(scale)
        if q.dtype == torch.float32 and q.shape[-1] == 1:
            for name, missing in self._rounded_rows(exact, scale).items():
                self._extra[name] += missing / 2  # budgets are twice what is summed up here

    def _beside_the_eager_error(self, scale: float | None) -> dict[str, float]:
        """What an answer may lose that the eager one does not, by name."""
        q, k, v = (self._inputs[name] for name in "qkv")
        eps, single = torch.finfo(q.dtype).eps, torch.finfo(torch.promote_types(q.dtype, torch.float32)).eps
        largest = {name: _largest(x) for name, x in self._exact.items()}
        extra = dict.fromkeys(self._exact, 0.0)
        if min(q[..., 0].numel(), k[..., 0].numel()) < FEW:
            rounding = dict.fromkeys(extra, eps) | {"lse": single}
            least = 1.0 if eps == single else 0.0  # of half precision, only what the answer's own size explains
            extra = {name: 4 * rounding[name] * max(1.0 if name == "lse" else least, largest[name]) for name in extra}
        # ds is a difference; and weights are read back from lse, whose rounding is a relative error of each
        cancelled = dict(zip(("dq", "dk"), cancellation(q, k, v, self._do, scale), strict=True))
        for name in ("dq", "dk", "dv"):
            extra[name] += cancelled.get(name, 0.0) + single * largest.get("lse", 0.0) * largest[name]
        if "dsinks" in extra:  # a sum over all queries of what a rounded out gives: its terms' roundings
            terms = (self._do.double() * self._exact["out"]).abs().sum((0, 1, 3))
            extra["dsinks"] += eps * float(terms.amax())
        return extra

    @torch.no_grad()
    def _rounded_rows(self, exact: AttendAll, scale: float | None) -> dict[str, float]:
        """What out and lse lose when all scores of a row are off by two roundings.

        A score of head_dim 1 is one product, and eager rounds that alone (the default scale is 1). A kernel that works
        in powers of 2 also rounds scale * log2(e), and q times that: eps / 2 each, the same for all scores of a row. By
        the scale's logarithm lse has the derivative sum(p s), out sum(p s v) - out sum(p s), and s is q k scale.
        """
        q, k, v, *others = (x.double() for x in self._inputs.values())
        keys, products = (exact(q, k, values, *others)[0] for values in (k, k * v))
        each = torch.finfo(torch.float32).eps * q * (1.0 if scale is None else scale)
        found = {"out": _largest(each * (products - self._exact["out"] * keys)), "lse": _largest(each * keys)}
        return {name: found[name] for name in found if name in self._exact}

    def reports(self, attend: AttendAll, move: Callable[[Tensor], Tensor] | None = None) -> list[ErrorReport]:
        """Errors of a function's answers, of its answers where no gradient is asked for, and of its gradients.

        Args:
            move: puts the gradient of out into other memory before it reaches `attend`.
        """
        with torch.no_grad():
            alone = _named(*attend(*self._inputs.values()))
        reports = [replace(report, name=f"{report.name} without grad") for report in self._compare(alone)]
        return reports + self._compare(self._run(attend, self._inputs["q"].dtype, move))

    def _compare(self, got: dict[str, Tensor]) -> list[ErrorReport]:
        pick = lambda found: tuple(found[name] for name in got)
        extra = tuple(self._extra.get(name, 0.0) for name in got)
        return error_reports(tuple(got), pick(got), pick(self._eager), pick(self._exact), extra)

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


def _largest(x: Tensor) -> float:
    finite = x[x.isfinite()]
    return float(finite.abs().amax()) if finite.numel() else 0.0


def _named(out: Tensor, lse: Tensor | None) -> dict[str, Tensor]:
    return {"out": out} if lse is None else {"out": out, "lse": lse.detach()}
