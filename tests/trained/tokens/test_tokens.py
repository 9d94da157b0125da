# SPDX-License-Identifier: Apache-2.0
"""Attention over chosen tokens: the definition against loops, the CPU core and the gathers in torch against fp64."""

import math
import random

import pytest
import torch

import dynaxx as dx
from dynaxx.core import library
from dynaxx.errors import UnsupportedInputError
from dynaxx.trained.testing.nsa import random_choices
from dynaxx.trained.testing.tokens import random_token_case
from dynaxx.trained.tokens.kernels.cpu import attention as cpu
from dynaxx.trained.tokens.spans import TokenSpans

SMALL = ((8, 8), (24, 16), (64, 64))


def choose(queries, keys, heads, count, size=1, seed=0):
    """Draw block indices (1, queries, heads, count) for one sequence."""
    spans = TokenSpans((0, queries), (0, keys), size)
    return random_choices(random.Random(seed), spans, heads, count)[None]


def by_loops(q, k, v, indices, size, scale, softcap=None, sinks=None):
    """Compute one sequence, query by query and head by head."""
    queries, q_heads, _ = q.shape
    out, lse = q.new_zeros(queries, q_heads, v.shape[2]), q.new_full((q_heads, queries), -math.inf)
    for t in range(queries):
        position = t + len(k) - queries
        for h in range(q_heads):
            mine = indices[t, h * indices.shape[1] // q_heads].tolist()
            keys = [key for b in mine if b >= 0 for key in range(b * size, (b + 1) * size) if key <= position]
            kv = h * k.shape[1] // q_heads
            scores = torch.stack([q[t, h] @ k[key, kv] for key in keys]) * scale if keys else q.new_zeros(0)
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            values = v[keys, kv]
            if sinks is not None:
                scores, values = torch.cat([scores, sinks[h : h + 1]]), torch.cat([values, v.new_zeros(1, v.shape[2])])
            if len(scores):
                out[t, h], lse[h, t] = scores.softmax(0) @ values, scores.logsumexp(0)
    return out, lse


@pytest.mark.parametrize("seed", range(6))
def test_the_definition_is_attention_over_a_list(seed):
    rng = random.Random(seed)
    keys = rng.choice((1, 9, 40))
    queries, size, kv_heads, group = rng.choice((keys, 1, keys + 2)), rng.choice((1, 4, 8)), 2, rng.choice((1, 3))
    q, k, v = (torch.randn(n, h, 5, dtype=torch.float64) for n, h in ((queries, 2 * group), (keys, 2), (keys, 2)))
    indices = choose(queries, keys, rng.choice((1, kv_heads, kv_heads * group)), 6, size, seed)
    more = {"softcap": 2.0, "sinks": torch.randn(2 * group, dtype=torch.float64)} if seed % 2 else {}
    want = by_loops(q, k, v, indices[0], size, 0.3, **more)
    got = dx.trained.selected_attention(
        q[None], k[None], v[None], indices, block_size=size, scale=0.3, return_lse=True, backend="reference", **more
    )
    for one, other in zip(got, want, strict=True):
        assert torch.allclose(one[0], other, atol=1e-12)


@pytest.mark.parametrize("seed", range(14))
def test_core(seed):
    case = random_token_case(seed)
    for report in case.check("cpu"):
        assert report.ok, f"{report}\n{case.label}"


@pytest.mark.parametrize("seed", range(100, 104))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_core_in_half_precision(seed, dtype):
    case = random_token_case(seed, dtype=dtype, head_dims=SMALL)
    for report in case.check("cpu"):
        assert report.ok, f"{report}\n{case.label}"


@pytest.mark.parametrize("seed", range(200, 206))
def test_without_a_core(seed, monkeypatch):
    monkeypatch.setenv(library.ISA_VARIABLE, "torch")
    case = random_token_case(seed, head_dims=SMALL)
    for report in case.check("cpu"):
        assert report.ok, f"{report}\n{case.label}"


@pytest.mark.parametrize("isa", ["", "torch"])
def test_sinks_and_their_gradients(isa, monkeypatch):
    monkeypatch.setenv(library.ISA_VARIABLE, isa)
    q, k, v = (torch.randn(1, 40, heads, 16) for heads in (6, 2, 2))
    sinks, indices = torch.randn(6), choose(40, 40, 2, 5)
    indices[0, 7] = -1

    def run(backend, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, sinks)]
        out, lse = dx.trained.selected_attention(
            *leaves[:3], indices, block_size=1, sinks=leaves[3], softcap=4.0, return_lse=True, backend=backend
        )
        return out, lse, *torch.autograd.grad(out.square().sum() + lse.sin().sum(), leaves)

    for got, want in zip(run("cpu", torch.float32), run("reference", torch.float64), strict=True):
        torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("size", [16, 64])
def test_large_blocks_are_selected_attention(size):
    q, k, v = (torch.randn(1, 130, heads, 16) for heads in (4, 2, 2))
    indices = choose(130, 130, 2, 2, size)
    want = dx.trained.selected_attention(q, k, v, indices, block_size=size)
    for more in ({"softcap": 1e5}, {"sinks": torch.full((4,), -1e4)}):
        got = dx.trained.selected_attention(q, k, v, indices, block_size=size, **more)
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def test_latent_attention_shares_memory_and_gradients():
    """Values are a view of the first columns of the keys, which is read once; the gradients add up."""
    latent = torch.randn(1, 90, 1, 144, requires_grad=True)
    q, indices = torch.randn(1, 90, 16, 144, requires_grad=True), choose(90, 90, 1, 20)
    seen = []

    def run(backend):
        k = latent.double() if backend == "reference" else latent
        own = q.double() if backend == "reference" else q
        out = dx.trained.selected_attention(own, k, k[..., :128], indices, block_size=1, backend=backend)
        seen.append(torch.autograd.grad(out.square().sum(), (q, latent)))
        return out

    torch.testing.assert_close(run("cpu").double(), run("reference"), atol=2e-6, rtol=1e-5)
    for got, want in zip(*seen, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    k_rows, v_rows = cpu._rows_of(latent[0].detach(), latent[0].detach()[..., :128])
    assert k_rows.data_ptr() == v_rows.data_ptr()


def test_rows_that_nobody_chose_are_not_read():
    q, k, v = (torch.randn(1, 64, heads, 32) for heads in (4, 2, 2))
    indices = choose(64, 64, 1, 9)
    indices[indices % 3 == 1] = -1
    kept = torch.arange(64) % 3 != 1
    kept &= torch.zeros(64, dtype=torch.bool).scatter_(0, indices[indices >= 0].long(), True)
    poisoned = [x.masked_fill(~kept[:, None, None], torch.nan).requires_grad_() for x in (k, v)]
    out, lse = dx.trained.selected_attention(q, *poisoned, indices, block_size=1, return_lse=True)
    want = dx.trained.selected_attention(q.double(), k.double(), v.double(), indices, block_size=1, backend="reference")
    torch.testing.assert_close(out.double(), want, atol=2e-6, rtol=1e-5)
    assert not lse.isnan().any()
    for grad in torch.autograd.grad(out.sum(), poisoned):
        assert grad.isfinite().all()
        assert not grad[0, ~kept].any()


def test_nothing_to_see():
    q, k, v = (torch.randn(1, 30, 2, 8, requires_grad=True) for _ in range(3))
    none = torch.full((1, 30, 1, 4), -1)
    out, lse = dx.trained.selected_attention(q, k, v, none, block_size=1, return_lse=True)
    assert not out.any()
    assert (lse == -math.inf).all()
    assert not any(grad.any() for grad in torch.autograd.grad(out.sum(), (q, k, v)))
    empty = dx.trained.selected_attention(q, k, v, none[..., :0], block_size=4)
    assert not empty.any()
    assert dx.trained.selected_attention(q[:, :0], k, v, none[:, :0], block_size=1).shape == (1, 0, 2, 8)
    assert dx.trained.selected_attention(q[:0], k[:0], v[:0], none[:0], block_size=1).shape == (0, 30, 2, 8)


def test_the_same_bits_on_any_number_of_threads():
    q, k, v = (torch.randn(1, 300, heads, 32, requires_grad=True) for heads in (6, 2, 2))
    indices, do, seen = choose(300, 300, 2, 40), torch.randn(1, 300, 6, 32), []
    threads = torch.get_num_threads()
    for count in (1, 3, 2, 3):
        torch.set_num_threads(count)
        out = dx.trained.selected_attention(q, k, v, indices, block_size=1)
        seen.append([out, *torch.autograd.grad(out, (q, k, v), do)])
    torch.set_num_threads(threads)
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))


@pytest.mark.parametrize("isa", ["", "torch"])
def test_wrong_choices(isa, monkeypatch):
    monkeypatch.setenv(library.ISA_VARIABLE, isa)
    q, k, v = (torch.randn(1, 30, heads, 8) for heads in (4, 2, 2))
    good = choose(30, 30, 1, 5)
    attend = lambda indices, size=1, **more: dx.trained.selected_attention(q, k, v, indices, block_size=size, **more)
    for value in (30, -2, 1 << 40):
        wrong = good.long().clone()
        wrong[0, 3, 0, 2] = value
        with pytest.raises(ValueError, match="must be -1 or a block of the query's own sequence"):
            attend(wrong)
    twice = good.clone()
    twice[0, 9] = 7
    with pytest.raises(ValueError, match="name a block twice"):
        attend(twice)
    with pytest.raises(ValueError, match="must be one of"):
        attend(good, 3)
    with pytest.raises(ValueError, match="must divide q_heads"):
        attend(good.expand(1, 30, 3, 5))
    with pytest.raises(ValueError, match=r"select_heads, slots"):
        attend(good[0])
    with pytest.raises(TypeError, match="must be integers"):
        attend(good.float())
    with pytest.raises(ValueError, match="softcap"):
        attend(good, softcap=-1.0)
    with pytest.raises(ValueError, match="sinks"):
        attend(good, sinks=torch.ones(3))
    with pytest.raises(UnsupportedInputError, match="computes in fp32"):
        dx.trained.selected_attention(q.double(), k.double(), v.double(), good, block_size=1, backend="cpu")


def test_explanation():
    q, k, v = (torch.randn(1, 30, heads, 8) for heads in (4, 2, 2))
    said = str(dx.trained.explain_selected(q, k, v, choose(30, 30, 2, 5, 4), block_size=4))
    assert "blocks of 1x4" in said
    assert "cpu        would run, token by token" in said


@pytest.mark.parametrize("seed", range(6))
def test_the_gradients_of_the_definition(seed):
    case = random_token_case(seed, dtype=torch.float64, head_dims=((3, 2),), lengths=(1, 5, 9), groups=(1, 2))
    if min(case.q.shape[1], case.k.shape[1]):
        assert all(report.ok for report in case.check("reference"))
