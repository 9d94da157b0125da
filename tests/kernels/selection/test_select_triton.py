# SPDX-License-Identifier: Apache-2.0
"""Block selection on the device makes the same layout as torch, under Triton's interpreter and on a GPU."""

import pytest
import torch

import dynaxx as dx
from dynaxx.layout import BlockGrid
from dynaxx.selection import TileQueries
from dynaxx.selection.base import Hybrid
from dynaxx.selection.device import select_on_device
from dynaxx.selection.scorers.pooling import mean_tiles
from dynaxx.selection.scorers.query import all_scores
from interpreter import INTERPRETED, on_gpu, run_interpreted, starts_interpreter

pytest.importorskip("triton")
gpu = pytest.mark.gpu
under_the_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs again under the interpreter")

RULES = [
    dx.TopK(3),
    dx.TopK(3, per="head"),
    dx.TopK((0.1, 0.9, 0.0, 1.0)),
    dx.SlidingWindow(64) | dx.Sink(16) | dx.TopK(0.2, floor=8),
    dx.GlobalTokens(20) | dx.TopK(2),
    dx.Sink(16) | dx.TopP(0.8),
    dx.Sink(16) | dx.TopP(0.8, per="head"),
    dx.TopP((0.0, 0.5, 1.0, 0.9)),
    dx.SlidingWindow(40) | dx.Threshold((0.2, 0.0, 1.0, 5.0)),
    dx.Threshold(1.0, of="uniform"),
]
SHAPES = [(130, 257, True, (16, 64)), (257, 130, True, (64, 16)), (70, 133, False, (32, 32)), (1, 100, True, (16, 16))]


def on_device(q, k, rule, causal, block_size, memory_budget=1 << 16):
    selector, pattern = (rule.selector, rule.pattern) if isinstance(rule, Hybrid) else (rule, None)
    grid = BlockGrid(q.shape[1], k.shape[1], block_size, causal)
    return select_on_device(q, k, pattern, selector, grid, q.shape[-1] ** -0.5, memory_budget)


def assert_same(got, expected):
    n = expected.nnz
    assert got.validate().nnz == n
    for name in ("kv_indptr", "kv_num_partial"):
        assert torch.equal(getattr(got, name).cpu(), getattr(expected, name)), name
    for name in ("kv_indices", "kv_masks"):
        assert torch.equal(getattr(got, name)[:n].cpu(), getattr(expected, name)[:n]), name
    assert torch.equal(got.masks.bits.cpu(), expected.masks.bits)


@starts_interpreter
def test_under_the_interpreter():
    run_interpreted(__file__)


@under_the_interpreter
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_interpreter_chooses_what_torch_chooses(rule):
    torch.manual_seed(0)
    for seqlen_q, seqlen_k, causal, block_size in SHAPES[1:3] if isinstance(rule, dx.TopK) else SHAPES[:1]:
        q, k = torch.randn(1, seqlen_q, 4, 16), torch.randn(1, seqlen_k, 2, 16)
        expected = dx.select_blocks(q, k, rule, causal=causal, block_size=block_size)
        assert_same(on_device(q, k, rule, causal, block_size), expected)


@under_the_interpreter
def test_ties_go_to_the_left_and_empty_rows_stay_empty():
    q, k = torch.ones(1, 64, 1, 16), torch.ones(1, 64, 1, 16)
    layout = on_device(q, k, dx.TopK(2), False, (16, 16))
    assert layout.kv_indices.tolist() == [0, 1] * 4
    layout = on_device(torch.ones(1, 100, 1, 16), torch.ones(1, 20, 1, 16), dx.TopK(1), True, (16, 16))
    assert layout.kv_num_blocks.tolist() == [[[0, 0, 0, 0, 0, 1, 1]]]


@pytest.mark.parametrize("rule", RULES, ids=str)
@gpu
@on_gpu
def test_the_gpu_chooses_what_the_cpu_chooses(rule):
    torch.manual_seed(0)
    for seqlen_q, seqlen_k, causal, block_size in [*SHAPES, (2000, 2000, True, (64, 64)), (5000, 5001, True, (16, 16))]:
        # Few distinct values keep sums exact, so both sides see the same scores in any order of addition.
        q, k = torch.randint(-2, 3, (2, seqlen_q, 4, 64)).float(), torch.randint(-2, 3, (2, seqlen_k, 2, 64)).float()
        q, k = q + torch.randn(2, seqlen_q, 4, 64), k + torch.randn(2, seqlen_k, 2, 64)
        expected = dx.select_blocks(q, k, rule, causal=causal, block_size=block_size)
        got = dx.select_blocks(q.cuda(), k.cuda(), rule, causal=causal, block_size=block_size)
        got.validate()
        differing = (got.to_dense().cpu() != expected.to_dense()).any(-1).float().mean()
        assert differing < 0.02, f"{differing:.1%} of the rows differ; rounding alone makes few"


@gpu
@on_gpu
def test_choosing_and_attending_go_into_a_cuda_graph():
    rule = dx.SlidingWindow(256) | dx.Sink(64) | dx.TopK(0.1)
    q, k, v = (torch.randn(1, 2048, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))

    def run():
        return dx.sparse_attention(q, k, v, dx.select_blocks(q, k, rule, block_size=64))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(), run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert torch.equal(out, run())


@gpu
@on_gpu
@pytest.mark.parametrize(
    "scorer",
    [dx.MeanQuery(), dx.MeanQuery(precision="int8"), dx.MeanPool(), dx.MinMax(), dx.AntiDiagonal()],
    ids=str,
)
def test_a_choice_never_waits_for_the_gpu(scorer, never_waits):
    rule = dx.SlidingWindow(256) | dx.TopK(0.1, scorer)
    q, k = (torch.randn(1, 2048, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2))
    dx.select_blocks(q, k, rule)
    with never_waits():
        dx.select_blocks(q, k, rule)


@gpu
@on_gpu
def test_the_transposed_layout_is_made_without_waiting(never_waits):
    q, k = (torch.randn(1, 1000, heads, 64, device="cuda") for heads in (4, 2))
    layout = dx.select_blocks(q, k, dx.SlidingWindow(100) | dx.TopK(0.2), block_size=32)
    with never_waits():
        turned = layout.transposed
    expected = layout.to("cpu").transposed
    n = layout.nnz
    assert torch.equal(turned.q_indptr.cpu(), expected.q_indptr)
    assert torch.equal(turned.q_num_partial.cpu(), expected.q_num_partial)
    assert torch.equal(turned.q_indices[:n].cpu(), expected.q_indices)
    assert torch.equal(turned.q_masks[:n].cpu(), expected.q_masks)


QUERY_SHAPES = [(300, 333, True, (32, 64), (4, 2, 16)), (130, 257, False, (16, 128), (3, 1, 24)),
                (100, 20, True, (64, 16), (2, 2, 32))]  # fmt: skip


def assert_close_where_seen(got, expected, **tolerance):
    """Keys that a row does not see may hold any number."""
    seen = expected > -torch.inf
    torch.testing.assert_close(got[seen], expected[seen], **tolerance)


def query_scores_of(q, k, grid, rows):
    """Return the kernel's scores, a few rows at a time."""
    from dynaxx.kernels.selection.triton.query_scores import query_scores

    queries = mean_tiles(q, grid.block_size[0], 1 << 20, 0.125).vectors
    parts = [(a, min(a + rows, grid.q_blocks)) for a in range(0, grid.q_blocks, rows)]
    return torch.cat([query_scores(queries(a, b).to(k.dtype), k, a, grid) for a, b in parts], dim=2)


@under_the_interpreter
@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "causal", "block_size", "heads"), QUERY_SHAPES)
def test_a_query_against_every_key_in_the_interpreter(seqlen_q, seqlen_k, causal, block_size, heads):
    q, k = torch.randn(2, seqlen_q, heads[0], heads[2]), torch.randn(2, seqlen_k, heads[1], heads[2])
    grid = BlockGrid(seqlen_q, seqlen_k, block_size, causal)
    expected = dx.MeanQuery(1.0).prepare(q, k, grid, 0.125)(0, grid.q_blocks)
    assert_close_where_seen(query_scores_of(q, k, grid, 3), expected, atol=1e-4, rtol=1e-4)


@under_the_interpreter
@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "causal", "block_size", "heads"), QUERY_SHAPES)
def test_a_query_per_tile_against_every_key_in_the_interpreter(seqlen_q, seqlen_k, causal, block_size, heads):
    from dynaxx.kernels.selection.triton.query_scores import query_scores

    q, k = torch.randn(2, seqlen_q, heads[0], heads[2]), torch.randn(2, seqlen_k, heads[1], heads[2])
    grid, tiles = BlockGrid(seqlen_q, seqlen_k, block_size, causal), mean_tiles(q, 8, 1 << 20, 0.125)
    queries = tiles.vectors(3, tiles.count)
    expected = all_scores(queries, k, 3, grid, 1 << 20, 8)
    assert_close_where_seen(query_scores(queries, k, 3, grid, q_block=8), expected, atol=1e-4, rtol=1e-4)


@gpu
@on_gpu
@pytest.mark.parametrize("scorer", [TileQueries(8), TileQueries(16), dx.AntiDiagonal(16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiles_on_a_gpu_give_the_mass_of_a_cpu(scorer, dtype):
    for seqlen_q, seqlen_k, causal, block_size in [(1000, 1000, True, (128, 64)), (130, 517, True, (32, 128))]:
        q, k = torch.randn(2, seqlen_q, 4, 64) * 2, torch.randn(2, seqlen_k, 2, 64)
        grid = BlockGrid(seqlen_q, seqlen_k, block_size, causal)
        expected = scorer.prepare(q.to(dtype), k.to(dtype), grid, 0.125)(0, grid.q_blocks).exp()
        rows = scorer.prepare(q.cuda().to(dtype), k.cuda().to(dtype), grid, 0.125)
        got = torch.cat([rows(row, row + 1) for row in range(grid.q_blocks)], dim=2).exp().cpu()
        torch.testing.assert_close(got, expected, atol=5e-3 * grid.block_size[0], rtol=2e-2)


@gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_query_against_every_key(dtype):
    shapes = [*QUERY_SHAPES, (3000, 3500, True, (128, 128), (8, 2, 128)), (900, 900, True, (64, 64), (7, 1, 256))]
    for seqlen_q, seqlen_k, causal, block_size, (q_heads, kv_heads, dim) in shapes:
        q, k = torch.randn(2, seqlen_q, q_heads, dim).to(dtype), torch.randn(2, seqlen_k, kv_heads, dim).to(dtype)
        grid = BlockGrid(seqlen_q, seqlen_k, block_size, causal)
        expected = dx.MeanQuery(1.0).prepare(q, k, grid, 0.125)(0, grid.q_blocks)
        got = query_scores_of(q.cuda(), k.cuda(), grid, 7).cpu()
        assert_close_where_seen(got, expected, atol=1e-4 if dtype == torch.float32 else 2e-2, rtol=1e-3)


@gpu
@on_gpu
def test_choices_again_are_those_of_their_own_queries_and_keys():
    """From the third selection of one kind, only launches are replayed; they use the queries and keys of that call."""
    torch.manual_seed(0)
    rules = [dx.Sink(16) | dx.TopK(0.1), dx.Sink(16) | dx.TopK(0.3), dx.Sink(16) | dx.TopK((0.1, 0.2, 0.3, 1.0))]
    rules += [dx.TopK(2, dx.MinMax()), dx.TopK(3, dx.AntiDiagonal(16)), dx.TopP(0.8), dx.TopK(3, dx.MeanPool(16))]
    for attempt in range(5):
        seqlen = 999 if attempt == 3 else 1000
        q, k = torch.randint(-2, 3, (2, seqlen, 4, 64)).float(), torch.randint(-2, 3, (2, seqlen, 2, 64)).float()
        q, k = q + torch.randn_like(q), k + torch.randn_like(k)
        for rule in rules:
            found = dx.select_blocks(q.cuda(), k.cuda(), rule, block_size=64)
            expected = dx.select_blocks(q.cpu(), k.cpu(), rule, block_size=64)
            rows_of = lambda layout: torch.zeros(8 * layout.q_blocks, layout.kv_blocks).index_put_(
                tuple(x.cpu() for x in layout.entries()[:2]), torch.ones(())
            )
            differing = (rows_of(found.validate()) != rows_of(expected)).any(-1).float().mean().item()
            assert differing < 0.02, f"{rule}, attempt {attempt}: {differing:.1%} of the rows differ"
