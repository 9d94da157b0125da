# SPDX-License-Identifier: Apache-2.0
"""Softcap, sinks and windows of `sparse_decode` against an oracle: all kinds of caches, selected pages or all."""

import random
from dataclasses import replace

import pytest
import torch
from test_decode import DTYPES, queries, random_cache, random_pages
from test_decode_triton import DTYPES as GPU_DTYPES
from test_decode_triton import QUERY_DTYPES, to_device

import dynaxx as dx
from dynaxx.kernels.decode.reference import read_cache, visible_keys
from dynaxx.testing import oracle_attention
from interpreter import DEVICE, on_gpu, run_interpreted, runs_here, starts_interpreter

pytest.importorskip("triton")


def random_options(seed, q_heads, windows=True):
    """Draw one or more of softcap, sinks and a window; a head may have a sink without weight."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    sinks = torch.randn(q_heads, generator=gen) * 2
    sinks[rng.randrange(q_heads)] = -torch.inf
    options = {"softcap": rng.choice((0.7, 3.0, 50.0)), "sinks": sinks.to(rng.choice((torch.float32, torch.bfloat16)))}
    if windows:
        options["window_size"] = (rng.choice((0, 1, 7, 30, 200)), rng.choice((-1, 0)))
    for name in list(options)[1:]:
        if rng.random() < 0.3:
            del options[name]
    if len(options) > 1 and rng.random() < 0.4:
        del options["softcap"]
    return options


def check_options(q, cache, pages, backend, options):
    """Compare with fp64: the budget is twice the error of eager fp32, plus one rounding of the output."""
    seen = visible_keys(cache, q.shape[1], pages if isinstance(pages, torch.Tensor) else None).clone()
    if (left := options.get("window_size", (-1, -1))[0]) >= 0:
        for b, used in enumerate(cache.seqused_k.tolist()):
            for i in range(q.shape[1]):
                seen[b, :, i, : max(0, used - q.shape[1] + i - left)] = False
    seen = seen.repeat_interleave(q.shape[2] // cache.kv_heads, 1)
    softcap, sinks = options.get("softcap"), options.get("sinks")
    formula = lambda dtype: oracle_attention(
        q.to(dtype), *read_cache(cache, dtype), seen, 0.2, softcap, None if sinks is None else sinks.to(dtype)
    )
    exact, eager = formula(torch.float64), formula(torch.float32)
    got = dx.sparse_decode(q, cache, pages, scale=0.2, return_lse=True, backend=backend, **options)
    for mine, theirs, truth in zip(got, eager, exact, strict=True):
        assert torch.equal(mine.isfinite(), truth.isfinite())
        finite = truth.isfinite()
        if finite.any():
            worst = lambda x, truth=truth, finite=finite: float((x.double() - truth)[finite].abs().amax())
            rounding = torch.finfo(mine.dtype).eps * float(truth[finite].abs().amax())
            assert worst(mine) <= 2 * (worst(theirs) + rounding)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("seed", range(20))
def test_random_caches(seed, backend):
    cache, rng, gen = random_cache(300 + seed, dtype=DTYPES[seed % len(DTYPES)])
    q = queries(cache, rng, gen, rng.choice((torch.float32, torch.bfloat16, torch.float16)))
    pages = random_pages(cache, gen) if seed % 3 else None
    check_options(q, cache, pages, backend, random_options(seed, q.shape[2]))


@pytest.mark.slow
@starts_interpreter
def test_under_the_interpreter():
    run_interpreted(__file__)


@runs_here
@pytest.mark.parametrize("seed", range(8 if DEVICE == "cpu" else 24))
def test_random_caches_in_triton(seed):
    small = {"page_size": (16, 32, 128)[seed // 2 % 3], "head_dim": (16, 24)[seed % 2], "batch": 2, "kv_heads": 1}
    dtype = GPU_DTYPES[seed % len(GPU_DTYPES)]
    cache, rng, gen = random_cache(2000 + seed, dtype=dtype, **(small if DEVICE == "cpu" else {}))
    q = queries(cache, rng, gen, rng.choice(QUERY_DTYPES))
    pages = random_pages(cache, gen) if seed % 3 else None
    move = lambda x: x.to(DEVICE) if isinstance(x, torch.Tensor) else x
    options = {name: move(x) for name, x in random_options(seed, q.shape[2]).items()}
    check_options(move(q), to_device(cache), move(pages), "triton", options)


def check_a_budget(backend, device="cpu"):
    """Check that a budget selects the same pages with and without the options, and that their attention is right."""
    gen = torch.Generator().manual_seed(7)
    k, v = torch.randn(2, 2, 200, 2, 16, generator=gen)
    used = torch.tensor([200, 77], dtype=torch.int32)
    cache = dx.PagedCache.contiguous(k, v, page_size=16, seqused_k=used)
    cache = dx.summarize_pages(to_device(cache, device), backend="reference")
    q = torch.randn(2, 1, 6, 16, generator=gen).to(device)
    budget = dx.PageBudget(0.3, sinks=4, window=20)
    pages = dx.select_pages(q, cache, budget, scale=0.2, backend=backend)
    options = {"softcap": 2.0, "sinks": torch.linspace(-2, 3, 6, device=device)}
    given = lambda pages: dx.sparse_decode(q, cache, pages, scale=0.2, return_lse=True, backend=backend, **options)
    for mine, theirs in zip(given(budget), given(pages), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    check_options(q, cache, pages, backend, options)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_budget(backend):
    check_a_budget(backend)


@runs_here
def test_a_budget_in_triton():
    check_a_budget("triton", DEVICE)


def exact_tokens_case(window_size):
    """Return an 8-bit cache with exact tokens, and a cache that holds the same values in full precision."""
    gen = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 2, 150, 2, 16, generator=gen)
    used, leftpad = torch.tensor([150, 60], dtype=torch.int32), torch.tensor([0, 9], dtype=torch.int32)
    cache = dx.PagedCache.quantized(k, v, page_size=16, seqused_k=used, leftpad_k=leftpad, sinks=5, window=20)
    wide = [x.float() for x in read_cache(cache, torch.float64)]
    positions = cache.exact.positions(used, leftpad)
    for b in range(2):
        for slot, at in enumerate(positions[b].tolist()):
            if at >= 0:
                wide[0][b, at], wide[1][b, at] = cache.exact.k[b, slot], cache.exact.v[b, slot]
    full = dx.PagedCache(*wide, used, page_size=16, leftpad_k=leftpad)
    options = {"softcap": 1.5, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "window_size": window_size}
    return cache, full, torch.randn(2, 3, 4, 16, generator=gen), options


@pytest.mark.parametrize("window_size", [(-1, -1), (12, 0), (40, 0), (147, 0)])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_exact_tokens(backend, window_size):
    cache, full, q, options = exact_tokens_case(window_size)
    want = dx.sparse_decode(q, full, return_lse=True, backend="reference", **options)
    for mine, theirs in zip(dx.sparse_decode(q, cache, return_lse=True, backend=backend, **options), want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@runs_here
@pytest.mark.parametrize("window_size", [(-1, -1), (12, 0), (147, 0)])
def test_exact_tokens_in_triton(window_size):
    cache, full, q, options = exact_tokens_case(window_size)
    want = dx.sparse_decode(q, full, return_lse=True, backend="reference", **options)
    options["sinks"] = options["sinks"].to(DEVICE)
    exact = replace(cache.exact, k=cache.exact.k.to(DEVICE), v=cache.exact.v.to(DEVICE))
    there = replace(to_device(replace(cache, exact=None)), exact=exact)
    got = dx.sparse_decode(q.to(DEVICE), there, return_lse=True, backend="triton", **options)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=2e-3, atol=2e-3)


def test_invalid_inputs_are_refused():
    k = torch.randn(1, 64, 2, 16)
    cache, q = dx.PagedCache.contiguous(k, k, page_size=16), torch.randn(1, 1, 4, 16)
    with pytest.raises(ValueError, match="`softcap` must be 1e-30"):
        dx.sparse_decode(q, cache, softcap=0.0)
    with pytest.raises(ValueError, match="`sinks` must be"):
        dx.sparse_decode(q, cache, sinks=torch.zeros(2))
    for wrong in ((-2, 0), (3, 1), (3,)):
        with pytest.raises(ValueError, match="`window_size` must be"):
            dx.sparse_decode(q, cache, window_size=wrong)
    with pytest.raises(ValueError, match="if a budget selects pages"):
        dx.sparse_decode(q, dx.summarize_pages(cache), dx.PageBudget(0.5), window_size=(3, 0))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8], ids=str)
def test_head_dim_512(dtype):
    cache, _, gen = random_cache(5, dtype=dtype, kv_heads=2, head_dim=512, page_size=64, batch=2)
    q = torch.randn(2, 1, 32, 512, generator=gen).to(torch.float32 if dtype == torch.float32 else torch.bfloat16)
    check_options(q.to(DEVICE), to_device(cache), None, "triton", {"softcap": 3.0})
