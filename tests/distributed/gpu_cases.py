# SPDX-License-Identifier: Apache-2.0
"""Cases of several GPUs through NCCL, in bf16 and with few shapes, so that few kernels compile; `ranks.py` runs them.

They compare with one GPU what the cases on CPUs cannot: GPU kernels on several streams beside NCCL. The other modules
cover patterns, lengths and rules.
"""

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

import dynaxx as dx
from dynaxx import distributed as dxd
from dynaxx.distributed import streams
from dynaxx.distributed.by_layout import backward
from dynaxx.distributed.peer_memory import peer_memory_bytes
from dynaxx.testing import make_qkv
from dynaxx.trained.nn import NativeSparseAttention

SEQLEN, HEADS, DIM, BLOCK = 2048, (8, 4), 128, 128
RULE = dx.SlidingWindow(256) | dx.Sink(128) | dx.TopK(0.2)
NEAR = 2e-2  # of the largest value: bf16 results and gradients, summed in another order


def inputs(ranks: Ranks, seqlen=SEQLEN, heads=HEADS, dim=DIM, seed=1):
    return make_qkv(1, seqlen, seqlen, *heads, dim, dtype=torch.bfloat16, seed=seed, device=ranks.device)


def near(got, wanted, what=""):
    assert got.shape == wanted.shape, (what, got.shape, wanted.shape)
    if got.numel():
        worst, largest = (x.float().abs().max().item() for x in (got.float() - wanted.float(), wanted))
        assert worst <= NEAR * largest, (what, worst, largest)


def on_both_paths(run):
    """Run with exchanges on streams of their own, and in the order for groups without a high priority."""
    for first in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            for module in (streams, backward):
                patch.setattr(module, "exchanges_go_first", lambda group, first=first: first)
            run()


def compare(ranks: Ranks, split, tensors, whole, own, backward=True):
    """Compare three equal calls of shards, and their gradients, with one GPU."""
    leaves = [x.clone().requires_grad_(backward) for x in tensors]
    shards = [split.shard(x, ranks.rank).requires_grad_(backward) for x in tensors]
    wanted = whole(*leaves)
    with torch.no_grad():
        calls = [own(*shards) for _ in range(3)]
    assert all(torch.equal(out, calls[0]) for out in calls), "equal calls differ"
    near(calls[0], split.shard(wanted.detach(), ranks.rank), "out")
    if backward:
        do = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(7)).to(wanted)
        grads = torch.autograd.grad(wanted, leaves, do)
        for _ in range(2):  # the first backward pass may take another way
            got = torch.autograd.grad(own(*shards), shards, split.shard(do, ranks.rank))
            for name, a, b in zip(("dq", "dk", "dv", "dgates"), got, grads, strict=False):
                near(a, split.shard(b, ranks.rank), name)


def case_a_window_exchanges_its_halo(ranks: Ranks):
    layout = dx.SlidingWindow(256).layout(SEQLEN * ranks.count, block_size=BLOCK, device=ranks.device)
    split = dxd.sequence_split(layout, ranks.mesh)
    tensors = inputs(ranks, SEQLEN * ranks.count)
    whole = lambda *x: dx.sparse_attention(*x, layout)
    own = lambda *x: dxd.sparse_attention(*x, layout, ranks.mesh, split=split)
    on_both_paths(lambda: compare(ranks, split, tensors, whole, own))


def case_random_blocks_in_stages(ranks: Ranks):
    layout = (dx.RandomBlocks(3, seed=3) | dx.LocalBlocks(1)).layout(SEQLEN, block_size=BLOCK, device=ranks.device)
    split = dxd.sequence_split(layout, ranks.mesh)
    whole = lambda *x: dx.sparse_attention(*x, layout)
    for stages in (1, 4):
        own = lambda *x, n=stages: dxd.sparse_attention(*x, layout, ranks.mesh, split=split, stages=n)
        on_both_paths(lambda own=own: compare(ranks, split, inputs(ranks), whole, own))


def case_layouts_of_each_head(ranks: Ranks):
    some = [dx.SlidingWindow(64 + 60 * head).layout(SEQLEN, block_size=BLOCK) for head in range(HEADS[0])]
    layout = dx.BlockLayout.stack_heads(some).to(ranks.device)
    split = dxd.SequenceSplit.contiguous(SEQLEN, ranks.count, BLOCK)
    whole = lambda *x: dx.sparse_attention(*x, layout)
    own = lambda *x: dxd.sparse_attention(*x, layout, ranks.mesh, split=split, stages=2)
    on_both_paths(lambda: compare(ranks, split, inputs(ranks), whole, own))


def case_some_heads_have_inner_rows(ranks: Ranks):
    near_blocks, far = (x.layout(SEQLEN, block_size=BLOCK) for x in (dx.SlidingWindow(64), dx.Causal()))
    layout = dx.BlockLayout.stack_heads([far, far, near_blocks, near_blocks] * 2).to(ranks.device)
    split = dxd.SequenceSplit.contiguous(SEQLEN, ranks.count, BLOCK)
    whole = lambda *x: dx.sparse_attention(*x, layout)
    own = lambda *x: dxd.sparse_attention(*x, layout, ranks.mesh, split=split, stages=4)
    on_both_paths(lambda: compare(ranks, split, inputs(ranks), whole, own))


def case_packed_documents(ranks: Ranks):
    layout = dx.packed_layout(dx.SlidingWindow(200), (0, 500, 500, 1290, SEQLEN), block_size=BLOCK).to(ranks.device)
    split = dxd.sequence_split(layout, ranks.mesh)
    q, k, v = (x[0] for x in inputs(ranks))
    own = [split.shard(x, ranks.rank, 0) for x in (q, k, v)]
    got = dxd.sparse_attention(*own, layout, ranks.mesh, split=split)
    near(got, split.shard(dx.sparse_attention(q, k, v, layout), ranks.rank, 0))


def case_a_rule_in_stages(ranks: Ranks):
    split = dxd.SequenceSplit.zigzag(SEQLEN, ranks.count, BLOCK)
    whole = lambda q, k, v: dx.sparse_attention(q, k, v, dx.select_blocks(q, k, RULE, block_size=BLOCK))
    for stages in (1, 4):
        own = lambda *x, n=stages: dxd.sparse_attention_by_rule(*x, RULE, split, ranks.mesh, block_size=BLOCK, stages=n)
        on_both_paths(lambda own=own: compare(ranks, split, inputs(ranks), whole, own))


def case_copy_engines(ranks: Ranks):
    """Stages that are exchanged by copy engines give the bits, and send the bytes, of those through NCCL."""

    def by_layout(length):
        layout = (dx.RandomBlocks(3, seed=3) | dx.LocalBlocks(1)).layout(length, block_size=BLOCK, device=ranks.device)
        split = dxd.sequence_split(layout, ranks.mesh)
        return split, lambda *x: dxd.sparse_attention(*x, layout, ranks.mesh, split=split, stages=4)

    def by_rule(length):
        split = dxd.SequenceSplit.zigzag(length, ranks.count, BLOCK)
        return split, lambda *x: dxd.sparse_attention_by_rule(*x, RULE, split, ranks.mesh, block_size=BLOCK, stages=4)

    for length in (SEQLEN, 2 * SEQLEN, SEQLEN):  # the memory grows
        for split, attend in (by_layout(length), by_rule(length)):
            found = []
            for chosen in ("0", "1"):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setenv("DYNAXX_COPY_ENGINES", chosen)
                    for _ in range(3):
                        own = [split.shard(x, ranks.rank).requires_grad_() for x in inputs(ranks, length)]
                        before = dxd.traffic()
                        out = attend(*own)
                        sent = dxd.traffic().bytes_sent - before.bytes_sent
                        found.append((sent, out, *torch.autograd.grad(out, own, torch.ones_like(out))))
            for sent, out, *grads in found[1:]:
                assert sent == found[0][0]
                assert torch.equal(out, found[0][1])
                for got, wanted in zip(grads, found[0][2:], strict=True):
                    near(got, wanted, "gradient")
    assert peer_memory_bytes(ranks.mesh.get_group()) > 0


def case_the_same_blocks_are_chosen(ranks: Ranks):
    q, k, v = inputs(ranks)
    split = dxd.SequenceSplit.zigzag(SEQLEN, ranks.count, BLOCK)
    own = [split.shard(x, ranks.rank) for x in (q, k, v)]
    rule = dx.SlidingWindow(256) | dx.TopK(3, dx.MeanPool())
    rows = dxd.select_split_blocks(*own[:2], rule, split, ranks.mesh, block_size=BLOCK)
    whole = dx.select_blocks(q, k, rule, block_size=BLOCK)
    assert torch.equal(rows.rows.to_dense(), split.shard(whole.to_dense(), ranks.rank, 2))
    near(dxd.sparse_attention(*own, rows, ranks.mesh), split.shard(dx.sparse_attention(q, k, v, whole), ranks.rank))


def case_bytes_are_as_planned(ranks: Ranks):
    layout = dx.SlidingWindow(256).layout(SEQLEN * ranks.count, block_size=BLOCK, device=ranks.device)
    split = dxd.SequenceSplit.contiguous(SEQLEN * ranks.count, ranks.count, BLOCK)
    own = [split.shard(x, ranks.rank).requires_grad_() for x in inputs(ranks, SEQLEN * ranks.count)]
    plan, before = dxd.exchange_plan(*own, layout, ranks.mesh, split=split), dxd.traffic()
    out = dxd.sparse_attention(*own, layout, ranks.mesh, split=split)
    between = dxd.traffic()
    out.sum().backward()
    after = dxd.traffic()
    sent = 256 * (ranks.rank < ranks.count - 1) * HEADS[1] * 2 * DIM * 2
    assert between.bytes_sent - before.bytes_sent == plan.bytes_sent(*own[1:]) == sent
    assert after.bytes_sent - between.bytes_sent == plan.backward_bytes_sent(*own[1:])


def case_native_sparse_attention(ranks: Ranks):
    heads, sizes = (8, 2), dx.trained.NsaSizes()
    gates = torch.rand(1, SEQLEN, heads[0], 3, generator=torch.Generator().manual_seed(2)).to(ranks.device)
    tensors = (*inputs(ranks, heads=heads), gates.bfloat16())
    split = dxd.SequenceSplit.zigzag(SEQLEN, ranks.count, BLOCK)

    def whole(q, k, v, gates):
        return dx.trained.native_sparse_attention(
            q, k, v, (dx.trained.compress(k, sizes), dx.trained.compress(v, sizes)), gates, sizes
        )

    compare(ranks, split, tensors, whole, lambda *x: dxd.native_sparse_attention(*x, sizes, split, ranks.mesh))


def case_modules_train_alike(ranks: Ranks):
    torch.manual_seed(1)
    module = NativeSparseAttention(256, 8, 2, sizes=dx.trained.NsaSizes()).to(ranks.device, torch.bfloat16)
    x = torch.randn(1, SEQLEN, 256, device=ranks.device, dtype=torch.bfloat16)
    out = module(x)
    out.square().sum().backward()
    wanted = {name: p.grad.clone() for name, p in module.named_parameters()}
    split = dxd.SequenceSplit.zigzag(SEQLEN, ranks.count, BLOCK)
    parallel = dxd.SplitModules(module, ranks.mesh, split)
    module.zero_grad()
    own = module(split.shard(x, ranks.rank))
    near(own.detach(), split.shard(out.detach(), ranks.rank))
    own.square().sum().backward()
    parallel.remove()
    for name, p in module.named_parameters():
        dist.all_reduce(p.grad)
        near(p.grad, wanted[name], name)


def case_heads_split(ranks: Ranks):
    split = dxd.SequenceSplit.zigzag(SEQLEN, ranks.count, BLOCK)
    whole = lambda q, k, v: dx.sparse_attention(q, k, v, dx.select_blocks(q, k, RULE, block_size=BLOCK))
    own = lambda *x: dxd.sparse_attention_by_heads(*x, RULE, split, ranks.mesh, block_size=BLOCK)
    compare(ranks, split, inputs(ranks), whole, own)


def case_no_tokens_on_some_ranks(ranks: Ranks):
    layout = dx.Causal().layout(BLOCK, block_size=BLOCK, device=ranks.device)
    split = dxd.SequenceSplit(BLOCK, BLOCK, (ranks.count - 1,), ranks.count)
    whole = lambda *x: dx.sparse_attention(*x, layout)
    own = lambda *x: dxd.sparse_attention(*x, layout, ranks.mesh, split=split)
    on_both_paths(lambda: compare(ranks, split, inputs(ranks, BLOCK), whole, own))


def case_decoding_reads_pages_of_all_ranks(ranks: Ranks):
    batch, pages, size, generator = 3, 13, 64, torch.Generator().manual_seed(4)
    make = lambda *shape: torch.randn(*shape, generator=generator).to(ranks.device, torch.bfloat16)
    k, v = (make(batch * pages, size, HEADS[1], DIM) for _ in range(2))
    table = torch.randperm(batch * pages, generator=generator).view(batch, pages).int().to(ranks.device)
    used = torch.tensor([800, 17, 384], dtype=torch.int32, device=ranks.device)
    cache = dx.summarize_pages(dx.PagedCache(k, v, used, table))
    held = torch.arange(pages, device=ranks.device) % ranks.count == ranks.rank
    own = dx.PagedCache(k, v, used, torch.where(held, table, -1).int(), summaries=cache.summaries)
    q = make(batch, 1, HEADS[0], DIM)
    for budget in (dx.PageBudget(3, sinks=5, window=80), dx.PageBudget(0.3)):
        chosen = dxd.select_split_pages(q, own, budget, ranks.mesh)
        assert torch.equal(chosen, dx.select_pages(q, cache, budget, backend="reference"))
        near(dxd.sparse_decode(q, own, budget, ranks.mesh), dx.sparse_decode(q, cache, budget))
    near(dxd.sparse_decode(q, own, None, ranks.mesh), dx.sparse_decode(q, cache))


def case_models_follow_policies(ranks: Ranks):
    import model_cases

    model_cases.case_policies_equal_one_device(ranks)


def case_fully_sharded_parameters_get_the_same_gradients(ranks: Ranks):
    import model_cases

    model_cases.case_fully_sharded_parameters_get_the_same_gradients(ranks)


def case_tensor_parallel_ranks_get_their_heads_rules(ranks: Ranks):
    import model_cases

    model_cases.case_tensor_parallel_ranks_get_their_heads_rules(ranks)
