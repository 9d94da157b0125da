# SPDX-License-Identifier: Apache-2.0
"""Decoding over chosen tokens in Triton against fp64: under Triton's interpreter on a CPU, and on a GPU."""

import random
from dataclasses import fields, replace

import pytest
import torch

import dynaxx as dx
from interpreter import DEVICE, on_gpu, run_interpreted, runs_here, starts_interpreter
from trained.tokens.test_token_decode import BATCH, choice, random_cache

pytest.importorskip("triton")


@pytest.mark.slow  # fingerprints show that kernels are those that passed
@starts_interpreter
def test_under_the_interpreter():
    run_interpreted(__file__)


def moved(cache):
    """Move a cache to the device of these tests."""
    parts = {field.name: getattr(cache, field.name) for field in fields(cache)}
    parts = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in parts.items()}
    if cache.exact is not None:
        parts["exact"] = replace(cache.exact, k=cache.exact.k.to(DEVICE), v=cache.exact.v.to(DEVICE))
    return replace(cache, **parts)


def compare(cache, q, indices, size, dtype=torch.float32, **more):
    run = lambda q, backend: dx.trained.selected_decode(
        q, moved(cache), indices.to(DEVICE), block_size=size, return_lse=True, backend=backend, **more
    )
    got, want = run(q.to(DEVICE, dtype), "triton"), run(q.to(DEVICE, torch.float64), "reference")
    limit = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    assert torch.equal(got.lse.isfinite(), want.lse.isfinite())
    assert not got.out.isnan().any()
    torch.testing.assert_close(got.out.double(), want.out, atol=limit, rtol=limit)
    seen = want.lse.isfinite()
    torch.testing.assert_close(got.lse.double()[seen], want.lse[seen], atol=limit, rtol=limit)


@runs_here
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("seed", range(4))
def test_random_caches(seed, dtype):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kv_heads, group = rng.choice((1, 2)), rng.choice((1, 3, 17))
    seqlen_q, size = rng.choice((1, 3)), rng.choice((1, 4, 8))
    cache = random_cache(rng, kv_heads, rng.choice(((16, 16), (40, 24), (144, 64))), dtype)
    q = torch.randn(BATCH, seqlen_q, kv_heads * group, cache.head_dim)
    indices = choice(rng, seqlen_q, rng.choice((1, kv_heads, kv_heads * group)), rng.choice((1, 30)), size)
    more = {"softcap": 3.0, "sinks": torch.randn(kv_heads * group, device=DEVICE)} if seed % 2 else {}
    compare(cache, q, indices, size, **more)


@runs_here
def test_latent_cache():
    torch.manual_seed(0)
    latent = torch.randn(2, 64, 1, 576, dtype=torch.float16, device=DEVICE)
    cache = dx.PagedCache.contiguous(latent, latent[..., :512])
    indices = torch.arange(0, 64, 3, dtype=torch.int32)[None, None, None].expand(2, 1, 1, -1)
    compare(cache, torch.randn(2, 1, 70, 576).half(), indices, 1, torch.float16, scale=0.05)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("heads", "dims"), [((128, 1), (576, 512)), ((32, 8), (128, 128)), ((8, 8), (64, 64))])
def test_models_caches(heads, dims, dtype):
    """Call three times: the first call runs, the second is recorded, the third is replayed."""
    rng = random.Random(1)
    torch.manual_seed(1)
    cache = random_cache(rng, heads[1], dims, dtype)
    for _ in range(3):
        q = torch.randn(BATCH, 1, heads[0], dims[0])
        compare(cache, q, choice(rng, 1, 1, 60, 1), 1, torch.bfloat16, scale=0.05)
