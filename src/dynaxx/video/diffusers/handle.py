# SPDX-License-Identifier: Apache-2.0
"""`apply` a policy to a transformer of diffusers, and its `Handle`."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from dynaxx.arguments import typed
from dynaxx.errors import UnsupportedInputError
from dynaxx.integrations.runtime.routing import DenseReason
from dynaxx.layout import BlockLayout
from dynaxx.layout.host import never_traced
from dynaxx.policy import KILL_SWITCH, KillSwitch, LayerPlan
from dynaxx.video.attention import padding_of
from dynaxx.video.diffusers.families import attention_modules, family_of, model_facts, original, timestep_of
from dynaxx.video.diffusers.processors import Dense, sparse_processor
from dynaxx.video.grid import Grid
from dynaxx.video.policy import VideoPolicy
from dynaxx.video.residuals import Residuals

logger = logging.getLogger("dynaxx")

# Layer index, q, k, v, out, and the layout in the grid's order or None for dense attention.
Watcher = Callable[[int, Tensor, Tensor, Tensor, Tensor, BlockLayout | None], None]


@typed
def apply(model: nn.Module, policy: VideoPolicy, *, scheduler: Any = None) -> Handle:
    """Run a policy in a transformer of diffusers, in place, through its attention processors.

    Cross-attention stays dense. Calls that the policy does not cover run dense and are counted by reason.

    Args:
        model: `pipe.transformer`, compiled or not.
        policy: a policy for this transformer; see `dynaxx.video.load_policy`.
        scheduler: `pipe.scheduler`, from which a policy by steps learns the step; see also `Handle.step`.

    Returns:
        A handle, also a context manager; `handle.remove()` restores the model exactly.

    Raises:
        TypeError: `model` is no model, or `policy` is no `VideoPolicy`.
        ValueError: the model has a handle already.
        PolicyError: the policy is for another model.
        UnsupportedInputError: the transformer is not one that can be served.
    """
    if not isinstance(policy, VideoPolicy):
        raise TypeError(f"`policy` must be a VideoPolicy, got {type(policy).__name__}")
    model = original(model)
    policy.model.check(model_facts(model))
    modules = attention_modules(model)
    if any(hasattr(module.processor, "dynaxx_layer") for _, module in modules):
        raise ValueError("`model` has a policy already; call remove() on its handle first")
    return Handle(model, policy, scheduler)


class Layer:
    """One attention layer under a handle."""

    def __init__(self, handle: Handle, index: int) -> None:
        self.handle, self.index, self.residuals = handle, index, Residuals()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, dense: Dense) -> Tensor:
        """Return attention of (batch, seqlen, heads, head_dim), or what `dense` returns."""
        handle = self.handle
        plan, reason = handle.plan(self.index, q, k)
        padding = layout = None
        if plan is not None:
            try:
                padding = padding_of(mask, q)
            except UnsupportedInputError:
                plan, reason = None, "mask"
        if plan is None:
            out = self.attend_dense(reason, dense)
        else:
            grid, denser = handle.grid(q), handle.denser(self.index)
            out, layouts = self.residuals.attend(
                q, k, v, grid, plan, denser, step=handle.at, period=handle.period, padding=padding, scale=scale
            )
            layout = layouts[0]
            handle.counts["sparse" if len(layouts) == 1 else "refresh"] += 1
            handle.saw(*layouts)
        for watcher in handle.watchers:
            watcher(self.index, q, k, v, out, layout)
        return out

    def attend_dense(self, reason: str, dense: Dense) -> Tensor:
        """Return what `dense` returns, and count the reason."""
        self.handle.counts[f"dense: {reason}"] += 1
        self.handle.saw()
        return dense()


class Handle:
    """A policy that runs in a transformer.

    Attributes:
        policy: the policy in force.
        scheduler: the pipeline's scheduler, from which a policy by steps learns the step; None if nothing tells it.
        counts: number of attention calls by outcome: "sparse", "refresh", or "dense: " and the reason.
        share: the share of the denoising steps before the current one, None if it is unknown.
        at: the current step, and the number of all steps.
        period: `VideoPolicy.period` of the current forward pass.
        kill_switch: engages to run dense from the next forward pass on.
        watchers: functions that see every call of a layer, see `Watcher`.
    """

    def __init__(self, model: nn.Module, policy: VideoPolicy, scheduler: Any = None) -> None:
        self.policy, self.scheduler = policy, scheduler
        self.counts: Counter[str] = Counter()
        self.watchers: list[Watcher] = []
        self.kill_switch = KillSwitch(KILL_SWITCH)
        self._model, self._family = model, family_of(model)
        self._signature = inspect.signature(model.forward)
        self._plans: dict[float, dict[int, LayerPlan]] = {start: policy.plans(start) for start in policy.starts}
        self._denser = {start: policy.plans(start, refresh=True) for start in policy.starts}
        self.at = 0, 1  # the current step, and the number of all
        self.period = policy.period(0.0)
        self._shape: tuple[int, int, int] | None = None  # of the grid in the current forward pass
        self.share: float | None = None
        self._visited: float | Tensor = 0.0  # sum of the densities of all calls
        self._killed = False
        modules = [module for _, module in attention_modules(model)]
        self._layers = [Layer(self, index) for index in range(len(modules))]
        made = [sparse_processor(each.processor, layer) for each, layer in zip(modules, self._layers, strict=True)]
        self._replaced = [(each, each.processor, ours) for each, ours in zip(modules, made, strict=True)]
        for module, _, ours in self._replaced:
            module.processor = ours
        self._hook = model.register_forward_pre_hook(_StartHook(self), with_kwargs=True)

    def __reduce__(self) -> NoReturn:
        """Raise TypeError, because a handle belongs to one model object in one process."""
        raise TypeError(
            "a handle cannot be copied or pickled: copy or pickle the model, and call dynaxx.apply on the result with "
            "handle.policy"
        )

    def step(self, index: int, steps: int) -> None:
        """Say which denoising step comes next, for policies by steps without a scheduler.

        Args:
            index: the step, from 0.
            steps: number of all steps.
        """
        if not 0 <= index < steps:
            raise ValueError(f"`index` must be from 0 to {steps - 1}, got {index}")
        self.share, self.at = index / steps, (index, steps)

    def on_step_end(self, pipe: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """Follow a pipeline: pass this method as its `callback_on_step_end`, after `handle.step(0, steps)`."""
        steps = pipe.num_timesteps
        self.step((index + 1) % steps, steps)
        return tensors

    def remove(self) -> None:
        """Restore the model's own attention, but no processor that was set meanwhile."""
        self._hook.remove()
        for module, before, ours in self._replaced:
            if module.processor is ours:
                module.processor = before
        self._replaced = []

    def __enter__(self) -> Self:
        """Return the handle."""
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the model."""
        self.remove()

    def explain(self) -> str:
        """Return what each layer does in each part of the denoising, and how its calls ran so far."""
        lines = []
        for start, plans in self._plans.items():
            lines += [] if len(self._plans) == 1 else [f"from {start:.0%} of the steps:"]
            for layer in range(len(self._layers)):
                lines.append(f"layer {layer}: {_said(plans.get(layer))}")
                if layer in self._denser[start]:
                    said = _said(self._denser[start][layer])
                    lines.append(f"layer {layer}, refreshed every {self.policy.refresh_every:.0%}: {said}")
        return "\n".join([*lines, *(f"{count} calls {outcome}" for outcome, count in sorted(self.counts.items()))])

    def density(self) -> float:
        """Return the visited share of blocks over all calls so far; dense calls count 1.0, refreshes both rules."""
        return float(self._visited) / max(1, sum(self.counts.values()))

    def saw(self, *layouts: BlockLayout) -> None:
        """Record the blocks that a call visits; no layout is dense. Nothing is read back from the device."""
        visited = [each.kv_indptr.flatten()[-1] / each.visible_blocks(causal=False) for each in layouts]
        self._visited += sum(visited) if visited else 1

    def grid(self, q: Tensor) -> Grid:
        """Return the grid of the current forward pass for queries (batch, seqlen, heads, head_dim)."""
        assert self._shape is not None, "`plan` asked before"
        text = q.shape[1] - self._shape[0] * self._shape[1] * self._shape[2]
        return Grid(*self._shape, text=text, text_first=self._family.text_first, order=self.policy.order)

    def plan(self, layer: int, q: Tensor, k: Tensor) -> tuple[LayerPlan | None, str]:
        """Return the plan of a layer for these queries and keys, or None and the reason for dense attention."""
        shape = self._shape
        if self._killed:
            return None, DenseReason.KILLED
        if shape is None:
            return None, "grid is unknown"
        if q.shape[1] != k.shape[1] or q.shape[1] < shape[0] * shape[1] * shape[2]:
            return None, "not the whole grid"
        if q.shape[2] != self.policy.model.q_heads:
            return None, DenseReason.SHARDED
        if q.shape[1] < self.policy.dense_below:
            return None, DenseReason.BELOW
        return self._plans[self.period[0]].get(layer), DenseReason.NO_RULE

    def denser(self, layer: int) -> LayerPlan | None:
        """Return the plan of a layer's refreshes, None if it shares no residuals."""
        return self._denser[self.period[0]].get(layer)

    @never_traced
    def start(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Read the grid's shape and the step from a forward pass that starts."""
        arguments = self._signature.bind(*args, **kwargs).arguments
        self._killed = self.kill_switch.engaged() is not None
        self._shape = self._family.shape(model.config, arguments)
        if not self.policy.depends_on_step:
            return
        if self.scheduler is not None:
            times = torch.as_tensor(self.scheduler.timesteps, dtype=torch.float64, device="cpu")
            index = int((times - timestep_of(self._family, arguments)).abs().argmin())
            self.step(index, len(times))
        if self.share is None:
            raise UnsupportedInputError(
                "a policy by steps",
                {"step": ["set handle.scheduler = pipe.scheduler, or call handle.step(index, steps)"]},
            )
        self.period = self.policy.period(self.share)


class _StartHook:
    """The hook of a transformer that starts its passes. A copy or a pickle of it does nothing."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._handle.start(model, args, kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        logger.warning(
            "a transformer with a dynaxx handle is copied or pickled with its original attention, without the policy; "
            "call dynaxx.apply on the result"
        )
        return getattr, (nullcontext(), "__exit__")


def _said(plan: LayerPlan | None) -> str:
    groups = () if plan is None else plan.groups
    return "; ".join(f"heads {_ranges(group.heads)}: {group.rule!r}" for group in groups) or "dense"


def _ranges(heads: tuple[int, ...]) -> str:
    return f"{heads[0]}-{heads[-1]}" if len(heads) > 1 and heads[-1] - heads[0] == len(heads) - 1 else str([*heads])
