"""Choosing blocks on the device makes the layout that torch makes: under Triton's interpreter, and on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dynaxx as dx
from dynaxx.layout import BlockGrid
from dynaxx.selection.base import Hybrid
from dynaxx.selection.device import select_on_device

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
gpu = pytest.mark.gpu
on_gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
under_the_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs again under the interpreter")

RULES = [
    dx.TopK(3),
    dx.TopK((0.1, 0.9, 0.0, 1.0)),
    dx.SlidingWindow(64) | dx.Sink(16) | dx.TopK(0.2, floor=8),
    dx.GlobalTokens(20) | dx.TopK(2),
    dx.Sink(16) | dx.TopP(0.8),
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


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the tests below run in this process")
def test_under_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


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
    for seqlen_q, seqlen_k, causal, block_size in [*SHAPES, (3000, 3000, True, (64, 64)), (5000, 5001, True, (16, 16))]:
        # Few distinct values: sums are exact, so that both sides see the same scores whatever their order of addition.
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
@pytest.mark.parametrize("scorer", ["MeanPool", "MinMax", "LastQueryProbe", "AntiDiagonal", "SimHash", "Int8Pool"])
def test_a_choice_never_waits_for_the_gpu(scorer, never_waits):
    rule = dx.SlidingWindow(256) | dx.TopK(0.1, getattr(dx, scorer)())
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


@gpu
@on_gpu
@pytest.mark.parametrize("scorer", [dx.MeanPool(16), dx.AntiDiagonal(16), dx.AntiDiagonal(8)], ids=str)
def test_fused_tiles_give_the_mass_of_torch(scorer):
    for seqlen_q, seqlen_k, causal, block_size in [(1000, 1000, True, (128, 64)), (130, 517, True, (32, 128))]:
        q, k = torch.randn(2, seqlen_q, 4, 64) * 2, torch.randn(2, seqlen_k, 2, 64)
        grid = BlockGrid(seqlen_q, seqlen_k, block_size, causal)
        expected = scorer.prepare(q, k, grid, 0.125)(0, grid.q_blocks).exp()
        rows = scorer.prepare(q.cuda(), k.cuda(), grid, 0.125)
        got = torch.cat([rows(row, row + 1) for row in range(grid.q_blocks)], dim=2).exp().cpu()
        torch.testing.assert_close(got, expected, atol=5e-3 * grid.block_size[0], rtol=2e-2)


@under_the_interpreter
def test_fused_tiles_give_the_mass_of_torch_in_the_interpreter():
    from dynaxx.kernels.triton.tile_mass import tile_mass

    q, k = torch.randn(1, 300, 2, 16), torch.randn(1, 333, 1, 16)
    grid = BlockGrid(300, 333, (32, 64), True)
    expected = dx.MeanPool(8).prepare(q, k, grid, 0.25)(0, grid.q_blocks).exp()
    means = lambda x: torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % 8)).unflatten(1, (-1, 8)).sum(2)
    counts = lambda n: (n - torch.arange(0, n, 8)).clamp(max=8)[None, :, None, None]
    vectors = [(means(x) / counts(x.shape[1])).transpose(1, 2) for x in (q * 0.25, k)]
    got = tile_mass(*vectors, 0, grid.q_blocks, grid, (8, 8))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@gpu
@on_gpu
def test_pooled_blocks_are_those_of_torch():
    from dynaxx.selection.scorers.base import reduce_blocks

    x = torch.randn(2, 517, 3, 80, device="cuda").transpose(0, 1).contiguous().transpose(0, 1)
    for size in (8, 48, 64, 128):
        for reduce in (torch.mean, torch.amin, torch.amax):
            expected = reduce_blocks(x.cpu(), size, reduce, 1 << 20)
            torch.testing.assert_close(reduce_blocks(x, size, reduce, 1 << 20).cpu(), expected, atol=1e-6, rtol=1e-5)
