# SPDX-License-Identifier: Apache-2.0
"""Layouts that kernels make from block indices, and their columns, equal those of torch bit by bit."""

import pytest
import torch

import dynaxx as dx
from dynaxx.layout import BlockGrid
from dynaxx.layout.form import form_of
from dynaxx.layout.layout_tensors import transpose
from dynaxx.layout.masks import causal_masks
from interpreter import DEVICE, on_gpu, run_interpreted, runs_here, starts_interpreter

CASES = [  # batch, heads, seqlen_q, seqlen_k, block_size, slots, causal
    (1, 1, 300, 300, (64, 64), 3, True),
    (2, 3, 513, 700, (32, 64), 5, True),
    (1, 2, 260, 999, (64, 16), 70, False),
    (1, 2, 1100, 1100, (16, 16), 9, True),
    (1, 1, 70, 33, (32, 32), 2, True),
    (1, 2, 40, 5000, (16, 16), 300, True),
]


@starts_interpreter
def test_under_the_interpreter():
    run_interpreted(__file__)


def indices_of(batch, heads, seqlen_q, seqlen_k, block_size, slots, causal, dtype=torch.int64):
    grid = BlockGrid(seqlen_q, seqlen_k, block_size, causal)
    generator = torch.Generator().manual_seed(slots)
    draws = torch.rand(batch, heads, grid.q_blocks, max(slots, grid.kv_blocks), generator=generator)
    indices = draws.argsort(-1)[..., :slots]
    indices[(indices >= grid.kv_blocks) | (torch.rand(indices.shape, generator=generator) < 0.2)] = -1
    return grid, indices.to(dtype)


def made(grid, indices):
    from dynaxx.kernels.layout import index_inputs, rows_of_indices

    masks, indices = causal_masks(grid).to(DEVICE), indices.to(DEVICE)
    rows = rows_of_indices(indices, index_inputs(indices, grid, masks, form_of((indices,), grid)))
    layout = dx.BlockLayout(grid.seqlen_q, grid.seqlen_k, grid.block_size, *rows[:4], masks)
    return layout, rows.refused


def assert_equal_entries(found, wanted, nnz):
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine[:nnz].cpu() if mine.ndim == 1 else mine.cpu(), theirs)


@runs_here
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_and_columns_equal_those_of_torch(case, dtype):
    from dynaxx.kernels.layout import columns_of

    grid, indices = indices_of(*case, dtype)
    size = {"block_size": grid.block_size, "causal": grid.causal}
    wanted = dx.BlockLayout.from_block_indices(indices, grid.seqlen_q, grid.seqlen_k, **size)
    layout, refused = made(grid, indices)
    assert not refused.any()
    assert_equal_entries(layout.tensors[:4], wanted.tensors[:4], wanted.nnz)
    assert_equal_entries(columns_of(layout).tensors, transpose(wanted).tensors, wanted.nnz)


@runs_here
def test_columns_of_other_masks_and_heads_equal_those_of_torch():
    from dynaxx.kernels.layout import columns_of

    windows = [dx.SlidingWindow(size) | dx.GlobalTokens(globals_) for size, globals_ in ((60, 3), (200, 0), (17, 40))]
    layout = dx.BlockLayout.stack_heads([each.layout(1000, block_size=32, device="cpu") for each in windows])
    assert_equal_entries(columns_of(layout.to(DEVICE)).tensors, transpose(layout).tensors, layout.nnz)


@runs_here
def test_tensors_with_gaps_are_left_to_torch():
    from dynaxx.kernels.layout import columns_of

    layout = dx.SlidingWindow(60).layout(300, block_size=32, device=DEVICE)
    gaps = torch.stack([layout.kv_indices, layout.kv_indices], 1)[:, 0]
    assert (
        columns_of(dx.BlockLayout(300, 300, (32, 32), *layout.tensors[:2], gaps, layout.kv_masks, layout.masks)) is None
    )


@runs_here
@pytest.mark.parametrize("wrong", [[7], [-2], [1 << 40], [0, 0], [3, -1, 3, 3]])
def test_wrong_indices_are_left_out_and_counted(wrong):
    grid = BlockGrid(200, 200, (32, 32), False)
    indices = torch.full((1, 2, 7, 4), -1)
    indices[0, 1, 3, : len(wrong)] = torch.tensor(wrong)
    layout, refused = made(grid, indices)
    valid = {block for block in wrong if 0 <= block < 7}
    assert int(refused.sum()) == sum(block != -1 for block in wrong) - len(valid)
    assert layout.nnz == len(valid)
    layout.derived.refused = refused
    with pytest.raises(ValueError, match="which were left out"):
        layout.validate()


@pytest.mark.gpu
@on_gpu
def test_nothing_is_read_back_from_indices_to_gradients(never_waits):
    _, indices = indices_of(1, 4, 1000, 1000, (64, 64), 5, True)
    indices, q = indices.cuda(), torch.randn(1, 1000, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    step = lambda: dx.sparse_attention(q, q, q, dx.BlockLayout.from_block_indices(indices, 1000, block_size=64))
    wanted = torch.autograd.grad(step().float().square().sum(), q)[0]
    with never_waits():
        for _ in range(3):  # once as it is, once recorded, once replayed
            found = torch.autograd.grad(step().float().square().sum(), q)[0]
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    host = dx.BlockLayout.from_block_indices(indices.cpu(), 1000, block_size=64).to("cuda")
    torch.testing.assert_close(step(), dx.sparse_attention(q, q, q, host), rtol=0, atol=0)


@pytest.mark.gpu
@on_gpu
def test_a_debug_switch_reads_back_whether_indices_were_accepted(monkeypatch):
    indices = torch.full((1, 1, 4, 2), 2, device="cuda")
    dx.BlockLayout.from_block_indices(indices, 256, block_size=64)
    monkeypatch.setenv("DYNAXX_CHECK_INDICES", "1")
    with pytest.raises(ValueError, match="got 4 others"):
        dx.BlockLayout.from_block_indices(indices, 256, block_size=64)
