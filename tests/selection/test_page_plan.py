# SPDX-License-Identifier: Apache-2.0
"""Page plans equal the rule's mask, and one plan serves all steps of a growing sequence."""

import random

import pytest
import torch

import dynaxx as dx
from dynaxx.selection.pages import PagePlan
from interpreter import on_gpu

RULES = (
    dx.Sink(4) | dx.SlidingWindow(50),
    dx.Dilated(8, 20) | dx.SlidingWindow(16),
    dx.Strided(40) | dx.GlobalTokens((3, 90)),
    dx.RandomBlocks(2, seed=1) | dx.SlidingWindow(1),
    dx.Causal(),
)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_a_row_lists_the_pages_that_the_rule_shows(rule, page_size):
    """A row covers steps whose last token is anywhere in its page; RandomBlocks depends on the block size."""
    for seqlen, seqlen_q in ((1, 1), (300, 1), (517, 20), (517, 70)):
        plan = PagePlan.of(rule, seqlen, page_size=page_size, seqlen_q=seqlen_q)
        mask = rule.layout(seqlen, block_size=min(page_size, 128)).to_dense()[0, 0]
        for page, row in enumerate(plan.table):
            first = max(0, page * page_size - seqlen_q + 1) // page_size * page_size
            shown = mask[first : (page + 1) * page_size].any(0).nonzero()[:, 0] // page_size
            assert row[row >= 0].tolist() == shown.unique().tolist()
            assert (row[(row >= 0).sum() :] == -1).all()


def follow(device, steps):
    """Grow sequences by one token at a time under one plan; return each step's output and the expected output."""
    rng, gen = random.Random(0), torch.Generator().manual_seed(0)
    seqlen, batch, kv_heads, rule = 700, 3, 2, dx.Dilated(24, 15) | dx.SlidingWindow(40) | dx.Sink(4)
    k, v = torch.randn(2, batch, seqlen, kv_heads, 32, generator=gen).to(device)
    plan = PagePlan.of(rule, seqlen, page_size=32, device=device)
    mask = rule.layout(seqlen, block_size=32).to_dense()[0, 0]
    lengths = torch.tensor([rng.randrange(seqlen - steps) for _ in range(batch)], dtype=torch.int32)
    used = lengths.to(device)
    cache = dx.PagedCache.contiguous(k, v, page_size=32, seqused_k=used)
    q = torch.randn(batch, 1, 6, 32, generator=gen).to(device)

    def step():
        used.add_(1)
        return dx.sparse_decode(q, cache, plan.pages(used, kv_heads))

    def wanted():
        """Return attention over the pages that the rule shows to any query in the page of the last query."""
        outs = []
        for b, length in enumerate(used.tolist()):
            page = (length - 1) // 32
            pages = torch.zeros(-(-seqlen // 32), dtype=torch.bool)
            pages[mask[page * 32 : (page + 1) * 32].any(0).nonzero()[:, 0] // 32] = True
            keys = pages.repeat_interleave(32)[:length].nonzero()[:, 0].to(device)
            own = [x[b : b + 1, keys].transpose(1, 2).double() for x in (k, v)]
            outs.append(torch.nn.functional.scaled_dot_product_attention(
                q[b : b + 1].transpose(1, 2).double(), *own, enable_gqa=True
            ).transpose(1, 2))  # fmt: skip
        return torch.cat(outs).float()

    return step, wanted, used


def test_one_plan_serves_all_steps():
    step, wanted, used = follow("cpu", 130)
    before = used.clone()
    for _ in range(130):
        torch.testing.assert_close(step(), wanted(), atol=2e-5, rtol=2e-5)
    assert torch.equal(used, before + 130)


@pytest.mark.gpu
@on_gpu
def test_one_plan_serves_all_steps_of_a_captured_graph(never_waits):
    """Nothing waits for the GPU, and a graph that is captured once follows the lengths."""
    step, wanted, _used = follow("cuda", 60)
    torch.cuda.synchronize()
    step()
    with never_waits():
        for _ in range(3):
            out = step()
    torch.testing.assert_close(out, wanted(), atol=2e-5, rtol=2e-5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(50):
        graph.replay()
        torch.testing.assert_close(out, wanted(), atol=2e-5, rtol=2e-5)


def test_lengths_outside_the_plan_are_refused():
    with pytest.raises(ValueError, match="`max_seqlen` and `seqlen_q` must be at least 1, got 0 and 1"):
        PagePlan.of(RULES[0], 0)
    plan = PagePlan.of(RULES[0], 100, page_size=64)
    with pytest.raises(ValueError, match="at most the 128 keys of the plan, got 129"):
        plan.pages(torch.tensor([3, 129], dtype=torch.int32), 2)
    assert plan.pages(torch.tensor([0, 128], dtype=torch.int32), 2).tolist() == [[[0, -1]] * 2, [[0, 1]] * 2]
