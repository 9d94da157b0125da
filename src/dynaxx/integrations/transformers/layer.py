"""One attention call of one layer: dense for a reason, or its sequences by their runs, each with its own layout."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from dynaxx.integrations.runtime.guarding import LiveGuard
from dynaxx.integrations.transformers.decode import CacheMemory, decode_step, is_step, step_runs
from dynaxx.integrations.transformers.dense_fallback import dense_attention, dense_piece, dense_reason
from dynaxx.integrations.transformers.forward_context import ARGUMENT, BELOW, Dense, Pass
from dynaxx.integrations.transformers.masks import Run
from dynaxx.ops import sparse_attention
from dynaxx.policy import LayerPlan
from dynaxx.policy.decode import DecodePlan
from dynaxx.policy.guard import Level

if TYPE_CHECKING:
    from dynaxx.integrations.transformers.handle import Handle

logger = logging.getLogger("dynaxx")


class Work(NamedTuple):
    """The sequences of a call, by batch entry."""

    runs: list[list[Run]]
    dense: list[list[str]]  # why they are; "" if they are sparse
    plans: list[list[LayerPlan]]  # what those do

    @property
    def alike(self) -> bool:
        """Whether all batch entries have the same, so that they can run as one."""
        return all(entry == part[0] for part in self for entry in part)


class Step(NamedTuple):
    """A decoding step: all sequences of a call at once."""

    runs: list[Run]  # by batch entry
    plan: DecodePlan
    memory: CacheMemory


class Call(NamedTuple):
    """The tensors of a call and what holds for it: q (B, Hq, Lq, D), k and v (B, Hk, Lk, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scale: float | None
    guard: LiveGuard | None
    current: Pass
    place: tuple[int, Run | None] = (0, None)  # batch entry and run of a part

    def entry(self, b: int) -> Call:
        """One batch entry."""
        mask = self.mask if self.mask is None or self.mask.shape[0] == 1 else self.mask[b : b + 1]
        part = self._replace(q=self.q[b : b + 1], k=self.k[b : b + 1], v=self.v[b : b + 1], mask=mask)
        return part._replace(place=(b, None))

    def part(self, run: Run) -> Call:
        """One run."""
        if run[:4] == (0, self.q.shape[2], 0, self.k.shape[2]):  # all there is
            return self._replace(place=(self.place[0], run))
        rows, keys = slice(run.q_start, run.q_stop), slice(run.k_start, run.k_stop)
        mask = None if self.mask is None else self.mask[:, :, rows, keys]
        part = self._replace(q=self.q[:, :, rows], k=self.k[:, :, keys], v=self.v[:, :, keys], mask=mask)
        return part._replace(place=(self.place[0], run))


class Layer:
    """What one attention module does under a handle."""

    __slots__ = ("__weakref__", "dense", "handle", "index")

    def __init__(self, handle: Handle, index: int, dense: Dense) -> None:
        self.handle = handle
        self.index = index
        self.dense = dense

    def attend(
        self, current: Pass | None, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kwargs: Any
    ) -> tuple[Tensor, None]:
        """Attend, as `AttentionInterface` asks: q (B, Hq, Lq, D), k and v (B, Hk, Lk, D) to (B, Lq, Hq, D)."""
        current = current or self.handle.unannounced_pass(self.index)
        counts, deployed = self.handle.counts, current.deployed
        decodes = not current.steps and is_step(q.shape[2], k.shape[2])
        decodes = decodes and (q.shape[2] == 1 or self.index in deployed.decode)
        phase = "decode" if decodes else "prefill"
        work = (self._step if decodes else self._work)(current, module, q, k, mask, kwargs)
        if isinstance(work, str):
            counts.dense(self.index, work, phase)
            return self.dense(module, q, k, v, mask, **kwargs)
        guard = deployed.guard if self.index in deployed.plans else None
        call, breaker = Call(q, k, v, mask, kwargs.get("scaling"), guard, current), deployed.breakers[self.index]
        if call.guard is not None and call.guard.level(self.index) == Level.DENSE:
            if isinstance(work, Work):
                self._sample_unseen(call, work)
            counts.fallback(self.index, "guard", phase)
        elif breaker.resting():
            counts.fallback(self.index, "resting after failures", phase)
        else:
            try:
                out = self._run(call, work)
            except Exception as error:  # whatever a kernel does, the request gets its answer
                breaker.failed()
                counts.failed(self.index, error, phase)
            else:
                breaker.worked()
                counts.sparse(self.index)
                current.ran_sparse = True
                return out, None
        return self.dense(module, q, k, v, mask, **kwargs)

    def _work(
        self, current: Pass, module: nn.Module, q: Tensor, k: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> str | Work:
        """Why the whole call is dense; or what to do."""
        plan = current.deployed.plans.get(self.index)
        if plan is None:
            return "no rule"
        (batch, q_heads, seqlen_q, _), seqlen_k = q.shape, k.shape[2]
        q_block = plan.block_size[0]
        if seqlen_q < q_block:
            return "fewer queries than one block"
        if q_heads != plan.q_heads:
            return "heads are sharded"
        if (reason := current.why_dense(self.index)) is not None:
            return reason
        switch, rollout = current.deployed.switches[self.index], current.deployed.policy.rollout
        if seqlen_k < switch.dense_below:
            switch.sparse(seqlen_k)
            return BELOW
        reason = dense_reason(module, q, k, mask, kwargs)
        if reason is not None:
            return reason
        if mask is None:
            stop = min(seqlen_q, seqlen_k)  # a static cache is longer than what is in it
            runs = [[Run(0, seqlen_q, 0, stop, True)]] * batch
        else:
            found = current.runs(mask, batch)
            if found is None:
                return "mask is not causal sequences"
            runs = found

        def why_dense(run: Run, row: int) -> str:
            if not run.causal:
                return "padding or prefix"
            if not current.choice.row(row, batch):
                return current.choice.reason
            if not rollout.covers_length(run.seqlen_k):
                return "length not in the rollout"
            if current.steps and run.seqlen_q == 1:  # beside prompts, and not by a budget
                return "decode"
            return "" if run.seqlen_q >= q_block and switch.sparse(run.seqlen_k) else BELOW

        dense = [[why_dense(run, row) for run in entry] for row, entry in enumerate(runs)]
        reasons = {reason for entry in dense for reason in entry}
        if "" not in reasons:
            return min(reasons - {"padding or prefix"}, default=BELOW)
        if not plan.needs_tokens:
            return Work(runs, dense, [[plan] * len(entry) for entry in runs])
        missing = current.tokens.missing(batch, seqlen_k, runs)
        return missing or Work(runs, dense, _resolved(plan, current, runs, dense))

    def _step(
        self, current: Pass, module: nn.Module, q: Tensor, k: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> str | Step:
        """Why a decoding step is dense; or what to do."""
        plan = current.deployed.decode.get(self.index)
        if plan is None:
            return "decode" if self.index in current.deployed.plans else "no rule"
        if k.shape[1] * module.num_key_value_groups != q.shape[1]:  # type: ignore[operator]
            return "heads are sharded"
        if (reason := current.why_dense(self.index) or dense_reason(module, q, k, mask, kwargs)) is not None:
            return reason
        batch, seqlen_k = q.shape[0], k.shape[2]
        runs: list[Run] | str = [Run(0, q.shape[2], 0, seqlen_k, True)] * batch
        if mask is not None:
            runs = step_runs(current.runs(mask, batch))
        if isinstance(runs, str):
            return runs
        if current.memory is None:
            return "cache unknown"
        if any(not current.choice.row(row, batch) for row in range(batch)):
            return current.choice.reason
        longest = max(run.seqlen_k for run in runs)
        if not current.deployed.policy.rollout.covers_length(longest):
            return "length not in the rollout"
        if not current.deployed.decode_switches[self.index].sparse(longest):
            return BELOW
        return Step(runs, plan, current.memory)

    def _run(self, call: Call, work: Work | Step) -> Tensor:
        """(B, Lq, Hq, D), each sequence with its own layout."""
        for fault in self.handle.faults:
            fault(self.index)
        if isinstance(work, Step):
            step = self.handle.counts.decoding(self.index, call.q)
            out = decode_step(call.q, call.k, call.v, work.runs, work.plan, self.index, work.memory, call.scale)
            self.handle.counts.decoded(step, call.q)
            if call.guard is not None and call.guard.wants_call():
                call.guard.left_out("decode")
            return out
        if work.alike:
            return self._run_entry(call, work.runs[0], work.dense[0], work.plans[0])
        return torch.cat([self._run_entry(call.entry(b), *entry) for b, entry in enumerate(zip(*work, strict=True))])

    def _run_entry(self, call: Call, runs: list[Run], dense: list[str], plans: list[LayerPlan]) -> Tensor:
        pieces = []
        for run, reason, plan in zip(runs, dense, plans, strict=True):
            part = call.part(run)
            if reason:
                pieces.append(dense_piece(part.q, part.k, part.v, part.mask, part.scale, run))
                self.handle.counts.dense_sequences(self.index, reason, call.q.shape[0])
            else:
                pieces.append(self._sparse_piece(part, plan))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def _sparse_piece(self, part: Call, plan: LayerPlan) -> Tensor:
        """One sequence, (B, n, Hq, D)."""
        q, k, v = (x.transpose(1, 2) for x in (part.q, part.k, part.v))
        runs = plan if part.guard is None else part.guard.plan(self.index, plan)
        probe = self.handle.counts.probe.start(self.index, q)
        layout = part.current.layout(self.index, part.place, runs) or runs.layout(q, k, scale=part.scale)
        part.current.keep(self.index, part.place, runs, layout)
        probe.selected(layout)
        out = sparse_attention(q, k, v, layout, scale=part.scale)
        assert isinstance(out, Tensor), "without return_lse there is one result"
        probe.done(k, v)
        for watcher in self.handle.watchers:
            watcher(self.index, layout)
        if part.guard is not None and part.guard.wants_call():
            part.guard.take(self.index, q[:1], k[:1], v[:1], part.scale, plan, runs, out[:1])
        return out

    def _sample_unseen(self, call: Call, work: Work) -> None:
        """Show the guard what would have run, so that it sees when that would be good again."""
        assert call.guard is not None, "it keeps the layer dense"
        if not call.guard.wants_call():
            return
        b, i = next((b, i) for b, entry in enumerate(work.dense) for i, reason in enumerate(entry) if not reason)
        part = call.entry(b).part(work.runs[b][i])
        q, k, v = (x.transpose(1, 2) for x in (part.q, part.k, part.v))
        call.guard.take(self.index, q, k, v, part.scale, work.plans[b][i], None, None)


def _resolved(plan: LayerPlan, current: Pass, runs: list[list[Run]], dense: list[list[str]]) -> list[list[LayerPlan]]:
    """The plan of each sequence, for the tokens it has."""
    return [
        [plan if reason else current.tokens.resolve(plan, b, run) for run, reason in zip(*entry, strict=True)]
        for b, entry in enumerate(zip(runs, dense, strict=True))
    ]


LAYERS: weakref.WeakKeyDictionary[nn.Module, Layer] = weakref.WeakKeyDictionary()
_warned: set[str] = set()


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What `AttentionInterface` calls for every layer of every model with a policy."""
    if torch.compiler.is_compiling():
        if torch.compiler.is_dynamo_compiling() and (compiled := LAYERS.get(module)) is not None:
            compiled.handle.counts.compiled()
        return dense_attention(module)(module, query, key, value, attention_mask, **kwargs)
    current: Pass | None = kwargs.pop(ARGUMENT, None)
    if current is not None and key.shape[2] < current.below and not current.steps:  # the host decides here: be quick
        short, shape = current.deployed.short.get(module.layer_idx), query.shape  # type: ignore[call-overload]
        if short is not None and shape[2] >= short.least and shape[1] == short.q_heads:
            short.switch.last = False
            current.short += 1
            return short.dense(module, query, key, value, attention_mask, **kwargs)
    layer = LAYERS.get(module)
    if layer is None:  # a copy of a model with a policy, or one that shares its config
        _warn_once(f"{type(module).__name__} asks for dynaxx attention but has no policy: it runs dense")
        return dense_attention(module)(module, query, key, value, attention_mask, **kwargs)
    return layer.attend(current, module, query, key, value, attention_mask, kwargs)


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)
