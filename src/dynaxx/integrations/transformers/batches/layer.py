# SPDX-License-Identifier: Apache-2.0
"""One layer's part of a step of continuous batching: route each request, and run it."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dynaxx.integrations.runtime.routing import CallProperties, DenseReason, SequenceLengths, route
from dynaxx.integrations.transformers.batches.decode import page_size_reason
from dynaxx.integrations.transformers.batches.step import BatchRow, BatchStep
from dynaxx.integrations.transformers.calls.arguments import AttentionCall, sinks_of
from dynaxx.integrations.transformers.calls.layer import Layer
from dynaxx.integrations.transformers.calls.signature import ScoreOptions
from dynaxx.integrations.transformers.forward_context import ForwardContext
from dynaxx.integrations.transformers.masks.runs import MaskRun

# Arguments that `cache.update` has used, or that attention does not need.
DONE_WITH = ("read_index", "write_index", "block_table", "logits_indices", "logits_processor_args")


class BatchCall(NamedTuple):
    """One layer's part of a step: q (1, Hq, N, D), and the step's k and v (1, Hk, N, D), not yet in the cache."""

    layer: Layer
    module: nn.Module
    current: ForwardContext
    cache: Any
    allocator: Any
    q: Tensor
    k: Tensor
    v: Tensor
    arguments: dict[str, Any]

    @property
    def step(self) -> BatchStep:
        """Return the step of this layer's cache."""
        return self.current.steps[self.allocator.index]

    def run(self) -> Tensor:
        """Return (1, N, Hq, D). Requests with a budget decode sparse; the others run as a smaller step."""
        rows, dense = self._decoding()
        if rows and (decoded := self._decode(rows, dense)) is not None:
            return decoded
        step, only_decodes = self.step, all(row.decodes for row in self.step.rows)
        if only_decodes and not rows:  # otherwise a kernel failed, which is counted
            self.layer.passes.counts.dense(dense.most_common(1)[0][0], "decode")
        key, value, kwargs = self._update(step.read_index)
        return self._attend(self.q, key, value, step.visible, step.runs, kwargs, dense=only_decodes)

    def _decoding(self) -> tuple[list[BatchRow], Counter[DenseReason]]:
        """Return the requests that decode by a budget, and the reasons why other decoding requests are dense."""
        single = [row for row in self.step.rows if row.decodes]
        if not single:
            return [], Counter()
        index, deployed = self.layer.index, self.current.deployed
        blocked = self.current.blocked
        if blocked is None and index in deployed.decode:
            blocked = deployed.interruption(index)
        # A sequence only grows, so one border suffices for hysteresis.
        rules = deployed.rules_of(index)
        state = deployed.state(index, blocked)._replace(was_long=False, decode_was_long=False)
        call, sparse, dense = CallProperties(self._unserved()), [], Counter[DenseReason]()
        for row in single:
            found = route(rules, state, call, SequenceLengths(row.run.seqlen_q, row.run.seqlen_k, decoding=True))
            if found.reason is None:
                sparse.append(row)
            else:
                dense[found.reason] += 1
        return sparse, dense

    def _unserved(self) -> DenseReason | None:
        """Return why the call cannot decode by a budget, or None if it can."""
        plan = self.current.deployed.decode.get(self.layer.index)
        if plan is None:
            return None
        if self.k.shape[1] * self.module.num_key_value_groups != self.q.shape[1]:  # type: ignore[operator]
            return DenseReason.SHARDED
        scores = ScoreOptions.of(for_attention(self.arguments), self.layer.dense)
        return scores.unserved or page_size_reason(self.allocator, plan.page_size)

    def _decode(self, rows: list[BatchRow], dense: Counter[DenseReason]) -> Tensor | None:
        """Run the whole step, with `rows` by their budget. Return None if a kernel failed, which is counted."""
        index, counts, guard = self.layer.index, self.layer.passes.counts, self.current.deployed.guard
        breaker, step = self.current.deployed.breakers[index], self.step
        rest = step.without(rows)
        key, value, kwargs = self._update(rest.read_index)
        out = self.q.new_zeros(1, self.q.shape[2], self.q.shape[1], value.shape[-1])
        at = torch.tensor([row.run.q_start for row in rows], dtype=torch.int64, device="cpu").to(
            out.device, non_blocking=True
        )
        try:
            for fault in self.layer.passes.faults:
                fault(index)
            q = self.q[0].transpose(0, 1)[at][:, None]
            measured = counts.decoding(index, q)
            memory = self.layer.passes.batches[self.allocator]
            scores, sinks = ScoreOptions.of(kwargs, self.layer.dense), sinks_of(kwargs)
            found = memory.decode(
                q, self.allocator, index, step, rows, scores.scale, softcap=scores.softcap, sinks=sinks
            )
            out[0, at] = found[:, 0]
            counts.decoded(measured, q)
        except Exception as error:  # a failing kernel must not fail the requests
            breaker.failed()
            counts.failed(index, error, "decode")
            return None
        breaker.worked()
        counts.sparse()
        self.current.ran_sparse = True
        for reason, sequences in dense.items():
            counts.dense_sequences(reason, sequences)
        if guard is not None and index in self.current.deployed.plans and guard.wants_call():
            guard.left_out("decode")
        if rest.rows:
            only_decodes = all(row.decodes for row in rest.rows)
            q = self.q.index_select(2, rest.queries)
            found = self._attend(q, key, value, rest.visible, rest.runs, kwargs, dense=only_decodes)
            out[:, rest.queries] = found
        return out

    def _update(self, read_index: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Store the step's keys and values, and return those at `read_index`, with the arguments for attention.

        The result is (1, Hk, keys, D). If there is nothing to read, it is the step's keys and values.
        """
        kwargs = dict(self.arguments)
        kwargs["read_index"] = [*kwargs["read_index"]]
        kwargs["read_index"][self.allocator.index] = read_index
        key, value = self.cache.update(
            key_states=self.k, value_states=self.v, layer_idx=self.layer.index, kwargs=kwargs
        )
        return key, value, for_attention(kwargs)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: Tensor,
        runs: list[MaskRun],
        kwargs: dict[str, Any],
        *,
        dense: bool,
    ) -> Tensor:
        """Run prompts by the prefill rules and single tokens dense, or everything dense."""
        if dense:
            return self.layer.dense(self.module, q, k, v, visible, **kwargs)[0]
        self.current.know_runs(visible, runs)
        return self.layer.attend(self.current, AttentionCall(self.module, q, k, v, visible, kwargs))[0]


def for_attention(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that attention needs."""
    return {name: value for name, value in kwargs.items() if name not in DONE_WITH}
