# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernel of scores by one query per row: equal to the portable kernel, and to torch in fp64."""

import pytest
import torch

from dynaxx.kernels.registry import QUERY_SCORES
from dynaxx.kernels.selection.contract import QueryScoresProblem
from dynaxx.kernels.support.hopper import device_reasons
from dynaxx.layout import BlockGrid

CUDA = torch.device("cuda", 0)
on_hopper = pytest.mark.skipif(bool(device_reasons(CUDA)), reason="needs a Hopper GPU")

# queries, keys, causal, (q_block, kv_block), (q heads, kv heads, head_dim), batch
SHAPES = [
    (8192, 8192, True, (128, 128), (32, 8, 128), 1),
    (8192, 40960, True, (128, 128), (32, 8, 128), 1),
    (5000, 13001, True, (128, 128), (32, 8, 128), 1),
    (100, 4097, True, (64, 64), (8, 2, 128), 2),
    (1000, 3000, True, (128, 128), (7, 1, 64), 3),
    (3000, 1000, True, (64, 128), (6, 2, 64), 1),
    (65, 129, False, (64, 64), (3, 3, 64), 1),
    (30000, 30000, True, (64, 64), (8, 4, 128), 1),
    (1, 1, True, (128, 128), (1, 1, 128), 1),
]


def inputs_of(shape, dtype, *, placed, spread=1.0):
    """Return queries, keys (in pages if `placed`), places, keys in order and the grid; all other memory is NaN."""
    seqlen_q, seqlen_k, causal, block_size, (q_heads, kv_heads, dim), batch = shape
    grid = BlockGrid(seqlen_q, seqlen_k, block_size, causal)
    draw = torch.Generator("cuda").manual_seed(seqlen_k)
    made = lambda *size: torch.randn(size, generator=draw, device=CUDA)
    queries = (made(batch, q_heads, grid.q_blocks, dim) * spread).to(dtype)
    k = made(batch, seqlen_k, kv_heads, dim).to(dtype)
    if not placed:
        return queries, k, None, k, grid
    block = block_size[1]
    places = torch.randperm(grid.kv_blocks + 2, generator=draw, device=CUDA)[: grid.kv_blocks].int()
    memory = torch.full((batch, (grid.kv_blocks + 2) * block, kv_heads, 2 * dim), torch.nan, dtype=dtype, device=CUDA)
    at = torch.arange(seqlen_k, device=CUDA)
    memory[:, places.long()[at // block] * block + at % block, :, :dim] = k
    return queries, memory[..., :dim], places, k, grid


def exact_scores(queries, k, grid):
    """Return the scores in fp64, -inf for blocks of which a row sees nothing."""
    group, block = queries.shape[1] // k.shape[2], grid.block_size[1]
    logits = queries.double() @ k.double().repeat_interleave(group, 2).permute(0, 2, 3, 1)
    if grid.causal:
        rows = torch.arange(1, grid.q_blocks + 1, device=k.device) * grid.block_size[0] + grid.offset
        logits.masked_fill_(torch.arange(grid.seqlen_k, device=k.device) >= rows[:, None], -torch.inf)
    logits = torch.nn.functional.pad(logits, (0, -grid.seqlen_k % block), value=-torch.inf)
    return logits.unflatten(3, (-1, block)).logsumexp(4)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("placed", [False, True], ids=["in order", "in pages"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scores_are_those_of_the_portable_kernel(dtype, placed):
    fast, portable = (QUERY_SCORES.kernels(name).query_scores for name in ("hopper", "triton"))
    for shape in SHAPES:
        if placed and shape[5] > 1:
            continue
        queries, k, places, in_order, grid = inputs_of(shape, dtype, placed=placed)
        got, want = fast(queries, k, 0, grid, places=places), portable(queries, k, 0, grid, places=places)
        seen = torch.arange(grid.kv_blocks, device=CUDA) < grid.causal_kv_blocks(grid.rows()).to(CUDA)[:, None]
        seen = (seen if grid.causal else torch.ones_like(seen)).expand_as(got)
        torch.testing.assert_close(got[seen], want[seen], atol=2e-5, rtol=2e-5)
        if grid.kv_blocks * queries.shape[2] < 40_000:
            exact = exact_scores(queries, in_order, grid)
            torch.testing.assert_close(got[seen].double(), exact[seen], atol=2e-5, rtol=2e-5)


@pytest.mark.gpu
@on_hopper
def test_scores_of_some_rows_and_of_large_logits():
    fast = QUERY_SCORES.kernels("hopper").query_scores
    queries, k, _, _, grid = inputs_of(SHAPES[2], torch.bfloat16, placed=False, spread=30.0)
    whole = fast(queries, k, 0, grid)
    part = fast(queries[:, :, 7:19].contiguous(), k, 7, grid)
    seen = torch.arange(grid.kv_blocks, device=CUDA) < grid.causal_kv_blocks(grid.rows())[7:19].to(CUDA)[:, None]
    assert torch.equal(part[:, :, seen], whole[:, :, 7:19][:, :, seen])
    assert part[:, :, seen].isfinite().all()


def test_reasons_say_what_the_kernel_does_not_serve():
    serves = lambda **other: QUERY_SCORES.reasons(
        "hopper",
        QueryScoresProblem(**{"device": torch.device("cpu"), "dtype": torch.bfloat16, "head_dim": 128, "kv_block": 128,
                              "aligned": True} | other),
    )  # fmt: skip
    told = lambda **other: " ".join(serves(**other)[1:])
    assert serves()[0].startswith("runs on a Hopper GPU")
    assert len(serves()) == 1
    assert "fp16 and bf16" in told(dtype=torch.float32)
    assert "head_dim" in told(head_dim=96)
    assert "16 bytes" in told(aligned=False)
