# SPDX-License-Identifier: Apache-2.0
"""`Settings`: the arguments of a call over a split sequence, and the kernels of a layout of its plan."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from dynaxx.distributed.plan import ExchangePlan
from dynaxx.layout import BlockLayout
from dynaxx.ops.checks import check_inputs
from dynaxx.ops.dispatch import choose_backend, load_backend, score_options


class Settings(NamedTuple):
    """The arguments of a call other than its tensors."""

    plan: ExchangePlan
    group: ProcessGroup
    scale: float
    softcap: float | None
    backend: str
    needs_grad: bool
    needs_lse: bool

    def kernels(self, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout) -> Any:
        """Return the backend for one layout of the plan, chosen once per combination of shapes."""
        key = (id(layout), q.shape, k.shape, v.shape, q.dtype, self.softcap, self.backend, self.needs_grad)
        known = self.plan.backends
        if key not in known:
            problem = check_inputs(q, k, v, layout, softcap=self.softcap, needs_grad=self.needs_grad)
            known[key] = choose_backend(problem, self.backend)
        return load_backend(known[key])

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse of one layout; a given `out` receives the result."""
        kernels = self.kernels(q, k, v, layout)
        found: tuple[Tensor, Tensor] = kernels.attention_forward(
            q, k, v, layout, self.scale, out=out, **score_options(self.softcap)
        )
        return found

    def backward(
        self,
        do: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        layout: BlockLayout,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv of one layout."""
        kernels = self.kernels(q, k, v, layout)
        found: tuple[Tensor, Tensor, Tensor] = kernels.attention_backward(
            do, dlse, q, k, v, out, lse, layout, self.scale, **score_options(self.softcap)
        )
        return found
