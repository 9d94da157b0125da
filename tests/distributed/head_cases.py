# SPDX-License-Identifier: Apache-2.0
"""Cases of heads split over ranks and of caches split by pages; `ranks.py` runs them."""

import pytest
import torch
from ranks import Ranks
from rule_cases import close, splits, whole_and_own

import dynaxx as dx
from dynaxx import distributed as dxd
from dynaxx.testing import make_qkv
from dynaxx.trained.nn import MixtureOfBlockAttention


def case_layouts_and_rules(ranks: Ranks):
    q, k, v = make_qkv(2, 150, 150, 8, 2, 16, device=ranks.device)
    shared = dx.SlidingWindow(50).layout(150, block_size=32, device=ranks.device)
    per_head = dx.BlockLayout.stack_heads(
        [dx.SlidingWindow(10 + 9 * head).layout(150, block_size=32, device=ranks.device) for head in range(8)]
    )
    for layout in (shared, per_head):
        for split in splits(150, ranks.count, 32):
            own = lambda *x, layout=layout, split=split: dxd.sparse_attention_by_heads(*x, layout, split, ranks.mesh)
            whole_and_own(ranks, split, (q, k, v), lambda *x, layout=layout: dx.sparse_attention(*x, layout), own)
    split = dxd.SequenceSplit.zigzag(150, ranks.count, 32)
    if ranks.count > 2:  # there are only two kv heads
        with pytest.raises(ValueError, match="cannot select together"):
            dxd.sparse_attention_by_heads(
                *[split.shard(x, ranks.rank) for x in (q, k, v)], dx.TopK(2), split, ranks.mesh
            )
        q, k, v = make_qkv(2, 150, 150, 8, 4, 16, device=ranks.device)
    shards = [split.shard(x, ranks.rank) for x in (q, k, v)]
    for rule in (dx.Sink(3) | dx.TopK(2), dx.TopK(tuple(range(8)), per="head"), dx.TopK(1, dx.AntiDiagonal(16))):
        out, lse = dxd.sparse_attention_by_heads(*shards, rule, split, ranks.mesh, block_size=32, return_lse=True)
        layout = dx.select_blocks(q, k, rule, block_size=32)
        whole, whole_lse = dx.sparse_attention(q, k, v, layout, return_lse=True)
        close(out, whole, split, ranks)
        close(lse, whole_lse, split, ranks, 2)


def case_native_sparse_attention(ranks: Ranks):
    """Each rank runs a function of the whole sequence on its own heads."""
    sizes = dx.trained.NsaSizes(8, 4, 16, 4, 1, 1, window=24)
    q, k, v = make_qkv(1, 120, 120, 8, 4, 16, device=ranks.device)
    gates = torch.rand(1, 120, 8, 3, generator=torch.Generator().manual_seed(2)).to(ranks.device)

    def attend(q, k, v, gates, share=None):
        return dx.trained.native_sparse_attention(
            q, k, v, (dx.trained.compress(k, sizes), dx.trained.compress(v, sizes)), gates, sizes
        )

    for split in splits(120, ranks.count, 16):
        own = lambda *x, split=split: dxd.attend_by_heads(attend, x, (True, False, False, True), split, ranks.mesh)
        whole_and_own(ranks, split, (q, k, v, gates), attend, own)


def case_mixture_of_block_attention(ranks: Ranks):
    """The module's attention runs on the heads of a rank."""
    q, k, v = make_qkv(1, 150, 150, 8, 4, 16, device=ranks.device)

    def attend(q, k, v, share=None):
        module = MixtureOfBlockAttention(q.shape[2] * 16, q.shape[2], k.shape[2], block_size=16, top_k=3)
        return module.attend(q, q, k, v, None, None)

    for split in splits(150, ranks.count, 16):
        own = lambda *x, split=split: dxd.attend_by_heads(attend, x, (True, False, False), split, ranks.mesh)
        whole_and_own(ranks, split, (q, k, v), attend, own)


def case_heads_that_do_not_divide(ranks: Ranks):
    split = dxd.SequenceSplit.contiguous(64, ranks.count, 16)
    q = torch.zeros(1, split.length(ranks.rank), 2 * ranks.count + 1, 8, device=ranks.device)
    with pytest.raises(ValueError, match="must divide `q_heads`"):
        dxd.sparse_attention_by_heads(q, q, q, dx.Causal(), split, ranks.mesh)


def split_cache(ranks, cache):
    """Return this rank's pages of a cache: every n-th one."""
    pages = torch.arange(cache.page_table.shape[1])
    own = torch.where(pages % ranks.count == ranks.rank, cache.page_table, -1)
    return dx.PagedCache(cache.k, cache.v, cache.seqused_k, own.int(), summaries=cache.summaries)


def case_decoding_reads_the_same_pages(ranks: Ranks):
    batch, pages, size = 3, 13, 16
    generator = torch.Generator().manual_seed(4)
    k, v = (torch.randn(batch * pages, size, 2, 16, generator=generator) for _ in range(2))
    table = torch.randperm(batch * pages, generator=generator).view(batch, pages).int()
    used = torch.tensor([200, 17, 96], dtype=torch.int32)
    cache = dx.summarize_pages(dx.PagedCache(k, v, used, table))
    own = split_cache(ranks, cache)
    q = torch.randn(batch, 2, 4, 16, generator=generator)
    for budget in (dx.PageBudget(3, sinks=5, window=20), dx.PageBudget(0.3), dx.PageBudget((1, 4)), dx.PageBudget(0)):
        chosen = dxd.select_split_pages(q, own, budget, ranks.mesh)
        assert torch.equal(chosen, dx.select_pages(q, cache, budget, backend="reference"))
        got = dxd.sparse_decode(q, own, budget, ranks.mesh, return_lse=True)
        wanted = dx.sparse_decode(q, cache, budget, return_lse=True)
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(
        dxd.sparse_decode(q, own, None, ranks.mesh), dx.sparse_decode(q, cache), rtol=2e-5, atol=2e-5
    )
