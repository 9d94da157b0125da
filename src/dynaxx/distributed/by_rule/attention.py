# SPDX-License-Identifier: Apache-2.0
"""`sparse_attention_by_rule`: select blocks and attend over a split sequence, with the keys of all ranks gathered."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.distributed.by_rule.settings import Form, RuleCall
from dynaxx.distributed.call import Call, Gradients, attend
from dynaxx.distributed.exchange import Buffers
from dynaxx.distributed.gather import ReturningRuns, Run, WholeGathering, sum_of_runs
from dynaxx.distributed.group import Mesh, group_of
from dynaxx.distributed.plan import check_stages, stages_of
from dynaxx.distributed.rules import check_rule, rule_of_heads
from dynaxx.distributed.split import SequenceSplit
from dynaxx.distributed.streams import BESIDE_COPIES, BESIDE_NCCL, Stages, in_returning_stages, in_stages
from dynaxx.layout import BlockLayout, as_block_size
from dynaxx.ops.attention import SparseAttentionOutput
from dynaxx.ops.checks import follow_autocast
from dynaxx.selection import Hybrid, Selector
from dynaxx.selection.base import selection_grid

OWN_STAGES = 2  # stages whose runs over own keys are computed together: fewer calls, and no long wait of other ranks


class RuleResult(NamedTuple):
    """The result of a forward pass."""

    out: Tensor  # (batch, own tokens, q_heads, head_dim_v)
    lse: Tensor | None  # (batch, q_heads, own tokens), if it is needed
    layouts: list[BlockLayout]  # of all stages and runs, if a backward pass follows


def rule_forward(q: Tensor, k: Tensor, v: Tensor, call: RuleCall) -> RuleResult:
    """Select blocks and attend, for own queries."""
    stages = _RuleStages(q, k, v, call)
    ran, key = call.form.ran, ("forward", call.softcap, call.backend, call.needs_grad)
    in_stages(stages, call.group, q.device, known=key in ran)
    ran.add(key)
    stages.buffers.free()  # before the lse of all heads is allocated
    return RuleResult(stages.out, stages.lse() if call.needs_lse else None, stages.layouts)


class _Selected(NamedTuple):
    """The inputs of a stage's kernels: gathered keys and values, and the selected blocks of each run."""

    keys: Tensor
    values: Tensor
    layouts: list[BlockLayout]


class _RuleStages(Stages[_Selected]):
    """The stages of one call.

    Attributes:
        out: the output of all heads.
        buffers: memory of the gathered keys and values.
        layouts: the layouts of all stages and runs, if a backward pass follows.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, call: RuleCall) -> None:
        self._q, self._k, self._v, self._call = q, k, v, call
        group_size, own = q.shape[2] // k.shape[2], call.own_runs
        self._own_runs, self._runs = call.runs[:own], call.runs[own:]  # see only own keys; see others' too
        self._kv_heads = call.stages_of_heads(k.shape[2])  # by stage
        self._q_heads = [slice(some.start * group_size, some.stop * group_size) for some in self._kv_heads]
        self._gatherings: dict[int, WholeGathering] = {}  # by stage
        self._means: dict[Run, Tensor | None] = {}  # mean queries
        self._lse: list[list[Tensor]] = [[] for _ in self._kv_heads]  # of the runs, by stage
        self.count = len(self._kv_heads)
        self.out = q.new_empty(*q.shape[:3], v.shape[-1])
        self.buffers = call.buffers(k, v)
        self.layouts: list[BlockLayout] = []
        self.sharing = BESIDE_COPIES if self.buffers.by_copy_engines else BESIDE_NCCL
        if self._own_runs:  # with all multiprocessors, which own runs take next
            self._take_means()

    def _take_means(self) -> None:
        for run in self._runs:
            self._means[run] = self._call.means(self._q, run)

    def start(self, i: int) -> None:
        """Start to gather the keys and values of a stage."""
        self._gatherings[i] = self._call.start(self._k, self._v, self._kv_heads[i], self.buffers, i)
        if not i and not self._own_runs:  # while the first keys are in transit
            self._take_means()

    def ahead(self, i: int) -> None:
        """Select and attend for the runs over own keys, of this stage and those computed with it."""
        together = 1 if self._call.needs_grad else OWN_STAGES  # a backward pass wants the layouts of each stage
        if i % together:
            return
        stages = range(i, min(i + together, self.count))
        kv_heads = slice(self._kv_heads[i].start, self._kv_heads[stages[-1]].stop)
        q_heads = slice(self._q_heads[i].start, self._q_heads[stages[-1]].stop)
        for run in self._own_runs:
            keys, values = self._k[:, : run.keys, kv_heads], self._v[:, : run.keys, kv_heads]
            layout = self._select(run, keys, q_heads)
            lse = self._call.attend(self._q, keys, values, layout, run, q_heads, self.out)
            if self._call.needs_lse:
                for stage, part in zip(stages, lse.chunk(len(stages), 1), strict=True):
                    self._lse[stage].append(part)
            if self._call.needs_grad:
                self.layouts.append(layout)

    def ready(self, i: int) -> _Selected:
        """Wait for the keys and values of a stage, and select the blocks of the other runs."""
        keys, values = self._gatherings.pop(i).wait()
        found = [self._select(run, keys[:, : run.keys], self._q_heads[i]) for run in self._runs]
        return _Selected(keys, values, found)

    def _select(self, run: Run, keys: Tensor, q_heads: slice) -> BlockLayout:
        queries = self._q[:, run.first : run.last, q_heads]
        return self._call.select(queries, keys, run, q_heads, self._q.shape[2], self._means.get(run))

    def attend(self, i: int, gathered: _Selected) -> None:
        """Attend for the runs that see keys of other ranks."""
        for run, layout in zip(self._runs, gathered.layouts, strict=True):
            keys, values = gathered.keys[:, : run.keys], gathered.values[:, : run.keys]
            lse = self._call.attend(self._q, keys, values, layout, run, self._q_heads[i], self.out)
            if self._call.needs_lse:
                self._lse[i].append(lse)
        if self._call.needs_grad:
            self.layouts.extend(gathered.layouts)

    def lse(self) -> Tensor:
        """Return the lse of all heads."""
        return torch.cat([torch.cat(runs, 2) if len(runs) > 1 else runs[0] for runs in self._lse], 1)


def rule_backward(given: Gradients, call: RuleCall, chosen: list[BlockLayout]) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of own tokens; `chosen` are the layouts of all stages and runs from `rule_forward`."""
    q, k, v = given.q, given.k, given.v
    group_size, layouts = q.shape[2] // k.shape[2], iter(chosen)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    parts, runs, dims = call.stages_of_heads(k.shape[2]), call.runs, [k.shape[-1], v.shape[-1]]
    buffers = Buffers()
    gatherings: dict[int, WholeGathering] = {}

    def start(i: int) -> None:
        gatherings[i] = call.start(k, v, parts[i], buffers, i)

    def compute(i: int, gathered: list[Tensor]) -> list[tuple[Sequence[Tensor], int]]:
        keys, values = gathered
        q_heads = slice(parts[i].start * group_size, parts[i].stop * group_size)
        of_runs: list[tuple[Sequence[Tensor], int]] = []
        for run in runs:
            rows = partial(torch.narrow, start=run.first, length=run.last - run.first)
            part = given.part(q_heads, keys[:, : run.keys], values[:, : run.keys], rows)
            dq[:, run.first : run.last, q_heads], *grads = call.backward(part, next(layouts))
            of_runs.append((grads, run.keys))
        return of_runs

    def give_back(i: int, of_runs: list[tuple[Sequence[Tensor], int]]) -> Callable[[], None]:
        heads = parts[i].stop - parts[i].start
        total = sum_of_runs(of_runs, dims, k.new_empty(call.reach[call.rank], k.shape[0], heads, 0))
        returning = ReturningRuns(total, call.split, call.rank, call.group, call.reach)

        def finish() -> None:
            own_sum = returning.wait().transpose(0, 1)
            dk[:, :, parts[i]], dv[:, :, parts[i]] = own_sum.split(dims, dim=-1)

        return finish

    in_returning_stages(len(parts), start, lambda i: gatherings.pop(i).wait(), compute, give_back)
    return dq, dk, dv


MAX_FORMS = 256  # cached forms


@typed
def sparse_attention_by_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: Selector | Hybrid,
    split: SequenceSplit,
    mesh: Mesh,
    *,
    causal: bool = True,
    block_size: int | tuple[int, int] = 64,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    stages: int | None = None,
) -> Tensor | SparseAttentionOutput:
    """Select blocks and attend in one pass, with the keys and values of all ranks gathered. Differentiable.

    This is the fastest way if the rows of a rank together select nearly all blocks, as they do for budgets above a few
    blocks per row. If they select few blocks, `select_split_blocks` and `sparse_attention` send fewer bytes.

    The backward pass gathers the keys and values again, and reuses the selected blocks. All ranks must run it.

    Args:
        q: (batch, own tokens, q_heads, head_dim).
        k: (batch, own tokens, kv_heads, head_dim).
        v: (batch, own tokens, kv_heads, head_dim_v).
        rule: a selector or a hybrid.
        split: which rank owns which tokens.
        mesh: the ranks that share the sequence.
        causal: hide keys after the query.
        block_size: tokens per block, one number or (q_block, kv_block).
        scale: softmax scale, default head_dim ** -0.5.
        softcap: as for `dynaxx.sparse_attention`.
        sinks: as for `dynaxx.distributed.sparse_attention`.
        return_lse: also return the log-sum-exp of the visible scores.
        backend: as for `dynaxx.sparse_attention`.
        stages: number of groups of kv heads that are gathered and computed one after another, a divisor of kv_heads.
            More stages need less memory. None means as many as keep messages large.

    Returns:
        The result of `dynaxx.distributed.sparse_attention`.

    Raises:
        ValueError, TypeError, UnsupportedInputError, PeerError: like `select_split_blocks` and `sparse_attention`.
    """
    group, sizes = group_of(mesh), as_block_size(block_size)
    q, k, v = follow_autocast(q, k, v)
    rank = dist.get_rank(group)
    form = _checked_form(q, k, v, rule, split, rank, sizes, causal, stages)
    options = Call.options(q, k, v, scale=scale, softcap=softcap, sinks=sinks, return_lse=return_lse, backend=backend)
    call = RuleCall(group, **options, rule=rule, split=split, rank=rank, causal=causal, sizes=sizes, form=form)
    return attend(rule_forward, rule_backward, q, k, v, call, return_lse=return_lse)


def _checked_form(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: Selector | Hybrid,
    split: SequenceSplit,
    rank: int,
    sizes: tuple[int, int],
    causal: bool,
    stages: int | None,
) -> Form:
    """Check the arguments once for all calls of their form. The same objects are found without comparing values."""
    of_tensors = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device)
    same = (id(rule), id(split), rank, sizes, causal, stages, of_tensors)
    known = _by_identity.get(same)
    if known is not None:
        return known[0]
    check_rule(rule, split, sizes)
    kv_heads = k.shape[2] if k.ndim == 4 else 0
    split.check_shards(rank, q=q, k=k, v=v)
    if kv_heads == 0 or q.shape[2] % kv_heads:
        raise ValueError(f"q_heads must be a multiple of kv_heads, both >= 1, got {q.shape[2]} and {kv_heads}")
    selection_grid(q, k, sizes, causal)  # this and the next line refuse wrong input before anything is exchanged
    rule_of_heads(rule, slice(0, q.shape[2]), q.shape[2])
    chosen = default_stages(k, v, split) if stages is None else stages
    check_stages(chosen, kv_heads)
    for kept in (_by_identity, _forms):
        if len(kept) >= MAX_FORMS:
            kept.clear()
    form = _forms.setdefault((rule, split, rank, sizes, causal, chosen, of_tensors), Form(chosen, set()))
    _by_identity[same] = form, rule, split  # kept, so that no other rule or split has their ids
    return form


_by_identity: dict[Hashable, tuple[Form, Selector | Hybrid, SequenceSplit]] = {}
_forms: dict[Hashable, Form] = {}


def default_stages(k: Tensor, v: Tensor, split: SequenceSplit) -> int:
    """Return the number of stages of `sparse_attention_by_rule` for own keys and values of this form."""
    received = split.seqlen - min(split.length(rank) for rank in range(split.ranks))
    return stages_of(k.shape[2], received * k.shape[0] * (k.shape[-1] + v.shape[-1]) * k.itemsize)
