"""One layer's part of a step of continuous batching: which requests decode by a budget, and what the others do."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dynaxx.integrations.transformers.batch_decode import page_size_reason
from dynaxx.integrations.transformers.batch_step import BatchStep, Row
from dynaxx.integrations.transformers.dense_fallback import argument_reason
from dynaxx.integrations.transformers.forward_context import Pass
from dynaxx.integrations.transformers.layer import Layer
from dynaxx.integrations.transformers.masks import Run
from dynaxx.policy.guard import Level

# What `cache.update` has dealt with, and what is not for attention.
DONE_WITH = ("read_index", "write_index", "block_table", "logits_indices", "logits_processor_args")
FALLBACKS = ("guard", "resting after failures")  # dense though a rule says sparse


class BatchCall(NamedTuple):
    """One layer's part of a step: q (1, Hq, N, D), and the step's own k and v (1, Hk, N, D), not yet in the cache."""

    layer: Layer
    module: nn.Module
    current: Pass
    cache: Any
    allocator: Any
    q: Tensor
    k: Tensor
    v: Tensor
    arguments: dict[str, Any]

    @property
    def step(self) -> BatchStep:
        return self.current.steps[self.allocator.index]

    def run(self) -> Tensor:
        """(1, N, Hq, D): requests that decode by their budget, all others as a step without them."""
        rows, dense = self._decoding()
        if rows and (decoded := self._decode(rows, dense)) is not None:
            return decoded
        step, only_decodes = self.step, all(row.decodes for row in self.step.rows)
        if only_decodes and not rows:  # else its failure is counted
            self._count_dense(dense)
        key, value, kwargs = self._update(step.read_index)
        return self._attend(self.q, key, value, step.visible, step.runs, kwargs, dense=only_decodes)

    def _decoding(self) -> tuple[list[Row], Counter[str]]:
        """Which requests decode by a budget here, and why others that decode are dense."""
        single = [row for row in self.step.rows if row.decodes]
        if not single:
            return [], Counter()
        if (reason := self._why_dense()) is not None:
            return [], Counter({reason: len(single)})
        policy, sparse, dense = self.current.deployed.policy, [], Counter[str]()
        below, start = policy.decode_borders
        for row in single:  # its length only grows, so one border is the policy's hysteresis
            if row.run.seqlen_k < (below if start is None else start):
                dense["below dense_below"] += 1
            elif not policy.rollout.covers_length(row.run.seqlen_k):
                dense["length not in the rollout"] += 1
            else:
                sparse.append(row)
        return sparse, dense

    def _why_dense(self) -> str | None:
        """Why all requests that decode are dense in this layer, None if they need not be."""
        index, deployed = self.layer.index, self.current.deployed
        plan = deployed.decode.get(index)
        if plan is None:
            return "decode" if index in deployed.plans else "no rule"
        if self.k.shape[1] * self.module.num_key_value_groups != self.q.shape[1]:  # type: ignore[operator]
            return "heads are sharded"
        reason = self.current.why_dense(index) or argument_reason(for_attention(self.arguments))
        reason = reason or page_size_reason(self.allocator, plan.page_size)
        if reason is None and deployed.guard is not None and index in deployed.plans:
            reason = "guard" if deployed.guard.level(index) == Level.DENSE else None
        return reason or ("resting after failures" if deployed.breakers[index].resting() else None)

    def _decode(self, rows: list[Row], dense: Counter[str]) -> Tensor | None:
        """All of the step, `rows` by their budget; None if a kernel failed, which is counted."""
        index, counts, guard = self.layer.index, self.layer.handle.counts, self.current.deployed.guard
        breaker, step = self.current.deployed.breakers[index], self.step
        rest = step.without(rows)
        key, value, kwargs = self._update(rest.read_index)
        out = self.q.new_zeros(1, self.q.shape[2], self.q.shape[1], value.shape[-1])
        at = torch.tensor([row.run.q_start for row in rows]).to(out.device, non_blocking=True)
        try:
            for fault in self.layer.handle.faults:
                fault(index)
            q = self.q[0].transpose(0, 1)[at][:, None]
            measured = counts.decoding(index, q)
            memory = self.layer.handle.batches.of(self.allocator)
            out[0, at] = memory.decode(q, self.allocator, index, step, rows, kwargs.get("scaling"))[:, 0]
            counts.decoded(measured, q)
        except Exception as error:  # whatever a kernel does, the requests get their answer
            breaker.failed()
            counts.failed(index, error, "decode")
            return None
        breaker.worked()
        counts.sparse(index)
        self.current.ran_sparse = True
        for reason, sequences in dense.items():
            counts.dense_sequences(index, reason, sequences)
        if guard is not None and index in self.current.deployed.plans and guard.wants_call():
            guard.left_out("decode")
        if rest.rows:
            only_decodes = all(row.decodes for row in rest.rows)
            q = self.q.index_select(2, rest.queries)
            found = self._attend(q, key, value, rest.visible, rest.runs, kwargs, dense=only_decodes)
            out[:, rest.queries] = found
        return out

    def _update(self, read_index: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Store the step's keys and values, and read those at `read_index`, (1, Hk, keys, D); the arguments for
        attention. Where nothing is to be read, they are the step's own."""
        kwargs = dict(self.arguments)
        kwargs["read_index"] = [*kwargs["read_index"]]
        kwargs["read_index"][self.allocator.index] = read_index
        key, value = self.cache.update(
            key_states=self.k, value_states=self.v, layer_idx=self.layer.index, kwargs=kwargs
        )
        return key, value, for_attention(kwargs)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, runs: list[Run], kwargs: dict[str, Any], *, dense: bool
    ) -> Tensor:
        """Prompts by the prefill rules, single tokens beside them dense, or all dense."""
        if dense:
            return self.layer.dense(self.module, q, k, v, visible, **kwargs)[0]
        self.current.know_runs(visible, runs)
        return self.layer.attend(self.current, self.module, q, k, v, visible, kwargs)[0]

    def _count_dense(self, dense: Counter[str]) -> None:
        """All requests of the step decode, and all are dense."""
        reason = dense.most_common(1)[0][0]
        counts = self.layer.handle.counts
        count = counts.fallback if reason in FALLBACKS else counts.dense
        count(self.layer.index, reason, "decode")


def for_attention(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call that attention is to see."""
    return {name: value for name, value in kwargs.items() if name not in DONE_WITH}
