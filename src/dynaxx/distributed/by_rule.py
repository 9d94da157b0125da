# SPDX-License-Identifier: Apache-2.0
"""Attention over blocks that a rule selects, with the sequence split and the keys of all ranks gathered.

The kv heads are processed in stages: while the blocks of one stage are selected and computed, the keys and values of
the next are in transit. A rank's queries form runs of neighbouring queries, and each run has its own selection. A
run that sees only own keys, such as the first one of a zigzag, does not wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.derivatives import first_derivative_only
from dynaxx.distributed.exchange import Buffers
from dynaxx.distributed.gather import ReturningRuns, Run, WholeGathering, query_runs, reaches, sum_of_runs
from dynaxx.distributed.group import Mesh, group_of
from dynaxx.distributed.peer_memory import stage_buffers
from dynaxx.distributed.plan import check_stages, stages_of
from dynaxx.distributed.rules import check_rule, rule_of_heads, rule_of_run
from dynaxx.distributed.split import SequenceSplit
from dynaxx.distributed.streams import BESIDE_COPIES, BESIDE_NCCL, in_returning_stages, in_stages
from dynaxx.distributed.summaries import by_mean_queries, mean_queries
from dynaxx.kernels.scale import softmax_scale
from dynaxx.kernels.sinks import add_sinks
from dynaxx.layout import BlockGrid, BlockLayout, as_block_size
from dynaxx.layout.host import on_host
from dynaxx.ops.attention import SparseAttentionOutput
from dynaxx.ops.autocast import follow_autocast
from dynaxx.ops.checks import check_inputs, check_sinks
from dynaxx.ops.dispatch import choose_backend, load_backend, score_options
from dynaxx.selection import Hybrid, Selector, select_blocks
from dynaxx.selection.base import selection_grid
from dynaxx.selection.device import select_on_device, serves
from dynaxx.selection.scorers.base import GPU_MEMORY_BUDGET

MOST_CHOICES = 256  # cached backends
OWN_STAGES = 2  # stages whose runs over own keys are computed together: fewer calls, and no long wait of other ranks


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
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    scale = softmax_scale(scale, q.shape[-1])
    needs_lse = needs_grad or return_lse or sinks is not None
    settings = _Settings(rule, split, rank, group, causal, sizes, scale, softcap, backend, form, needs_grad, needs_lse)
    out, lse = _RuleAttention.apply(q, k, v, settings) if needs_grad else _forward(q, k, v, settings)[:2]
    if sinks is not None:
        check_sinks(sinks, q)
        assert lse is not None, "sinks need it"
        out, lse = add_sinks(out, lse, sinks)
    if not return_lse:
        return out
    assert lse is not None, "it was asked for"
    return SparseAttentionOutput(out, lse)


class _Form(NamedTuple):
    """The state that calls share if their arguments are equal but for the contents of tensors."""

    stages: int
    ran: set[Hashable]  # passes that have run


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
) -> _Form:
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
        if len(kept) >= MOST_CHOICES:
            kept.clear()
    form = _forms.setdefault((rule, split, rank, sizes, causal, chosen, of_tensors), _Form(chosen, set()))
    _by_identity[same] = form, rule, split  # kept, so that no other rule or split has their ids
    return form


_by_identity: dict[Hashable, tuple[_Form, Selector | Hybrid, SequenceSplit]] = {}
_forms: dict[Hashable, _Form] = {}


def default_stages(k: Tensor, v: Tensor, split: SequenceSplit) -> int:
    """Return the number of stages of `sparse_attention_by_rule` for own keys and values of this form."""
    received = split.seqlen - min(split.length(rank) for rank in range(split.ranks))
    return stages_of(k.shape[2], received * k.shape[0] * (k.shape[-1] + v.shape[-1]) * k.itemsize)


class _Settings(NamedTuple):
    """The arguments of a call other than its tensors."""

    rule: Selector | Hybrid
    split: SequenceSplit
    rank: int
    group: Any  # the ranks
    causal: bool
    sizes: tuple[int, int]
    scale: float
    softcap: float | None
    backend: str
    form: _Form
    needs_grad: bool
    needs_lse: bool

    @property
    def stages(self) -> int:
        """The number of groups of kv heads that are processed one after another."""
        return self.form.stages

    @property
    def runs(self) -> list[Run]:
        """The runs of queries of this rank."""
        return query_runs(self.split, self.rank, self.causal)

    @property
    def reach(self) -> tuple[int, ...]:
        """The tokens that each rank gathers."""
        return reaches(self.split, self.causal)

    @property
    def own_runs(self) -> int:
        """Number of runs that see only own keys, which are the first ones of this rank."""
        first = self.split.runs(self.rank)[:1]
        return int(bool(first) and first[0][0] == 0 and self.runs[0].keys == first[0][1])

    def means(self, q: Tensor, run: Run) -> Tensor | None:
        """Return the mean queries of a run, (batch, rows, q_heads, head_dim), if selections on a GPU may use them."""
        heads = q.shape[2]
        rule = _rule_of(self.rule, (0, heads), heads, run, self.split)
        grid = BlockGrid(run.last - run.first, run.keys, self.sizes, self.causal)
        if not q.is_cuda or not _selects_on_device(rule, grid, (q.shape[0], grid.seqlen_q, *q.shape[2:]), q.device):
            return None
        selector = rule.selector if isinstance(rule, Hybrid) else rule
        return mean_queries(q[:, run.first : run.last], selector, self.sizes[0], self.scale)

    def select(
        self, q: Tensor, k: Tensor, run: Run, q_heads: slice, heads: int, means: Tensor | None = None
    ) -> BlockLayout:
        """Return the blocks of one run of queries, for some of the `heads` q heads.

        Args:
            q: queries of the run and of these heads.
            k: keys that the run may see.
            run: the run.
            q_heads: the heads.
            heads: number of all q heads.
            means: mean queries of the run and of all q heads.
        """
        rule = _rule_of(self.rule, (q_heads.start, q_heads.stop), heads, run, self.split)
        grid = BlockGrid(q.shape[1], k.shape[1], self.sizes, self.causal)
        if q.is_cuda and _selects_on_device(rule, grid, q.shape, q.device):
            pattern, selector = (rule.pattern, rule.selector) if isinstance(rule, Hybrid) else (None, rule)
            if means is not None:
                q, selector = means[:, :, q_heads], by_mean_queries(selector)
            return _select_on_device(q, k, pattern, selector, grid, self.scale, GPU_MEMORY_BUDGET)
        return select_blocks(q, k, rule, causal=self.causal, block_size=self.sizes, scale=self.scale)

    def kernels(self, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout) -> Any:
        """Return the backend for one run of queries, chosen once for layouts and tensors of one form."""
        if layout.form is None:
            return load_backend(self._chosen(q, k, v, layout))
        key = (layout.form, q.shape, k.shape, v.shape, q.dtype, self.softcap, self.backend, self.needs_grad)
        if key not in _backends:
            if len(_backends) >= MOST_CHOICES:
                _backends.clear()
            _backends[key] = self._chosen(q, k, v, layout)
        return load_backend(_backends[key])

    def _chosen(self, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout) -> str:
        problem = check_inputs(q, k, v, layout, softcap=self.softcap, needs_grad=self.needs_grad)
        return choose_backend(problem, self.backend)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, run: Run, q_heads: slice, out: Tensor
    ) -> Tensor:
        """Write the output of a run of queries for some q heads to `out`, that of all own queries; return the lse."""
        rows = (slice(None), slice(run.first, run.last), q_heads)
        kernels = self.kernels(q[rows], k, v, layout)
        lse: Tensor = kernels.attention_forward(
            q[rows], k, v, layout, self.scale, out=out[rows], **score_options(self.softcap)
        )[1]
        return lse

    def stages_of_heads(self, kv_heads: int) -> list[slice]:
        """Return the kv heads of each stage."""
        step = kv_heads // self.stages
        return [slice(first, first + step) for first in range(0, kv_heads, step)]

    def buffers(self, k: Tensor, v: Tensor) -> Buffers:
        """Return the buffers of the stages, large enough for the rank that gathers the most tokens."""
        size = max(self.reach) * k.shape[0] * (k.shape[2] // self.stages) * (k.shape[-1] + v.shape[-1]) * k.itemsize
        return stage_buffers(self.group, k.device, size)

    def start(self, k: Tensor, v: Tensor, some: slice, buffers: Buffers, turn: int) -> WholeGathering:
        """Start to gather the keys and values of some kv heads."""
        parts = (k[:, :, some], v[:, :, some])
        return WholeGathering(parts, self.split, self.rank, self.group, self.reach, buffers, turn)


@lru_cache(maxsize=256)
def _rule_of(
    rule: Selector | Hybrid, q_heads: tuple[int, int], heads: int, run: Run, split: SequenceSplit
) -> Selector | Hybrid:
    """Return a rule restricted to some of the `heads` q heads and to a run of queries."""
    return rule_of_run(rule_of_heads(rule, slice(*q_heads), heads), run, split)


@lru_cache(maxsize=256)
def _selects_on_device(rule: Selector | Hybrid, grid: BlockGrid, shape: tuple[int, ...], device: torch.device) -> bool:
    """Return whether kernels serve the selection. `select_blocks` would ask, and check the inputs, for every stage."""
    selector = rule.selector if isinstance(rule, Hybrid) else rule
    return bool(grid.kv_blocks) and serves(torch.empty(1, device=device).expand(shape), grid, selector)


_select_on_device = on_host(select_on_device)


_backends: dict[Hashable, str] = {}


class _Chosen(NamedTuple):
    """The inputs of a stage's kernels: gathered keys and values, and the blocks of each run."""

    keys: Tensor
    values: Tensor
    layouts: list[BlockLayout]


def _forward(q: Tensor, k: Tensor, v: Tensor, settings: _Settings) -> tuple[Tensor, Tensor | None, list[BlockLayout]]:
    """Return out, lse if it is needed, and the layouts of all stages and runs if a backward pass follows."""
    heads, group_size = q.shape[2], q.shape[2] // k.shape[2]
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    parts, runs = settings.stages_of_heads(k.shape[2]), settings.runs
    own_runs = settings.own_runs
    of_heads = [slice(some.start * group_size, some.stop * group_size) for some in parts]
    buffers = settings.buffers(k, v)
    gatherings: dict[int, WholeGathering] = {}
    lses: list[list[Tensor]] = [[] for _ in parts]
    layouts: list[BlockLayout] = []

    means: dict[Run, Tensor | None] = {}

    def start(i: int) -> None:
        gatherings[i] = settings.start(k, v, parts[i], buffers, i)
        if not i and not own_runs:  # while the first keys are in transit
            make_means()

    def make_means() -> None:
        for run in runs[own_runs:]:
            means[run] = settings.means(q, run)

    def ready(i: int) -> _Chosen:
        keys, values = gatherings.pop(i).wait()
        found = []
        for run in runs[own_runs:]:
            queries = q[:, run.first : run.last, of_heads[i]]
            found.append(settings.select(queries, keys[:, : run.keys], run, of_heads[i], heads, means[run]))
        return _Chosen(keys, values, found)

    def attend(i: int, chosen: _Chosen) -> None:
        for run, layout in zip(runs[own_runs:], chosen.layouts, strict=True):
            seen = chosen.keys[:, : run.keys], chosen.values[:, : run.keys]
            lse = settings.attend(q, *seen, layout, run, of_heads[i], out)
            if settings.needs_lse:
                lses[i].append(lse)
        if settings.needs_grad:
            layouts.extend(chosen.layouts)

    together = 1 if settings.needs_grad else OWN_STAGES  # a backward pass wants the layouts of each stage

    def ahead(i: int) -> None:
        if i % together:
            return
        some = range(i, min(i + together, len(parts)))
        of_kv = slice(parts[i].start, parts[some[-1]].stop)
        q_heads = slice(of_heads[i].start, of_heads[some[-1]].stop)
        for run in runs[:own_runs]:
            seen = k[:, : run.keys, of_kv], v[:, : run.keys, of_kv]
            layout = settings.select(q[:, run.first : run.last, q_heads], seen[0], run, q_heads, heads)
            lse = settings.attend(q, *seen, layout, run, q_heads, out)
            for stage, own in zip(some, lse.chunk(len(some), 1), strict=True) if settings.needs_lse else ():
                lses[stage].append(own)
            if settings.needs_grad:
                layouts.append(layout)

    ran, key = settings.form.ran, ("forward", settings.softcap, settings.backend, settings.needs_grad)
    if own_runs:  # with all multiprocessors, which own runs take next
        make_means()
    sharing = BESIDE_COPIES if buffers.by_copy_engines else BESIDE_NCCL
    in_stages(
        len(parts), start, ready, attend, settings.group, q.device, known=key in ran, ahead=ahead, sharing=sharing
    )
    ran.add(key)
    buffers.free()  # before the lse of all heads is allocated
    if not settings.needs_lse:
        return out, None, layouts
    lse = torch.cat([torch.cat(found, 2) if len(found) > 1 else found[0] for found in lses], 1)
    return out, lse, layouts


class _RuleAttention(torch.autograd.Function):
    """Gather, select, attend, and return gradients, stage by stage."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, settings: _Settings) -> Any:
        out, lse, layouts = _forward(q, k, v, settings)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        ctx.settings, ctx.layouts = settings, layouts
        return out, lse

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:
        settings: _Settings = ctx.settings
        q, k, v, out, lse = ctx.saved_tensors
        do = torch.zeros_like(out) if do is None else do
        group_size, layouts = q.shape[2] // k.shape[2], iter(ctx.layouts)
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        parts, runs, dims = settings.stages_of_heads(k.shape[2]), settings.runs, [k.shape[-1], v.shape[-1]]
        buffers = Buffers()
        gatherings: dict[int, WholeGathering] = {}

        def start(i: int) -> None:
            gatherings[i] = settings.start(k, v, parts[i], buffers, i)

        def compute(i: int, gathered: list[Tensor]) -> list[tuple[Sequence[Tensor], int]]:
            keys, values = gathered
            q_heads = slice(parts[i].start * group_size, parts[i].stop * group_size)
            of_runs: list[tuple[Sequence[Tensor], int]] = []
            for run in runs:
                own, layout = (slice(None), slice(run.first, run.last), q_heads), next(layouts)
                seen = keys[:, : run.keys], values[:, : run.keys]
                dlse_of_run = None if dlse is None else dlse[:, q_heads, run.first : run.last]
                kernels = settings.kernels(q[own], *seen, layout)
                dq[own], *grads = kernels.attention_backward(
                    do[own], dlse_of_run, q[own], *seen, out[own], lse[:, q_heads, run.first : run.last], layout,
                    settings.scale, **score_options(settings.softcap),
                )  # fmt: skip
                of_runs.append((grads, run.keys))
            return of_runs

        def give_back(i: int, of_runs: list[tuple[Sequence[Tensor], int]]) -> Callable[[], None]:
            heads = parts[i].stop - parts[i].start
            total = sum_of_runs(of_runs, dims, k.new_empty(settings.reach[settings.rank], k.shape[0], heads, 0))
            returning = ReturningRuns(total, settings.split, settings.rank, settings.group, settings.reach)

            def finish() -> None:
                own_sum = returning.wait().transpose(0, 1)
                dk[:, :, parts[i]], dv[:, :, parts[i]] = own_sum.split(dims, dim=-1)

            return finish

        in_returning_stages(len(parts), start, lambda i: gatherings.pop(i).wait(), compute, give_back)
        return dq, dk, dv, None
