# SPDX-License-Identifier: Apache-2.0
"""`Call`: a call over a split sequence but for its tensors, the kernels of its layouts, and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dynaxx.derivatives import first_derivative_only
from dynaxx.kernels.registry import ATTENTION
from dynaxx.kernels.scale import softmax_scale
from dynaxx.kernels.sinks import add_sinks
from dynaxx.layout import BlockLayout
from dynaxx.ops.attention import SparseAttentionOutput
from dynaxx.ops.checks import check_sinks, check_softcap
from dynaxx.ops.dispatch import backend_for, score_options


class Gradients(NamedTuple):
    """The gradients of out and lse, the inputs and the results, from which a backward pass computes."""

    do: Tensor
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor

    def part(
        self, heads: slice, k: Tensor, v: Tensor, rows: Callable[[Tensor, int], Tensor] = lambda x, dim: x
    ) -> Gradients:
        """Return the part of some q heads over these keys and values; `rows` takes queries along a dimension."""
        by_token, by_head = (lambda x: rows(x[:, :, heads], 1)), (lambda x: rows(x[:, heads], 2))
        dlse = None if self.dlse is None else by_head(self.dlse)
        return Gradients(by_token(self.do), dlse, by_token(self.q), k, v, by_token(self.out), by_head(self.lse))


@dataclass(frozen=True)
class Call:
    """The arguments that all calls over a split sequence share."""

    group: ProcessGroup
    scale: float
    softcap: float | None
    backend: str
    sinks: Tensor | None
    needs_grad: bool
    needs_lse: bool

    @staticmethod
    def options(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
        return_lse: bool,
        backend: str,
    ) -> dict[str, Any]:
        """Check the arguments of a call, and return the fields that follow from them, all but the group."""
        if sinks is not None:
            check_sinks(sinks, q)
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        return {
            "scale": softmax_scale(scale, q.shape[-1]),
            "softcap": None if softcap is None else check_softcap(softcap),
            "backend": backend,
            "sinks": sinks,
            "needs_grad": needs_grad,
            "needs_lse": needs_grad or return_lse or sinks is not None,
        }

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse of one layout; a given `out` receives the result."""
        found: tuple[Tensor, Tensor] = self._kernels(q, k, v, layout).attention_forward(
            q, k, v, layout, self.scale, out=out, **score_options(self.softcap)
        )
        return found

    def backward(self, given: Gradients, layout: BlockLayout) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv of one layout."""
        kernels = self._kernels(given.q, given.k, given.v, layout)
        found: tuple[Tensor, Tensor, Tensor] = kernels.attention_backward(
            *given, layout, self.scale, **score_options(self.softcap)
        )
        return found

    def _kernels(self, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout) -> Any:
        return ATTENTION.kernels(
            backend_for(q, k, v, layout, self.softcap, self.backend, needs_grad=self.needs_grad)[0]
        )


Forward = Callable[..., tuple[Tensor, Tensor | None, Any]]  # (q, k, v, call) -> out, lse, what backward needs
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]  # (`Gradients`, call, that) -> dq, dk, dv


def attend(
    forward: Forward, backward: Backward, q: Tensor, k: Tensor, v: Tensor, call: Call, *, return_lse: bool
) -> Tensor | SparseAttentionOutput:
    """Return the output of a call, or (out, lse). Differentiable if one of q, k and v is."""
    given = (q, k, v, call)
    out, lse = _Attend.apply(forward, backward, *given) if call.needs_grad else forward(*given)[:2]
    if call.sinks is not None:
        assert lse is not None, "sinks need it"
        out, lse = add_sinks(out, lse, call.sinks)
    if not return_lse:
        return out
    assert lse is not None, "it was asked for"
    return SparseAttentionOutput(out, lse)


class _Attend(torch.autograd.Function):
    """Gather, compute and return gradients in stages, so that the exchange of a stage overlaps with computation.

    The backward pass gathers the keys and values of other ranks again instead of keeping them, because sequences are
    split to save memory.
    """

    @staticmethod
    def forward(ctx: Any, forward: Forward, backward: Backward, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Any:
        out, lse, kept = forward(q, k, v, call)
        assert lse is not None, "gradients need it"
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        ctx.backward_pass, ctx.call, ctx.kept = backward, call, kept
        return out, lse

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:
        saved = ctx.saved_tensors
        given = Gradients(torch.zeros_like(saved[3]) if do is None else do, dlse, *saved)
        return None, None, *ctx.backward_pass(given, ctx.call, ctx.kept), None
