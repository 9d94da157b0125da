# SPDX-License-Identifier: Apache-2.0
"""Compare `dynaxx.distributed.sparse_attention` with one device; `ranks.py` runs these cases."""

import random

import pytest
import torch
import torch.distributed as dist
from benchmarks.distributed.cost_model import Shape, Workload
from ranks import Ranks

import dynaxx as dx
from dynaxx import distributed as dxd
from dynaxx.testing import check_forward, check_gradients, make_qkv, random_case
from dynaxx.testing.oracle import generator_of_gradients

PATTERNS = {
    "window": dx.SlidingWindow(70),
    "sinks and window": dx.Sink(3) | dx.SlidingWindow(100),
    "random": dx.RandomBlocks(2, seed=3) | dx.LocalBlocks(1),
    "causal": dx.Causal(),
    "globals": dx.GlobalTokens(20) | dx.SlidingWindow(30),
}


def split_attend(ranks: Ranks, split, **options):
    """Return `attend(q, k, v, layout)`, which computes the whole sequence over all ranks, differentiable on every rank.

    Each rank computes its own shard; the others' shards are gathered so that one rank can compare the whole result. The
    gradients of the whole inputs are gathered by `WholeSequence`.
    """

    def attend(q, k, v, layout):
        own = split or dxd.sequence_split(layout, ranks.mesh)
        q_split, kv_split = own if isinstance(own, tuple) else (own, own)
        parts = [TakeShard.apply(x, s, ranks) for x, s in ((q, q_split), (k, kv_split), (v, kv_split))]
        out, lse = dxd.sparse_attention(*parts, layout, ranks.mesh, split=own, return_lse=True, **options)
        return WholeSequence.apply(out, q_split, 1, ranks), WholeSequence.apply(lse, q_split, 2, ranks)

    return attend


class TakeShard(torch.autograd.Function):
    """Give a rank its shard of a whole tensor; backward gathers the whole gradient from all ranks."""

    @staticmethod
    def forward(ctx, x, split, ranks):
        ctx.split, ctx.ranks = split, ranks
        return split.shard(x, ranks.rank)

    @staticmethod
    def backward(ctx, grad):
        return ctx.split.join(gathered(grad, ctx.split, 1, ctx.ranks), 1), None, None


class WholeSequence(torch.autograd.Function):
    """Gather a whole tensor from the shards of all ranks; backward gives each rank its shard of the gradient."""

    @staticmethod
    def forward(ctx, x, split, dim, ranks):
        ctx.split, ctx.dim, ctx.ranks = split, dim, ranks
        return split.join(gathered(x, split, dim, ranks), dim)

    @staticmethod
    def backward(ctx, grad):
        return ctx.split.shard(grad, ctx.ranks.rank, ctx.dim), None, None, None


def gathered(x, split, dim, ranks):
    found = [None] * ranks.count
    torch.distributed.all_gather_object(found, x.detach().cpu())
    return [y.to(x.device) for y in found]


def hold(reports):
    wrong = [str(report) for report in reports if not report.ok]
    assert not wrong, wrong


def check(ranks, q, k, v, layout, split=None, **options):
    """Compare results and gradients with their error budgets on rank 0; the other ranks only compute."""
    q, k, v, layout = (x.to(ranks.device) for x in (q, k, v, layout))
    attend = split_attend(ranks, split, **options)
    if ranks.rank == 0:
        hold(check_forward(attend, q, k, v, layout))
        hold(check_gradients(attend, q, k, v, layout))
        return
    attend(q, k, v, layout)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = attend(*leaves, layout)
    seen = lse.isfinite()
    generator = generator_of_gradients(0, q.device)
    do = torch.randn(*q.shape[:3], v.shape[-1], generator=generator, device=q.device).to(q.dtype)
    dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1], generator=generator, device=q.device)
    torch.autograd.grad([out, lse[seen]], leaves, [do.to(out.dtype), dlse.to(lse.dtype)[seen]])


def splits_of(seqlen, ranks, chunk, rng):
    chunks = -(-seqlen // chunk)
    yield dxd.SequenceSplit.contiguous(seqlen, ranks, chunk)
    yield dxd.SequenceSplit.zigzag(seqlen, ranks, chunk)
    yield dxd.SequenceSplit(seqlen, chunk, tuple(rng.randrange(ranks) for _ in range(chunks)), ranks)


def case_patterns_with_grouped_heads(ranks):
    for name, pattern in PATTERNS.items():
        q, k, v = make_qkv(2, 190, 190, 6, 2, 16, 24, seed=len(name))
        check(ranks, q, k, v, pattern.layout(190, block_size=32), backend=ranks.backend("reference"))


def case_every_split_and_number_of_stages(ranks):
    rng = random.Random(5)
    layout = (dx.RandomBlocks(2, seed=1) | dx.SlidingWindow(40)).layout(170, block_size=(32, 16))
    q, k, v = make_qkv(1, 170, 170, 8, 4, 16)
    for split in splits_of(170, ranks.count, 32, rng):
        for stages in (1, 4):
            check(ranks, q, k, v, layout, split, stages=stages, backend=ranks.backend("cpu"))


def case_random_problems(ranks):
    for seed in range(12):
        case = random_case(seed, head_dims=(16, 24), block_sizes=(16, 32, 64), lengths=(1, 15, 64, 65, 127, 200))
        rng = random.Random(seed)
        chunk = max(case.layout.block_size)
        q_split = list(splits_of(case.layout.seqlen_q, ranks.count, chunk, rng))[seed % 3]
        kv_split = q_split
        if case.layout.seqlen_q != case.layout.seqlen_k:
            kv_split = list(splits_of(case.layout.seqlen_k, ranks.count, chunk, rng))[seed % 3]
        check(ranks, case.q, case.k, case.v, case.layout, (q_split, kv_split))


def case_packed_batches(ranks):
    ends = (0, 50, 50, 177, 240)
    layout = dx.packed_layout(dx.SlidingWindow(60), ends, block_size=32)
    q, k, v = make_qkv(1, 240, 240, 4, 2, 16)
    check(ranks, q, k, v, layout)
    layout = layout.to(ranks.device)
    q, k, v = (x.to(ranks.device) for x in (q, k, v))
    split = dxd.sequence_split(layout, ranks.mesh)
    own = [split.shard(x[0], ranks.rank, 0) for x in (q, k, v)]
    out, lse = dxd.sparse_attention(*own, layout, ranks.mesh, split=split, return_lse=True)
    whole, whole_lse = dx.sparse_attention(q[0], k[0], v[0], layout, return_lse=True)
    torch.testing.assert_close(out, split.shard(whole, ranks.rank, 0))
    torch.testing.assert_close(lse, split.shard(whole_lse, ranks.rank, 1))


def case_ranks_without_tokens(ranks):
    """With fewer chunks than ranks, the remaining ranks own nothing and still take part."""
    q, k, v = make_qkv(1, 40, 40, 2, 1, 16)
    check(ranks, q, k, v, dx.Causal().layout(40, block_size=32))
    empty = dxd.SequenceSplit(40, 32, (ranks.count - 1,) * 2, ranks.count)
    check(ranks, q, k, v, dx.Causal().layout(40, block_size=32), empty)


def case_layouts_that_show_nothing(ranks):
    q, k, v = make_qkv(1, 100, 100, 2, 2, 16)
    layout = dx.BlockLayout.from_dense(torch.zeros(100, 100, dtype=torch.bool), block_size=32)
    check(ranks, q, k, v, layout)


def case_layouts_per_head_send_less(ranks):
    """Heads that look at different blocks receive different blocks."""
    layout = dx.BlockLayout.stack_heads(
        [dx.SlidingWindow(10 + 20 * head).layout(256, block_size=16) for head in range(4)]
    )
    q, k, v = make_qkv(1, 256, 256, 4, 4, 16, device=ranks.device)
    split = dxd.SequenceSplit.contiguous(256, ranks.count, 16)
    check(ranks, q, k, v, layout, split, stages=4)
    layout = layout.to(ranks.device)
    own = [split.shard(x, ranks.rank) for x in (q, k, v)]
    plans = [dxd.exchange_plan(*own, layout, ranks.mesh, split=split, stages=n) for n in (4, 1)]
    if ranks.rank < ranks.count - 1:
        assert 0 < plans[0].bytes_sent(*own[1:]) < plans[1].bytes_sent(*own[1:])


def case_some_heads_have_inner_rows(ranks):
    """A first stage that is computed over own tokens early, beside later stages whose inner rows come early."""
    near, far = (x.layout(256, block_size=16) for x in (dx.SlidingWindow(20), dx.Causal()))
    layout = dx.BlockLayout.stack_heads([far, near, far, near])
    split = dxd.SequenceSplit.contiguous(256, ranks.count, 16)
    check(ranks, *make_qkv(1, 256, 256, 4, 4, 16, device=ranks.device), layout, split, stages=4)


def case_autocast_and_wrong_sinks(ranks):
    """Autocast casts as on one device; wrong sinks are refused before anything is exchanged."""
    layout = dx.SlidingWindow(70).layout(190, block_size=32, device=ranks.device)
    q, k, v = make_qkv(1, 190, 190, 4, 2, 16, device=ranks.device)
    split = dxd.sequence_split(layout, ranks.mesh)
    own = [split.shard(x, ranks.rank) for x in (q, k.bfloat16(), v)]
    with torch.autocast(ranks.device, dtype=torch.bfloat16):
        found = dxd.sparse_attention(*own, layout, ranks.mesh, split=split)
        wanted = dx.sparse_attention(q, k, v, layout)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, split.shard(wanted, ranks.rank), atol=2e-2, rtol=2e-2)
    sent = dxd.traffic().bytes_sent
    with pytest.raises(ValueError, match="sinks"):
        dxd.sparse_attention(
            *(x.float() for x in own), layout, ranks.mesh, split=split, sinks=torch.zeros(3, device=ranks.device)
        )
    assert dxd.traffic().bytes_sent == sent


def case_inner_rows_do_not_wait(ranks):
    """Under a window, few rows see other ranks; all others read the rank's own keys and values in place."""
    for seqlen, stages in ((128 * ranks.count, None), (128 * ranks.count - 7, 2)):
        layout = (dx.SlidingWindow(20) | dx.Sink(3)).layout(seqlen, block_size=16)
        split = dxd.SequenceSplit.contiguous(seqlen, ranks.count, 16)
        window = dx.SlidingWindow(20).layout(seqlen, block_size=16, device=ranks.device)
        q, k, v = make_qkv(1, seqlen, seqlen, 2, 2, 16, device=ranks.device)
        check(ranks, q, k, v, window, split, stages=stages)
        check(ranks, q, k, v, layout, split, stages=stages)  # every row sees the sinks of rank 0
        own = [split.shard(x, ranks.rank) for x in (q, k, v)]
        plan = dxd.exchange_plan(*own, window, ranks.mesh, split=split, stages=stages)
        assert plan.stages[0].inner is not None
        assert bool(plan.stages[0].rows.numel()) == (ranks.rank > 0)


def case_scores_that_are_capped_and_sinks(ranks):
    q, k, v = make_qkv(1, 130, 130, 4, 2, 16, device=ranks.device)
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(1)).to(ranks.device)
    layout = dx.SlidingWindow(50).layout(130, block_size=32, device=ranks.device)
    split = dxd.sequence_split(layout, ranks.mesh)
    own = [split.shard(x, ranks.rank) for x in (q, k, v)]
    options = {"softcap": 3.0, "sinks": sinks, "scale": 0.3}
    out = dxd.sparse_attention(*own, layout, ranks.mesh, split=split, **options)
    whole = dx.sparse_attention(q, k, v, layout, **options)
    torch.testing.assert_close(out, split.shard(whole, ranks.rank))


def case_half_precision(ranks):
    for dtype in (torch.bfloat16, torch.float64):
        q, k, v = make_qkv(1, 200, 200, 4, 2, 32, dtype=dtype)
        check(ranks, q, k, v, dx.SlidingWindow(90).layout(200, block_size=32), backend=ranks.backend("reference"))
        layout = (dx.RandomBlocks(2, seed=4) | dx.LocalBlocks(1)).layout(200, block_size=32)
        split = dxd.SequenceSplit.zigzag(200, ranks.count, 32)
        check(ranks, q, k, v, layout, split, stages=2, backend=ranks.backend("reference"))


def case_twice_the_same_bits(ranks):
    layout = (dx.RandomBlocks(3, seed=2) | dx.LocalBlocks(1)).layout(400, block_size=32, device=ranks.device)
    split = dxd.sequence_split(layout, ranks.mesh)
    own = [split.shard(x, ranks.rank) for x in make_qkv(1, 400, 400, 4, 2, 16, device=ranks.device)]

    def run():
        leaves = [x.clone().requires_grad_() for x in own]
        out = dxd.sparse_attention(*leaves, layout, ranks.mesh, split=split, stages=2)
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def case_bytes_are_as_planned(ranks):
    """A window exchanges only its halo, a full layout everything; counts equal the bytes that are sent."""
    rows = 1024
    q, k, v = make_qkv(1, rows, rows, 4, 2, 16, device=ranks.device)
    token = 2 * (16 + 16) * 4  # bytes of two kv heads, key and value, fp32
    split = dxd.SequenceSplit.contiguous(rows, ranks.count, 64)
    own = [split.shard(x, ranks.rank).requires_grad_() for x in (q, k, v)]
    halo, everything = 64 * (ranks.rank < ranks.count - 1), split.length(ranks.rank) * (ranks.count - 1)
    for pattern, causal, sent in ((dx.SlidingWindow(64), True, halo), (dx.Full(), False, everything)):
        layout = pattern.layout(rows, block_size=64, causal=causal, device=ranks.device)
        plan = dxd.exchange_plan(*own, layout, ranks.mesh, split=split)
        before = dxd.traffic()
        out = dxd.sparse_attention(*own, layout, ranks.mesh, split=split)
        between = dxd.traffic()
        out.sum().backward()
        after = dxd.traffic()
        assert between.bytes_sent - before.bytes_sent == plan.bytes_sent(*own[1:]) == sent * token
        assert between.bytes_received - before.bytes_received == plan.bytes_received(*own[1:])
        assert after.bytes_sent - between.bytes_sent == plan.backward_bytes_sent(*own[1:])


def case_shards_need_their_split(ranks):
    """Shards of another split have the same shapes, so nothing but the caller knows which they are."""
    layout = dx.Causal().layout(256, block_size=32, device=ranks.device)
    q = torch.randn(1, 256, 2, 16, generator=torch.Generator().manual_seed(0)).to(ranks.device)
    for split in (dxd.SequenceSplit.contiguous(256, ranks.count, 32), dxd.SequenceSplit.zigzag(256, ranks.count, 32)):
        own = split.shard(q, ranks.rank)
        with pytest.raises(TypeError, match=r"`split` must be the split that made these shards"):
            dxd.sparse_attention(own, own, own, layout, ranks.mesh)
        with pytest.raises(TypeError, match=r"`split` must be the split"):
            dxd.exchange_plan(own, own, own, layout, ranks.mesh)
        found = dxd.sparse_attention(own, own, own, layout, ranks.mesh, split=split)
        wanted = split.shard(dx.sparse_attention(q, q, q, layout), ranks.rank)
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)
    make = dxd.SequenceSplit.contiguous if ranks.rank == 0 else dxd.SequenceSplit.zigzag
    split, layout = make(256, ranks.count, 32), dx.SlidingWindow(99).layout(256, block_size=32, device=ranks.device)
    own = split.shard(q, ranks.rank)
    with pytest.raises(ValueError, match="split"):  # on every rank, instead of results of neither
        dxd.sparse_attention(own, own, own, layout, ranks.mesh, split=split)


def case_senders_know_where_receivers_want_tokens(ranks):
    """Copy engines write to the places that the receivers' plans have for these tokens, whatever the rows of a rank."""
    rows, some = 1024, dx.RandomBlocks(2, seed=2) | dx.LocalBlocks(1)
    q, k, v = make_qkv(1, rows, rows, 4, 2, 16, device=ranks.device)
    layouts = [some.layout(rows, block_size=32), dx.SlidingWindow(64).layout(rows, block_size=32)]
    layouts.append(dx.BlockLayout.stack_heads([layouts[0], layouts[0], layouts[1], layouts[1]]))
    for layout in layouts:
        for split in (dxd.sequence_split(layout, ranks.mesh), dxd.SequenceSplit.zigzag(rows, ranks.count, 32)):
            own = [split.shard(x, ranks.rank) for x in (q, k, v)]
            plan = dxd.exchange_plan(*own, layout.to(ranks.device), ranks.mesh, split=split, stages=2)
            said = [None] * ranks.count
            tokens = [{to: stage.sends[to].tokens for to in stage.places} for stage in plan.stages]
            dist.all_gather_object(said, ([stage.places for stage in plan.stages], tokens, plan.most_tokens))
            assert len({most for _, _, most in said}) == 1
            for i, stage in enumerate(plan.stages):
                assert stage.places.keys() == stage.sends.keys()
                assert stage.tokens <= plan.most_tokens
                wanted = dict(stage.received)
                for source, (places, sent, _) in enumerate(said):
                    span = wanted.pop(source, None)
                    if span is None:
                        assert ranks.rank not in places[i]
                    else:
                        assert span == (places[i][ranks.rank], places[i][ranks.rank] + sent[i][ranks.rank])
                assert not wanted


def case_the_cost_model_counts_the_same_bytes(ranks):
    """The cost model predicts the bytes that the busiest rank receives, exactly."""
    shape = Shape(q_heads=4, kv_heads=2, head_dim=16, block=16)
    seqlen = 16 * 16 * ranks.count
    blocks = torch.arange(seqlen // 16)
    kept = torch.rand(len(blocks), len(blocks), generator=torch.Generator().manual_seed(1)) < 0.5
    half = blocks.where(kept | (blocks == blocks[:, None]), -1)
    half = dx.BlockLayout.from_block_indices(half[None, None], seqlen, block_size=16)
    make = dxd.SequenceSplit
    for workload, layout, split in (
        (Workload("window", 40), dx.SlidingWindow(40).layout(seqlen, block_size=16), make.contiguous),
        (Workload("window", 33), dx.SlidingWindow(33).layout(seqlen, block_size=16), make.contiguous),
        (Workload("random", 0.5), half, make.zigzag),
    ):
        layout, split = layout.to(ranks.device), split(seqlen, ranks.count, 16)
        tokens = split.length(ranks.rank)
        own = make_qkv(1, tokens, tokens, 4, 2, 16, device=ranks.device)
        before = dxd.traffic().bytes_received
        dxd.sparse_attention(*own, layout, ranks.mesh, split=split)
        received = [None] * ranks.count
        torch.distributed.all_gather_object(received, dxd.traffic().bytes_received - before)
        predicted = (
            workload.received_tokens(seqlen, ranks.count, 16) * shape.token_bytes * 2
        )  # the model counts bf16, and these tensors are fp32
        assert max(received) == predicted, (workload, received, predicted)


def case_ranks_that_disagree_say_so(ranks):
    q, k, v = make_qkv(1, 128, 128, 2, 1, 16, device=ranks.device)
    layout = dx.Causal().layout(128, block_size=32, device=ranks.device)
    make = dxd.SequenceSplit.contiguous if ranks.rank == 0 else dxd.SequenceSplit.zigzag
    split = make(128, ranks.count, 32)
    own = [split.shard(x, ranks.rank) for x in (q, k, v)]
    if len({split.owners, dxd.SequenceSplit.contiguous(128, ranks.count, 32).owners}) == 1 and ranks.rank:
        return  # both splits are the same here
    with pytest.raises(ValueError, match="same on all ranks"):
        dxd.sparse_attention(*own, layout, ranks.mesh, split=split)
