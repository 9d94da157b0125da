# SPDX-License-Identifier: Apache-2.0
"""One attention layer of a serving engine under a policy: decide which sequences of a step run sparse, and run them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dynaxx.integrations.runtime.counts import Counts
from dynaxx.integrations.runtime.deployed import Deployed
from dynaxx.integrations.runtime.in_place import attend_in_place, serves_in_place
from dynaxx.integrations.runtime.paged import Pages, SequenceRow, Sequences, Softmax
from dynaxx.integrations.runtime.paged_decode import (
    LayerLimits,
    LivingSummaries,
    StepLengths,
    decode,
    decode_limits,
    decode_step,
    one_query_each,
)
from dynaxx.integrations.runtime.routing import CallProperties, DenseReason, Route, SequenceLengths, is_step, route
from dynaxx.integrations.runtime.summary_updates import JointUpdates, WaitingLayer
from dynaxx.layout import BlockLayout
from dynaxx.layout.paging import PageSummaries
from dynaxx.lazy import lazy
from dynaxx.policy.resolve import DecodePlan

Watcher = Callable[[int, BlockLayout], None]


@dataclass(frozen=True)
class Split:
    """The sequences of a step that a layer runs sparse, and the dense ones by reason."""

    sparse: tuple[SequenceRow, ...]  # prompts and their chunks, by the prefill rule
    decode: tuple[SequenceRow, ...]  # a few queries over pages that the decode rule chooses
    dense: tuple[SequenceRow, ...]
    reasons: dict[DenseReason, int]

    @lazy
    def runs_sparse(self) -> bool:
        """Return whether any sequence runs sparse."""
        return bool(self.sparse or self.decode)

    @lazy
    def outcome(self) -> tuple[DenseReason, str] | None:
        """Return the reason and the phase that a call counts if no sequence runs sparse; None without sequences."""
        if not self.reasons:
            return None
        phase = "decode" if all(row.seqlen_q == 1 for row in self.dense) else "prefill"
        return max(self.reasons, key=self.reasons.__getitem__), phase


class Step:
    """A step with the policy and state that apply to it, fixed when it starts.

    Attributes:
        sequences: the sequences of the step.
        deployed: the policy in force.
        killed: whether the kill switch was engaged.
        lengths: the lengths of a step that decodes one token per sequence and may be captured; None for other steps.
        first_to_choose: the layer of such a step that computes the page table of smaller pages, for all layers.
        updates: how the last layer updates and counts for all; None: every layer does it for itself.
        waiting: the layers so far whose summaries the last layer updates.
        dense_calls: the layers so far that ran dense as a whole, and that the last layer counts, by outcome.
    """

    def __init__(self, sequences: Sequences, deployed: Deployed, *, killed: bool = False) -> None:
        self.sequences = sequences
        self.deployed = deployed
        self.killed = killed
        self.lengths: StepLengths | None = None
        self.first_to_choose: int | None = None
        self.updates: JointUpdates | None = None
        self.waiting: list[WaitingLayer] = []
        self.dense_calls = Counter[tuple[DenseReason, str]]()
        self._blocked: dict[int, DenseReason | None] = {}
        self._of_layer: dict[int, Split] = {}
        self._made: dict[tuple[int, DenseReason | None], Split] = {}

    def with_page_table(self, page_table: Tensor) -> Step:
        """Return the same step for layers with another page table."""
        sequences = Sequences(page_table, self.sequences.seqused_k, [], [])
        sequences.rows = self.sequences.rows
        other = Step(sequences, self.deployed, killed=self.killed)
        other._blocked, other._of_layer, other._made = self._blocked, self._of_layer, self._made
        return other

    def capturable(self, limits: LayerLimits) -> bool:
        """Let the device decide for each sequence, if the step decodes one token per sequence. Return whether it does.

        Args:
            limits: the limits of the layers that read this step's page table; this call updates them.
        """
        known = all(layer in self.deployed.decode for layer in limits.rows)  # a reloaded policy may have fewer rules
        if limits.rows and known and one_query_each(self.sequences):
            states = [self.deployed.state(layer, self._why_blocked(layer)) for layer in limits.rows]
            limits.write([decode_limits(self.deployed.policy, state.blocked) for state in states])
            self.lengths = StepLengths(limits, self.sequences.seqused_k)
            choosing = (each for each in limits.rows if not self.deployed.decode[each].budget.reads_everything)
            self.first_to_choose = next(choosing, None)
        return self.lengths is not None

    def split(self, layer: int) -> Split:
        """Decide for each sequence by its own lengths only, so that the rest of the batch has no influence."""
        if layer not in self._of_layer:
            blocked = self._why_blocked(layer)
            key = (self.deployed.kind(layer), blocked)
            if key not in self._made:
                self._made[key] = self._split(layer, blocked)
            self._of_layer[layer] = self._made[key]
        return self._of_layer[layer]

    def _why_blocked(self, layer: int) -> DenseReason | None:
        if layer not in self._blocked:
            blocked = DenseReason.KILLED if self.killed else None
            if blocked is None and layer in self.deployed.rules:
                blocked = self.deployed.interruption(layer)
            self._blocked[layer] = blocked
        return self._blocked[layer]

    def _split(self, layer: int, blocked: DenseReason | None) -> Split:
        # The length of a sequence only grows, so one border suffices for hysteresis.
        rules = self.deployed.rules_of(layer)
        state = self.deployed.state(layer, blocked)._replace(was_long=False, decode_was_long=False)
        by_route: dict[Route, list[SequenceRow]] = {each: [] for each in Route}
        reasons = Counter[DenseReason]()
        for row in self.sequences.rows:
            decodes = not row.of_prompt and is_step(row.seqlen_q, row.seqlen_k)
            lengths = SequenceLengths(row.seqlen_q, row.seqlen_k, decodes)
            found = route(rules, state, CallProperties(), lengths)
            by_route[found.route].append(row)
            if found.reason is not None:
                reasons[found.reason] += 1
        sparse, decoding, dense = (tuple(by_route[each]) for each in (Route.RULE, Route.DECODE, Route.DENSE))
        return Split(sparse, decoding, dense, dict(reasons))


class PagedLayer:
    """One attention layer.

    Args:
        index: index of the layer in the model.
        softmax: the softmax of the layer.
        counts: the counts of its calls.
        watchers: functions that are called with the layer and the layout of every sequence that runs sparse.
    """

    def __init__(self, index: int, softmax: Softmax, counts: Counts, watchers: Sequence[Watcher] = ()) -> None:
        self.index = index
        self.softmax = softmax
        self.counts = counts
        self.watchers = watchers
        self._summaries = LivingSummaries()

    def sparse(self, q: Tensor, pages: Pages, step: Step, out: Tensor) -> bool:
        """Attend for the sequences of a step that run sparse under the policy in force.

        Args:
            q: (tokens, q_heads, head_dim), all tokens of the step.
            pages: the cache of this layer, including the keys of this step.
            step: the step.
            out: output of the shape of q; the tokens of sparse sequences are written.

        Returns:
            False if a kernel failed, so that these sequences must run dense as well. The failure is counted and logged.
        """
        if step.lengths is not None and self.does_all(step):
            return self._decode_step(q, pages, step, step.lengths, out)
        worked = self._attend(q, pages, step, out)
        if step.updates is not None and step.updates.last == self.index:
            self._finish(step, step.updates)
        return worked

    def _attend(self, q: Tensor, pages: Pages, step: Step, out: Tensor) -> bool:
        split, breaker = step.split(self.index), step.deployed.breakers[self.index]
        try:
            summaries = self._summarized(pages, step, split)
            if not split.runs_sparse:
                self._count_dense(step, split)
                if DenseReason.GUARD in split.reasons:
                    self._sample_unseen(q, pages, step, max(split.dense, key=lambda row: row.seqlen_q))
                return True
            for row in split.sparse:
                self._sparse_row(q, pages, step, row, out)
            if split.decode:
                plan = step.deployed.decode[self.index]
                call = self.counts.decoding(self.index, q)
                divided = self._divided(pages, step, plan)
                decode(q, *divided, split.decode, plan, summaries, self.softmax, out)
                self.counts.decoded(call, q)
        except Exception as error:  # a failing kernel must not fail the request
            breaker.failed()
            self.counts.failed(self.index, error, "prefill" if split.sparse else "decode")
            return False
        breaker.worked()
        self.counts.sparse()
        for reason, sequences in split.reasons.items():
            self.counts.dense_sequences(reason, sequences)
        return True

    def does_all(self, step: Step) -> bool:
        """Return whether `sparse` attends for every sequence of the step, including dense ones."""
        return step.lengths is not None and self.index in step.lengths.limits.rows

    def count_step(self, step: Step, backend: str) -> None:
        """Count a step with `lengths` when it starts, since a replayed graph runs no Python."""
        split = step.split(self.index)
        if not split.runs_sparse:
            if split.outcome is not None:
                self.counts.dense(*split.outcome)
            return
        self.counts.decode_steps(backend)
        for reason, sequences in split.reasons.items():
            self.counts.dense_sequences(reason, sequences)

    def _decode_step(self, q: Tensor, pages: Pages, step: Step, lengths: StepLengths, out: Tensor) -> bool:
        """Attend as `sparse` does, in a step that may be captured: without decisions or counts on the host."""
        plan, summaries = step.deployed.decode[self.index], None
        try:
            divided = self._divided(pages, step, plan)
            if not plan.budget.reads_everything:
                summaries = self._summaries.update_last(*divided, plan.budget.bound)
            of_layer = lengths.of_layer(self.index)
            decode_step(q, pages, step.sequences, divided, of_layer, plan, summaries, self.softmax, out)
        except Exception as error:
            step.deployed.breakers[self.index].failed()
            self.counts.failed(self.index, error, "decode")
            return False
        return True

    def _sparse_row(self, q: Tensor, pages: Pages, step: Step, row: SequenceRow, out: Tensor) -> None:
        queries, guard, plan = q[None, row.tokens], step.deployed.guard, step.deployed.plans[self.index]
        runs, scale = plan if guard is None else guard.plan(self.index, plan), self.softmax.scale
        lead = runs.lead(row.seqlen_q, row.seqlen_k)
        if lead:
            queries = torch.nn.functional.pad(queries, (0, 0, 0, 0, lead, 0))
        call = self.counts.probe.start(self.index, queries)
        keys, layout = step.sequences.keys_in_place(pages, row, runs.block_size[1]), None
        if keys is not None and serves_in_place(queries, keys, runs.block_size, self.softmax.softcap):
            layout = runs.layout_in_place(queries, keys, scale=scale)
        if keys is not None and layout is not None:
            step.sequences.clear_tail(pages, row)
        else:
            keys = step.sequences.keys(pages, row, q.dtype)
            layout = runs.layout(queries, keys.k, scale=scale)
        call.selected(layout)
        found = torch.empty_like(queries, dtype=out.dtype) if lead else out[None, row.tokens]
        backend = attend_in_place(queries, keys, layout, found, **self.softmax.arguments)
        call.done(keys.k[:, : row.seqlen_k], keys.v[:, : row.seqlen_k], backend=backend)
        for watcher in self.watchers:
            watcher(self.index, layout)
        if lead:
            out[None, row.tokens] = found[:, lead:]
        elif guard is not None and guard.wants_call():
            k, v = pages.sequence(step.sequences.page_table[row.index], row.seqlen_k, q.dtype)
            guard.take(self.index, queries, k, v, scale, plan, runs, found)

    def _summarized(self, pages: Pages, step: Step, split: Split) -> PageSummaries | None:
        """Return the page summaries if a sequence decodes. They include pages that dense sequences wrote."""
        plan = step.deployed.decode.get(self.index)
        if plan is None or plan.budget.reads_everything:
            self._summaries.forget()
            return None
        bound, (smaller, sequences) = plan.budget.bound, self._divided(pages, step, plan)
        if split.decode or step.updates is None:
            return self._summaries.update(smaller, sequences, bound)
        known = self._summaries.update_later(smaller, bound)
        if known is not None:
            step.waiting.append(WaitingLayer(smaller, known))
        return None

    def _divided(self, pages: Pages, step: Step, plan: DecodePlan) -> tuple[Pages, Sequences]:
        """Return the cache and the sequences in pages of the size among which the plan chooses."""
        if plan.budget.reads_everything:
            return pages, step.sequences
        divided = pages.divided(plan.page_size)
        return divided, step.sequences.over(divided, anew=self.index == step.first_to_choose)

    def _sample_unseen(self, q: Tensor, pages: Pages, step: Step, row: SequenceRow) -> None:
        """Sample the rule that the guard has disabled, so that the guard can detect a recovery."""
        guard = step.deployed.guard
        if guard is not None and guard.wants_call():
            k, v = pages.sequence(step.sequences.page_table[row.index], row.seqlen_k, q.dtype)
            plan = step.deployed.plans[self.index]
            guard.take(self.index, q[None, row.tokens], k, v, self.softmax.scale, plan, None, None)

    def _count_dense(self, step: Step, split: Split) -> None:
        if split.outcome is None:
            return
        if step.updates is None:
            self.counts.dense(*split.outcome)
        else:
            step.dense_calls[split.outcome] += 1

    def _finish(self, step: Step, updates: JointUpdates) -> None:
        """Do what the layers of a step left to the last one. A layer that runs even later does it for itself."""
        waiting, step.waiting, step.updates = step.waiting, [], None
        if waiting:
            updates.run(waiting, step.sequences.over(waiting[0].pages))
        for outcome, calls in step.dense_calls.items():
            self.counts.dense(*outcome, calls)
        step.dense_calls.clear()
