# SPDX-License-Identifier: Apache-2.0
"""`CallPlan`: how an attention call runs, as `planning` decides it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from dynaxx.integrations.runtime.counts import Counts
from dynaxx.integrations.runtime.routing import DenseReason, Route
from dynaxx.integrations.transformers.calls.decode import StepRows
from dynaxx.integrations.transformers.calls.dense_fallback import PlainMask
from dynaxx.integrations.transformers.calls.own_pattern import OwnPart
from dynaxx.integrations.transformers.masks.runs import MaskRun
from dynaxx.ops.prepared.layer import Prepared
from dynaxx.policy import LayerPlan

T = TypeVar("T")
PerRun = Sequence[Sequence[T]]  # by batch entry and run


@dataclass(slots=True)
class CallPlan:
    """The plan of equal calls of a pass. Lists have one item per batch entry, or one for all entries."""

    route: Route
    phase: str  # "prefill" or "decode"
    reason: DenseReason | None = None  # why the call does not run by a rule
    runs: PerRun[MaskRun] = ()
    dense: PerRun[DenseReason | None] = ()  # why each run is dense; None if it runs by a rule
    plans: PerRun[LayerPlan] = ()  # the rule of each run
    rows: Sequence[StepRows] = ()  # the rows of a decoding step
    parts: Sequence[OwnPart] = ()  # layouts of the model's own pattern
    argument: str = ""  # the name of an unsupported argument
    prepared: Prepared | None = None  # the call of later layers, prepared by the first one
    may_prepare: bool = True  # False after a call that cannot be prepared
    plain: PlainMask | None = None  # the mask of dense calls, made by the first one
    repeat: Callable[..., Tensor | None] | None = None  # a repetition by later layers; see `repeats`
    calls: int = 0  # dense and repeated calls that are not counted yet

    @property
    def entries_are_equal(self) -> bool:
        """Return whether all batch entries have the same plan, so that they can run as one call."""
        return all(entry == part[0] for part in (self.runs, self.dense, self.plans) for entry in part)

    def count(self, counts: Counts) -> None:
        """Count the calls that are not counted yet."""
        calls, self.calls = self.calls, 0
        if not calls:
            return
        if self.route is Route.DENSE:
            assert self.reason is not None, "a dense call must have a reason"
            counts.dense(self.reason, self.phase, calls)
        elif self.route is Route.OWN_PATTERN:
            counts.own_pattern(self.phase, calls)
        else:
            counts.sparse(calls)
            backend = "triton" if self.prepared is None else self.prepared.backend
            counts.probe.counter(backend, self.phase)(calls)
