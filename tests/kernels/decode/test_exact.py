# SPDX-License-Identifier: Apache-2.0
"""Exact tokens beside 8-bit caches: their contents, that they replace the cache's copies, and their benefit."""

import random
from dataclasses import replace

import pytest
import torch
from test_decode import LOW, queries, random_cache, random_pages

import dynaxx as dx
from dynaxx.kernels.decode.reference import read_cache, visible_keys
from dynaxx.layout.paging.exact_tokens import ExactTokens
from dynaxx.testing import oracle_attention
from interpreter import DEVICE, run_interpreted, runs_here, starts_interpreter

BACKENDS = ["reference", "cpu"]


def with_exact(seed, dtype, **fields):
    """Return a random 8-bit cache whose exact tokens differ from its copies, and q; page tables have no holes."""
    cache, rng, gen = random_cache(seed, dtype=dtype, **fields)
    sinks, window = rng.choice(((0, 16), (1, 15), (4, 28), (3, 6), (16, 16)))
    draw = lambda width: torch.randn(cache.batch, sinks + window, cache.kv_heads, width, generator=gen)
    stored = rng.choice((torch.float32, torch.float16, torch.bfloat16))
    if DEVICE == "cpu" and stored == torch.bfloat16:
        stored = torch.float16  # the interpreter supports no other
    exact = ExactTokens(draw(cache.head_dim).to(stored), draw(cache.head_dim_v).to(stored), sinks)
    return replace(cache, exact=exact), rng, gen


def in_place(cache, mask, dtype):
    """Return keys, values and mask as if the exact tokens lay in the cache, token by token."""
    k, v = (x.clone() for x in read_cache(replace(cache, exact=None), dtype))
    mask, exact, seqlen_q = mask.clone(), cache.exact, mask.shape[2]
    for b, used in enumerate(cache.seqused_k.tolist()):
        first = 0 if cache.leftpad_k is None else int(cache.leftpad_k[b])
        for t in range(first, used):
            if t - first >= exact.sinks and t < used - exact.window:
                continue
            slot = t - first if t - first < exact.sinks else exact.sinks + t % exact.window
            k[b, t], v[b, t] = exact.k[b, slot].to(dtype), exact.v[b, slot].to(dtype)
            for n in range(seqlen_q):
                mask[b, :, n, t] = t <= used - seqlen_q + n
    return k, v, mask


def check(q, cache, pages, backend):
    """Compare with fp64: the budget is twice the error of eager fp32, plus a rounding of the factors."""
    mask = visible_keys(cache, q.shape[1], pages)
    group = q.shape[2] // cache.kv_heads
    scale = q.shape[-1] ** -0.5
    *kv, seen = in_place(cache, mask, torch.float64)
    seen = seen.repeat_interleave(group, 1)
    truth = oracle_attention(q.double(), *kv, seen, scale)
    eager = oracle_attention(q.float(), *(x.float() for x in kv), seen, scale)
    got = dx.sparse_decode(q, cache, pages, return_lse=True, backend=backend)
    assert got.out.dtype == q.dtype
    for mine, theirs, wanted in zip(got, eager, truth, strict=True):
        assert torch.equal(mine.isfinite(), wanted.isfinite())
        finite = wanted.isfinite()
        if finite.any():
            worst = lambda x, wanted=wanted, finite=finite: float((x.double() - wanted)[finite].abs().amax())
            multiplied = [mine.dtype]
            if backend == "triton" and q.dtype != torch.float32:
                multiplied += [q.dtype, cache.exact.k.dtype]
            eps = max(torch.finfo(dtype).eps for dtype in multiplied)
            eps = max(eps, 2**-22) if backend == "triton" else eps  # error of a GPU's exp2
            assert worst(mine) <= 2 * (worst(theirs) + eps * float(wanted[finite].abs().amax()))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(24))
def test_random_caches(seed, backend):
    cache, rng, gen = with_exact(seed, sorted(LOW, key=str)[seed % 2])
    q = queries(cache, rng, gen, rng.choice((torch.float32, torch.bfloat16, torch.float16)))
    check(q, cache, random_pages(cache, gen) if seed % 3 else None, backend)


@pytest.mark.slow
@starts_interpreter
def test_under_the_interpreter():
    run_interpreted(__file__)


@runs_here
@pytest.mark.parametrize("seed", range(6 if DEVICE == "cpu" else 24))
def test_random_caches_in_triton(seed):
    pytest.importorskip("triton")
    small = {"page_size": (16, 32, 128)[seed // 2 % 3], "head_dim": (16, 24)[seed % 2], "batch": 2, "kv_heads": 1}
    dtype = torch.int8 if DEVICE == "cpu" else sorted(LOW, key=str)[seed % 2]
    cache, rng, gen = with_exact(1000 + seed, dtype, **(small if DEVICE == "cpu" else {}))
    dtypes = (torch.float32, torch.float16) if DEVICE == "cpu" else (torch.float32, torch.bfloat16, torch.float16)
    q = queries(cache, rng, gen, rng.choice(dtypes))
    pages = random_pages(cache, gen) if seed % 3 else None
    names = ("k", "v", "seqused_k", "page_table", "leftpad_k", "k_scale", "v_scale")
    move = lambda x: None if x is None else x.to(DEVICE)
    exact = replace(cache.exact, k=move(cache.exact.k), v=move(cache.exact.v))
    cache = replace(cache, exact=None)
    moved = replace(cache, **{name: move(getattr(cache, name)) for name in names})
    check(move(q), replace(moved, exact=exact), move(pages), "triton")


def test_slots_follow_the_tokens():
    """Tokens give the same result whether they arrive one by one, several at once, or all at once."""
    gen = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 3, 70, 2, 8, generator=gen)
    leftpad = torch.tensor([0, 5, 0], dtype=torch.int32)
    used = torch.tensor([1, 9, 0], dtype=torch.int32)
    tokens = ExactTokens.of(k, v, used, leftpad, sinks=3, window=7)
    rng = random.Random(0)
    while int(used.max()) < 60:
        new = rng.choice((1, 1, 2, 7, 11))
        at = used[:, None] + torch.arange(new)
        used = used + new
        take = lambda x, at=at: x[torch.arange(3)[:, None], at]
        tokens.write(take(k), take(v), used, leftpad)
        places, wanted = tokens.positions(used, leftpad), ExactTokens.of(k, v, used, leftpad, sinks=3, window=7)
        assert torch.equal(tokens.k[places >= 0], wanted.k[places >= 0])
        assert torch.equal(tokens.v[places >= 0], wanted.v[places >= 0])
        for b in range(3):
            first, stop = int(leftpad[b]), int(used[b])
            known = {*range(first, min(first + 3, stop)), *range(max(first, stop - 7), stop)}
            assert set(places[b].tolist()) - {-1} == known


@pytest.mark.parametrize("dtype", sorted(LOW, key=str), ids=str)
def test_they_win_where_attention_falls_on_first_and_last_tokens(dtype):
    gen = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 2, 600, 2, 64, generator=gen)
    q = torch.randn(2, 1, 4, 64, generator=gen)
    toward = q.unflatten(2, (2, 2)).mean(3)[:, 0]  # (2, 2, 64)
    k[:, :4] += 2 * toward[:, None]
    k[:, -20:] += toward[:, None]
    exact = dx.sparse_decode(q, dx.PagedCache.contiguous(k, v))
    loss = lambda cache: 1 - float(torch.cosine_similarity(dx.sparse_decode(q, cache), exact, dim=-1).mean())
    plain = replace(dx.PagedCache.quantized(k, v, dtype), exact=None)
    assert loss(dx.PagedCache.quantized(k, v, dtype)) < loss(plain) / 4


def test_exact_tokens_that_do_not_fit_are_refused():
    k = torch.randn(1, 64, 2, 16)
    cache = dx.PagedCache.quantized(k, k, sinks=2, window=4, page_size=16)
    with pytest.raises(ValueError, match="at most 4 tokens"):
        dx.sparse_decode(torch.randn(1, 5, 2, 16), cache)
    with pytest.raises(ValueError, match="fp8 and int8"):
        replace(dx.PagedCache.contiguous(k, k), exact=cache.exact)
    with pytest.raises(ValueError, match="match this cache"):
        replace(cache, exact=ExactTokens(torch.zeros(2, 6, 2, 16), torch.zeros(2, 6, 2, 16), 2))
    with pytest.raises(ValueError, match="sinks"):
        ExactTokens(torch.zeros(1, 6, 2, 16), torch.zeros(1, 6, 2, 16), 6)
    with pytest.raises(TypeError, match="one of"):
        ExactTokens(torch.zeros(1, 6, 2, 16).double(), torch.zeros(1, 6, 2, 16).double(), 2)
