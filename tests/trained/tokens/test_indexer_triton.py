# SPDX-License-Identifier: Apache-2.0
"""The indexer's Triton kernels against sorting: under Triton's interpreter on a CPU, and on a GPU."""

from dataclasses import replace

import pytest
import torch

import dynaxx as dx
from dynaxx.kernels.device import described_as, gpu_of
from interpreter import DEVICE, on_gpu, run_interpreted, runs_here, starts_interpreter

pytest.importorskip("triton")


@pytest.mark.slow  # fingerprints show that kernels are those that passed
@starts_interpreter
def test_under_the_interpreter():
    run_interpreted(__file__)


def draw(queries, keys, heads=3, dim=12, batch=1, dtype=torch.float32):
    """Draw few different scores, so that many are equal; products are exact."""
    normal = lambda *shape: torch.randn(*shape, device=DEVICE).mul(1.3).round().to(dtype)
    return normal(batch, queries, heads, dim), normal(batch, keys, dim), normal(batch, queries, heads)


def both_ways(monkeypatch):
    """Select streaming, then sorting, and yield after each."""
    from dynaxx.trained.tokens.kernels.triton import choose

    gpu = gpu_of(torch.device(DEVICE))
    for processors, score_bytes in ((1, 1 << 28), (1 << 20, 1 << 13)):
        monkeypatch.setattr(choose, "BLOCK_Q", 16)
        monkeypatch.setattr(choose, "BLOCK_K", 32)
        monkeypatch.setattr(choose, "SCORE_BYTES", score_bytes)
        with described_as(replace(gpu, processors=processors)):
            yield


@runs_here
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize(("queries", "keys", "count"), [(17, 17, 8), (5, 150, 16), (20, 17, 8), (3, 90, 80)])
def test_choices_are_those_of_sorting(size, queries, keys, count, monkeypatch):
    torch.manual_seed(queries)
    inputs = draw(queries, keys)
    choice = dx.trained.TopKTokens(count, block_size=size)
    want = dx.trained.index_tokens(*(x.double() for x in inputs), choice, backend="reference")
    for _ in both_ways(monkeypatch):
        got = dx.trained.index_tokens(*inputs, choice, backend="triton")
        assert torch.equal(got, want)


@runs_here
def test_large_blocks(monkeypatch):
    torch.manual_seed(1)
    inputs = draw(4, 300)
    choice = dx.trained.TopKTokens(256, block_size=128)
    want = dx.trained.index_tokens(*(x.double() for x in inputs), choice, backend="reference")
    for _ in both_ways(monkeypatch):
        assert torch.equal(dx.trained.index_tokens(*inputs, choice, backend="triton"), want)


@runs_here
def test_packed_int8_and_many_heads(monkeypatch):
    torch.manual_seed(0)
    q, k, weights = (x[0] for x in draw(30, 42, heads=10))
    ends, ends_k = (0, 13, 13, 30), (0, 18, 20, 42)
    run = lambda backend: dx.trained.index_tokens(
        q, k, weights, dx.trained.TopKTokens(6, block_size=2), cu_seqlens_q=ends, cu_seqlens_k=ends_k, backend=backend
    )
    exact = lambda backend, precision="int8": dx.trained.index_tokens(
        q[None], k[None], weights[None], dx.trained.TopKTokens(6), precision=precision, backend=backend
    )
    for _ in both_ways(monkeypatch):
        assert torch.equal(run("triton"), run("reference"))
        for precision in ("int8", "fp8"):  # weights times scales are rounded
            assert (exact("triton", precision) == exact("reference", precision)).float().mean() > 0.97


@runs_here
@pytest.mark.parametrize("where", ["anywhere", "sampled", "elsewhere"])
def test_thresholds_of_a_sample(where, monkeypatch):
    """The sampled keys are representative, have too high scores, or too low scores."""
    from dynaxx.trained.tokens.kernels.triton import choose

    torch.manual_seed(5)
    q, k, weights = (x.abs() + 1 for x in draw(33, 400))
    sampled = torch.arange(400, device=DEVICE) // 32 % 6 == 0
    if where != "anywhere":
        k[0, sampled if where == "sampled" else ~sampled] *= 64
    want = dx.trained.index_tokens(
        *(x.double() for x in (q, k, weights)), dx.trained.TopKTokens(40), backend="reference"
    )
    monkeypatch.setattr(choose, "SAMPLED_KEYS", 64)
    next(both_ways(monkeypatch))
    assert torch.equal(dx.trained.index_tokens(q, k, weights, dx.trained.TopKTokens(40), backend="triton"), want)


@runs_here
def test_large_negative_scores_and_nothing_to_see(monkeypatch):
    torch.manual_seed(0)
    q, k, weights = draw(9, 40, heads=1, dim=4)
    k[0, ::5] = 1e20
    q, weights = q.abs() + 1, -weights.abs() - 1
    k = k.abs()
    for _ in both_ways(monkeypatch):
        got = dx.trained.index_tokens(q, k, weights, dx.trained.TopKTokens(37), backend="triton")
        assert torch.equal(got, dx.trained.index_tokens(q, k, weights, dx.trained.TopKTokens(37), backend="reference"))
        assert (
            dx.trained.index_tokens(q[:, :2], k[:, :1], weights[:, :2], dx.trained.TopKTokens(3), backend="triton")[
                0, 0
            ]
            < 0
        ).all()
    assert dx.trained.index_tokens(q[:, :0], k, weights[:, :0], dx.trained.TopKTokens(3), backend="triton").shape == (
        1,
        0,
        1,
        3,
    )


@on_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8", "int8"])
@pytest.mark.parametrize(
    ("queries", "keys", "count", "size"), [(4000, 9000, 512, 1), (1, 70000, 2048, 1), (3000, 5000, 2048, 4)]
)
def test_long_sequences(queries, keys, count, size, precision):
    """fp32 and bf16 are exact for whole numbers up to 5; scales of 8 bits round."""
    torch.manual_seed(0)
    inputs = draw(queries, keys, heads=4, dim=64)
    choice = dx.trained.TopKTokens(count, block_size=size)
    got = dx.trained.index_tokens(*inputs, choice, precision=precision, backend="triton")
    assert torch.equal(got, dx.trained.index_tokens(*inputs, choice, precision=precision, backend="triton"))
    for some in (slice(0, 40), slice(-40, None)):
        few = tuple(x[:, some] for x in (inputs[0], inputs[2]))
        seen = keys - queries + range(queries)[some].stop
        want = dx.trained.index_tokens(
            few[0].double(), inputs[1][:, :seen].double(), few[1].double(), choice, backend="reference"
        )
        assert torch.equal(got[:, some], want) or precision in ("int8", "fp8")
        shared = (got[:, some, 0, :, None] == want[:, :, 0, None]) & (got[:, some, 0, :, None] >= 0)
        assert shared.any(-1).sum() >= (0.9 if precision in ("int8", "fp8") else 1) * (want >= 0).sum()
