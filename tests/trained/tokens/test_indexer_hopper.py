# SPDX-License-Identifier: Apache-2.0
"""The indexer's kernel on Hopper against sorting."""

import pytest
import torch

import dynaxx as dx
from interpreter import on_hopper

pytestmark = [pytest.mark.gpu, on_hopper]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    from dynaxx.trained.support import hopper as support

    monkeypatch.setattr(support, "INDEX_QUERIES", 0)


def draw(queries, keys, heads=4, dim=64, kind=torch.bfloat16, most=1.3):
    """Draw whole numbers: products are exact, and many scores are equal."""
    normal = lambda *shape: torch.randn(*shape, device="cuda").mul(most).round().to(kind)
    return normal(1, queries, heads, dim), normal(1, keys, dim), normal(1, queries, heads)


def compare(inputs, choice, **more):
    run = lambda backend, kind: dx.trained.index_tokens(*(x.to(kind) for x in inputs), choice, backend=backend, **more)
    got = run("hopper", inputs[0].dtype)
    assert torch.equal(got, run("reference", torch.float64))
    assert torch.equal(got, run("hopper", inputs[0].dtype))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "dim"), [(4, 64), (1, 128), (3, 32), (2, 64), (64, 128), (16, 64), (8, 32)])
@pytest.mark.parametrize(
    ("queries", "keys", "count"), [(1, 1, 1), (63, 65, 8), (130, 129, 200), (300, 3000, 100), (5, 9, 600)]
)
def test_choices_are_those_of_sorting(queries, keys, count, heads, dim, kind):
    torch.manual_seed(queries)
    compare(draw(queries, keys, heads, dim, kind), dx.trained.TopKTokens(count))


@pytest.mark.parametrize("where", ["anywhere", "sampled", "elsewhere"])
@pytest.mark.parametrize("count", [64, 2048])
@pytest.mark.parametrize("heads", [4, 32])
def test_thresholds_of_a_sample(where, count, heads):
    """The sampled keys are representative, have too high scores, or too low scores; and lists overflow."""
    torch.manual_seed(5)
    keys = 40000 if count == 2048 else 6000
    q, k, weights = (x.abs() for x in draw(200, keys, heads))
    sampled = torch.arange(keys, device="cuda") // 64 % (keys // 64 // (64 if count == 2048 else 8)) == 0
    if where != "anywhere":
        k[0, sampled if where == "sampled" else ~sampled] *= 64
    compare((q, k, weights), dx.trained.TopKTokens(count))


def test_rising_scores_overflow_lists_again_and_again():
    q, weights = (torch.ones(1, 70, *shape, device="cuda", dtype=torch.bfloat16) for shape in ((2, 32), (2,)))
    k = torch.arange(30000, device="cuda").div(128).floor()[None, :, None].expand(1, 30000, 32).bfloat16().contiguous()
    compare((q, k, weights), dx.trained.TopKTokens(100))


@pytest.mark.parametrize("heads", [4, 64])
def test_packed_sequences(heads):
    torch.manual_seed(0)
    q, k, weights = (x[0] for x in draw(330, 420, heads))
    ends, ends_k = (0, 130, 130, 330), (0, 180, 200, 420)
    compare((q, k, weights), dx.trained.TopKTokens(60), cu_seqlens_q=ends, cu_seqlens_k=ends_k)


def test_large_and_missing_numbers():
    torch.manual_seed(0)
    q, k, weights = draw(90, 4000, heads=1, dim=32)
    k[0, ::5] = 1e20
    q, k = q.abs() + 1, k.abs()
    for factor in (-1, 1):
        compare((q, k, factor * (weights.abs() + 1)), dx.trained.TopKTokens(370))
    few = dx.trained.index_tokens(q[:, :80], k[:, :1], weights[:, :80], dx.trained.TopKTokens(3), backend="hopper")
    assert (few[0, :79] < 0).all()
    assert dx.trained.index_tokens(q[:, :0], k, weights[:, :0], dx.trained.TopKTokens(3), backend="hopper").shape == (
        1,
        0,
        1,
        3,
    )


def test_every_slot_is_written(monkeypatch):
    """Every slot is written, even in memory that held other numbers."""
    torch.manual_seed(1)
    inputs = draw(200, 150)
    want = dx.trained.index_tokens(*inputs, dx.trained.TopKTokens(170), backend="hopper")
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **more: empty(*sizes, **more).fill_(77))
    assert torch.equal(dx.trained.index_tokens(*inputs, dx.trained.TopKTokens(170), backend="hopper"), want)


@pytest.mark.parametrize("heads", [64, 8])
def test_fp8(heads):
    """Choices are those of the definition if scores are far apart."""
    torch.manual_seed(3)
    inputs = draw(150, 5000, heads, 128)
    got, want = (
        dx.trained.index_tokens(*inputs, dx.trained.TopKTokens(256), precision="fp8", backend=backend)
        for backend in ("hopper", "reference")
    )
    shared = sum(len(set(a.tolist()) & set(b.tolist())) for a, b in zip(got[0, :, 0], want[0, :, 0], strict=True))
    assert shared > 0.98 * got.numel()


@pytest.mark.parametrize("precision", ["int8", "fp8"])
@pytest.mark.parametrize(("heads", "dim"), [(4, 64), (1, 32), (3, 128)])
def test_eight_bits_with_few_heads(precision, heads, dim):
    """Whole numbers and e4m3 are exact in the 16 bits that the kernel multiplies; scales of keys differ."""
    torch.manual_seed(11)
    q, k, weights = draw(300, 5000, heads, dim)
    k[0, ::3] *= 4
    k[0, ::97] = 0
    run = lambda backend: dx.trained.index_tokens(
        q, k, weights, dx.trained.TopKTokens(200), precision=precision, backend=backend
    )
    got, want = run("hopper"), run("reference")
    shared = sum(len(set(a.tolist()) & set(b.tolist())) for a, b in zip(got[0, :, 0], want[0, :, 0], strict=True))
    assert shared > 0.999 * got.numel()
    assert torch.equal(got, run("hopper"))
    ends, ends_k = (0, 100, 100, 300), (0, 1111, 1200, 5000)
    packed = lambda backend: dx.trained.index_tokens(
        q[0], k[0], weights[0], dx.trained.TopKTokens(200), precision=precision, backend=backend, cu_seqlens_q=ends,
        cu_seqlens_k=ends_k,
    )  # fmt: skip
    got, want = packed("hopper"), packed("reference")
    shared = sum(len(set(a.tolist()) & set(b.tolist())) for a, b in zip(got[:, 0], want[:, 0], strict=True))
    assert shared > 0.999 * got.numel()


@pytest.mark.parametrize("heads", [1, 4, 16])
@pytest.mark.parametrize("levels", [1, 2, 5, 1000])
def test_many_equal_scores(heads, levels):
    """The best of few different scores, of which the earlier keys win; lists overflow with equal scores."""
    torch.manual_seed(levels)
    q, weights = (torch.ones(1, 150, *shape, device="cuda", dtype=torch.bfloat16) for shape in ((heads, 32), (heads,)))
    k = torch.zeros(1, 9000, 32, device="cuda", dtype=torch.bfloat16)
    k[0, :, 0] = torch.randint(-1, levels, (9000,), device="cuda").clamp(max=256)
    for count in (1, 100, 1000):
        compare((q, k, weights), dx.trained.TopKTokens(count))
        compare((q, k, -weights), dx.trained.TopKTokens(count))


def test_numbers_that_are_none():
    """Scores that are not a number count as the largest, in every path."""
    torch.manual_seed(2)
    q, k, weights = draw(100, 6000, 4, 64)
    k[0, 4000:4020] = float("nan")
    got = dx.trained.index_tokens(q, k, weights, dx.trained.TopKTokens(64), backend="hopper")
    assert (got[0, :, 0] >= 4000).sum(1).ge(20).all()
    assert ((got[0, :, 0] >= 4000) & (got[0, :, 0] < 4020)).sum(1).eq(20).all()


@pytest.mark.parametrize(("heads", "dim"), [(4, 64), (2, 128), (64, 128)])
def test_long_sequences_against_the_portable_kernel(heads, dim):
    """All tiles of a causal sequence, which programs fetch one after the other."""
    torch.manual_seed(4)
    inputs = draw(40000 if heads < 8 else 9000, 40000, heads, dim, most=2.0)
    for count in (17, 2048):
        got, want = (
            dx.trained.index_tokens(*inputs, dx.trained.TopKTokens(count), precision="bf16", backend=backend)
            for backend in ("hopper", "triton")
        )
        assert torch.equal(got, want)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [1, 32, 100, 128, 1000])
def test_rows_are_rounded_as_defined(kind, width):
    from dynaxx.kernels import rounding
    from dynaxx.trained.tokens.kernels.gpu.rounding import to_fp8, to_int8

    torch.manual_seed(0)
    x = torch.randn(3, 77, width, device="cuda", dtype=torch.float32)
    x = (x * torch.logspace(-30, 30, 77, device="cuda")[:, None]).to(kind)
    x[0, 0] = 0
    x[0, 1, 0] = float("nan")
    x[0, 2, 0] = float("inf")
    for given in (x, x.transpose(0, 1)):
        for got, want in zip(to_fp8(given), rounding.to_fp8(given.cpu()), strict=True):
            assert torch.equal(got.float().cpu().nan_to_num(7.0), want.float().nan_to_num(7.0))
        for got, want in zip(to_int8(given), rounding.to_int8(given.cpu()), strict=True):
            assert torch.equal(got.float().cpu().nan_to_num(7.0), want.nan_to_num(7.0))
