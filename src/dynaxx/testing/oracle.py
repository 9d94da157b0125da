# SPDX-License-Identifier: Apache-2.0
"""The fp64 oracle, and the derived tolerance: at most twice the error of the same math done eagerly.

The error of the eager computation depends on its order of summation, and may be small by luck. If it is below the root
mean square error over all orders (`testing.rounding`), the latter is used instead. The oracle shares no code with the
kernels; it takes only the dense mask of a layout.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.testing.rounding import rounding_errors

AttendAll: TypeAlias = Callable[..., tuple[Tensor, Tensor | None]]  # (q, k, v, ...) -> (out, lse or None)
Attend = Callable[[Tensor, Tensor, Tensor, Any], tuple[Tensor, Tensor]]


class HasMask(Protocol):
    """Anything that defines which pairs are visible, such as a `BlockLayout`."""

    def to_dense(self) -> Tensor:
        """Return which pairs are visible, (batch | 1, q_heads | 1, seqlen_q, seqlen_k) bool."""


@typed
def oracle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute softmax attention over the visible pairs with the plain formula, in the dtype of the inputs.

    Args:
        q: (batch, seqlen_q, q_heads, head_dim).
        k: (batch, seqlen_k, kv_heads, head_dim).
        v: (batch, seqlen_k, kv_heads, head_dim_v).
        mask: bool, broadcastable to (batch, q_heads, seqlen_q, seqlen_k), True = visible.
        scale: softmax scale, head_dim ** -0.5 by default.
        softcap: as in `sparse_attention`.
        bias: added to the scaled and capped scores, broadcastable to (batch, q_heads, seqlen_q, seqlen_k).
        sinks: (q_heads,); a sink acts as an additional key with value zero that every query sees.

    Returns:
        out (batch, seqlen_q, q_heads, head_dim_v) in q's dtype and lse (batch, q_heads, seqlen_q), fp32 or fp64.
    """
    group_size = q.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not k.shape[1]:  # add a hidden key, because a maximum over no keys is undefined
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 1)) for x in (k, v))
        mask = torch.nn.functional.pad(mask, (0, 1))
    k, v = k.repeat_interleave(group_size, 2).transpose(1, 2), v.repeat_interleave(group_size, 2).transpose(1, 2)
    scores = ((q.transpose(1, 2) @ k.transpose(-1, -2)) * scale).to(torch.promote_types(q.dtype, torch.float32))
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].to(scores.dtype).expand(*scores.shape[:3], 1)], -1)
        v = torch.nn.functional.pad(v, (0, 0, 0, 1))
        mask = torch.nn.functional.pad(mask.expand(scores.shape[:3] + mask.shape[-1:]), (0, 1), value=True)
    top = scores.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True).detach()
    top = top.where(top.isfinite(), 0.0)
    weights = (scores - top).masked_fill(~mask, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    out = (weights / total.where(total > 0, 1.0)).to(v.dtype) @ v
    lse = torch.where(total > 0, total.where(total > 0, 1.0).log() + top, -torch.inf)[..., 0]
    return out.transpose(1, 2), lse


@dataclass(frozen=True)
class ErrorReport:
    """Largest error of one tensor against fp64, and its budget."""

    name: str
    error: float
    budget: float
    at: str = ""  # position of the largest error, with the value there and the expected value

    @property
    def ok(self) -> bool:
        """Return whether the error is within its budget."""
        return self.error <= self.budget  # False for NaN

    def __str__(self) -> str:
        """Return a line with the error, its budget, and its position if it is too large."""
        said = f"{self.name}: error {self.error:.2e}, budget {self.budget:.2e} "
        return said + ("(ok)" if self.ok else f"(FAIL){self.at and ' at '}{self.at}")


@typed
def check_forward(
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: HasMask,
    scale: float | None = None,
    *,
    softcap: float | None = None,
) -> list[ErrorReport]:
    """Report errors of `attend(q, k, v, layout) -> (out, lse)` against fp64, with derived budgets."""
    mask = layout.to_dense()
    exact = oracle_attention(q.double(), k.double(), v.double(), mask, scale, softcap)
    eager = oracle_attention(q, k, v, mask, scale, softcap)
    rounded = rounding_errors({"q": q, "k": k, "v": v}, mask, scale=scale, softcap=softcap)
    return error_reports(("out", "lse"), attend(q, k, v, layout), eager, exact, rounded)


@typed
def check_gradients(
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: HasMask,
    scale: float | None = None,
    seed: int = 0,
    *,
    softcap: float | None = None,
) -> list[ErrorReport]:
    """Report errors of dq, dk and dv for random gradients of out and lse, with derived budgets."""
    mask = layout.to_dense()
    generator = generator_of_gradients(seed, q.device)

    def grads(run: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out, lse = run(*leaves)
        seen = lse.isfinite()
        return torch.autograd.grad([out, lse[seen]], leaves, [do.to(out.dtype), dlse.to(lse.dtype)[seen]])

    do = torch.randn(*q.shape[:3], v.shape[-1], generator=generator, device=q.device, dtype=torch.float32).to(q.dtype)
    dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1], generator=generator, device=q.device, dtype=torch.float32)
    exact = grads(lambda q, k, v: oracle_attention(q, k, v, mask, scale, softcap), torch.float64)
    eager = grads(lambda q, k, v: oracle_attention(q, k, v, mask, scale, softcap), q.dtype)
    got = grads(lambda q, k, v: attend(q, k, v, layout), q.dtype)
    rounded = rounding_errors({"q": q, "k": k, "v": v}, mask, do, dlse, scale=scale, softcap=softcap)
    return error_reports(("dq", "dk", "dv"), got, eager, exact, rounded)


def generator_of_gradients(seed: int, device: torch.device) -> torch.Generator:
    """Return a generator whose numbers differ from those of inputs drawn with the same seed.

    If the gradients had the same values as q, errors that are normally independent would add up, and a kernel that
    mistakes one for the other would pass. `seed + 2**32` would not help, because CPU generators use 32 bits of a seed.
    """
    return torch.Generator(device).manual_seed(random.Random(f"gradients of {seed}").getrandbits(32))


def error_reports(
    names: tuple[str, ...],
    got: tuple[Tensor, ...],
    eager: tuple[Tensor, ...],
    exact: tuple[Tensor, ...],
    rounded: dict[str, float] | None = None,
) -> list[ErrorReport]:
    """Report each tensor's error and its budget: twice the larger of the eager error and `rounded`, plus rounding."""
    least = [(rounded or {}).get(name, 0.0) for name in names]
    return [_report(*each) for each in zip(names, got, eager, exact, least, strict=True)]


def _report(name: str, got: Tensor, eager: Tensor, exact: Tensor, rounded: float) -> ErrorReport:
    """Compare the positions of inf and nan first, then the largest difference of finite elements."""
    if got.shape != exact.shape:
        return ErrorReport(name, float("nan"), 0.0, f"shape {tuple(got.shape)} for {tuple(exact.shape)}")
    finite = exact.isfinite()
    if (other := got.isfinite() != finite).any():
        return ErrorReport(name, float("nan"), 0.0, f"{_place(got, exact, other)}, one of {int(other.sum())}")
    if not finite.any():
        return ErrorReport(name, 0.0, 0.0)
    error = lambda x: (x.double() - exact).abs().masked_fill(~finite, 0.0)
    errors = error(got)
    worst = float(errors.amax())
    rounding = torch.finfo(got.dtype).eps * float(exact[finite].abs().amax())
    budget = 2 * (max(float(error(eager).amax()), rounded) + rounding)
    return ErrorReport(name, worst, budget, _place(got, exact, errors) if worst > budget else "")


def _place(got: Tensor, exact: Tensor, most: Tensor) -> str:
    """Describe the element where `most` is largest: its index, its value and the expected value."""
    at = tuple(int(i) for i in torch.unravel_index(most.double().argmax(), most.shape))
    return f"{list(at)}: {float(got[at]):.6g} for {float(exact[at]):.6g}"
