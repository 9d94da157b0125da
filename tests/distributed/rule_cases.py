# SPDX-License-Identifier: Apache-2.0
"""Cases of rules over data, native sparse attention and modules with a split sequence; `ranks.py` runs them."""

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

import dynaxx as dx
from dynaxx import distributed as dxd
from dynaxx.testing import make_qkv
from dynaxx.trained.nn import MixtureOfBlockAttention, NativeSparseAttention, SparseAttention

RULES = {
    "mean pool": dx.TopK(3, dx.MeanPool()),
    "bounds": dx.SlidingWindow(40) | dx.TopK(0.3, dx.MinMax(bound=0.75)),
    "mean queries": dx.Sink(4) | dx.SlidingWindow(30) | dx.TopK(2),
    "mass": dx.LocalBlocks(1) | dx.TopP(0.6, dx.MeanPool()),
    "threshold, finer pools": dx.Threshold(0.5, "max", dx.MeanPool(8)),
    "per head": dx.LastQueries(40) | dx.TopK((1, 2, 3, 0), dx.MeanPool(), per="head"),
}


def splits(seqlen, ranks, chunk):
    return [make(seqlen, ranks, chunk) for make in (dxd.SequenceSplit.contiguous, dxd.SequenceSplit.zigzag)]


def close(got, whole, split, ranks, dim=1):
    """Compare with a tolerance for fp32 sums in another order."""
    torch.testing.assert_close(got, split.shard(whole, ranks.rank, dim), rtol=2e-5, atol=2e-5)


def whole_and_own(ranks, split, tensors, attend_whole, attend_own):
    """Compare results and gradients of whole tensors on one device with those of shards."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    shards = [split.shard(x, ranks.rank).requires_grad_() for x in tensors]
    out, own = attend_whole(*leaves), attend_own(*shards)
    close(own, out, split, ranks)
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.device)
    wanted = torch.autograd.grad(out, leaves, do)
    got = torch.autograd.grad(own, shards, split.shard(do, ranks.rank))
    for a, b in zip(got, wanted, strict=True):
        close(a, b, split, ranks)


def case_the_same_blocks_are_chosen(ranks: Ranks):
    q, k, v = make_qkv(2, 250, 250, 4, 2, 16, seed=3, device=ranks.device)
    for name, rule in RULES.items():
        for causal in (True, False):
            whole = dx.select_blocks(q, k, rule, causal=causal, block_size=(32, 16))
            for split in splits(250, ranks.count, 32):
                own = [split.shard(x, ranks.rank) for x in (q, k, v)]
                rows = dxd.select_split_blocks(*own[:2], rule, split, ranks.mesh, causal=causal, block_size=(32, 16))
                wanted = split.shard(whole.to_dense(), ranks.rank, 2)
                assert torch.equal(rows.rows.validate().to_dense(), wanted), (name, causal)
                if causal:
                    close(
                        dxd.sparse_attention(*own, rows, ranks.mesh), dx.sparse_attention(q, k, v, whole), split, ranks
                    )


def case_summaries_are_few_bytes(ranks: Ranks):
    q, k, _ = make_qkv(1, 512, 512, 2, 1, 32, device=ranks.device)
    split = dxd.SequenceSplit.contiguous(512, ranks.count, 64)
    own = [split.shard(x, ranks.rank) for x in (q, k)]
    before = dxd.traffic().bytes_sent
    dxd.select_split_blocks(*own, dx.TopK(2, dx.MeanPool()), split, ranks.mesh, block_size=64)
    sent = dxd.traffic().bytes_sent - before
    assert sent == own[1].nbytes // 64 * (ranks.count - 1)


def case_choosing_and_attending_at_once(ranks: Ranks):
    q, k, v = make_qkv(1, 250, 250, 4, 2, 16, seed=4, device=ranks.device)
    for rule in (RULES["mean queries"], RULES["per head"]):
        whole = lambda q, k, v, rule=rule: dx.sparse_attention(q, k, v, dx.select_blocks(q, k, rule, block_size=32))
        for stages, split in zip((1, 2), splits(250, ranks.count, 32), strict=True):
            own = lambda q, k, v, rule=rule, split=split, stages=stages: dxd.sparse_attention_by_rule(
                q, k, v, rule, split, ranks.mesh, block_size=32, stages=stages
            )
            whole_and_own(ranks, split, (q, k, v), whole, own)


def case_rules_that_look_at_other_ranks_are_refused(ranks: Ranks):
    split = dxd.SequenceSplit.contiguous(64, ranks.count, 16)
    q = torch.zeros(1, split.length(ranks.rank), 2, 8, device=ranks.device)
    with pytest.raises(dx.UnsupportedInputError, match="row by row"):
        dxd.select_split_blocks(q, q, dx.TopP(0.5, dx.AntiDiagonal()), split, ranks.mesh, block_size=16)
    with pytest.raises(ValueError, match="`budget`"):
        dxd.sparse_attention_by_rule(q, q, q, dx.TopK((1, 2, 3)), split, ranks.mesh, block_size=16)


def case_native_sparse_attention(ranks: Ranks):
    sizes = dx.trained.NsaSizes(8, 4, 16, 4, 1, 1, window=24)
    q, k, v = make_qkv(1, 200, 200, 4, 2, 16, device=ranks.device)
    gates = torch.rand(1, 200, 4, 3, generator=torch.Generator().manual_seed(2)).to(ranks.device)

    def whole(q, k, v, gates):
        return dx.trained.native_sparse_attention(
            q, k, v, (dx.trained.compress(k, sizes), dx.trained.compress(v, sizes)), gates, sizes
        )

    for stages, split in zip((1, 2), splits(200, ranks.count, 16), strict=True):
        own = lambda *x, split=split, stages=stages: dxd.native_sparse_attention(
            *x, sizes, split, ranks.mesh, stages=stages
        )
        whole_and_own(ranks, split, (q, k, v, gates), whole, own)


def case_modules_train_alike(ranks: Ranks):
    """Outputs, and gradients of parameters summed over ranks, equal those of one device."""
    sizes = dx.trained.NsaSizes(8, 4, 16, 4, 1, 1, window=24)
    makers = (
        lambda: NativeSparseAttention(32, 4, 2, sizes=sizes, compression="weighted"),
        lambda: MixtureOfBlockAttention(32, 4, 2, block_size=16, top_k=3),
        lambda: SparseAttention(32, 4, 2, pattern=dx.Sink(3) | dx.SlidingWindow(40), block_size=16),
    )
    for make in makers:
        torch.manual_seed(1)
        module = make().to(ranks.device)
        x = torch.randn(1, 150, 32, device=ranks.device)
        for dense in (False, True):
            module.dense = dense
            out = module(x)
            module.zero_grad()
            out.square().sum().backward()
            wanted = {
                name: parameter.grad.clone()
                for name, parameter in module.named_parameters()
                if parameter.grad is not None
            }
            split = dxd.SequenceSplit.zigzag(150, ranks.count, 16)
            parallel = dxd.SplitModules(module, ranks.mesh, split)
            module.zero_grad()
            own = module(split.shard(x, ranks.rank))
            close(own, out.detach(), split, ranks)
            own.square().sum().backward()
            parallel.remove()
            for name, parameter in module.named_parameters():
                if name in wanted:
                    dist.all_reduce(parameter.grad)
                    torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(module(x), out)
