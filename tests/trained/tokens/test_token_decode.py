# SPDX-License-Identifier: Apache-2.0
"""Decoding over chosen tokens of paged caches: the core equals the definition, and the definition equals attention."""

import random

import pytest
import torch

import dynaxx as dx
from dynaxx.trained.testing.nsa import random_choices
from dynaxx.trained.tokens.spans import TokenSpans
from token_caches import BATCH, choice, random_cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("seed", range(8))
def test_core(seed, dtype):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kv_heads, group, seqlen_q, size = (
        rng.choice((1, 2)),
        rng.choice((1, 3, 8, 17)),
        rng.choice((1, 3)),
        rng.choice((1, 4, 8)),
    )
    cache = random_cache(rng, kv_heads, rng.choice(((16, 16), (40, 24), (96, 64))), dtype)
    q = torch.randn(BATCH, seqlen_q, kv_heads * group, cache.head_dim)
    indices = choice(rng, seqlen_q, rng.choice((1, kv_heads, kv_heads * group)), rng.choice((1, 30)), size)
    more = {"softcap": 3.0, "sinks": torch.randn(kv_heads * group)} if seed % 2 else {}
    run = lambda q, backend: dx.trained.selected_decode(
        q, cache, indices, block_size=size, return_lse=True, backend=backend, **more
    )
    got, want = run(q, "cpu"), run(q.double(), "reference")
    assert torch.equal(got.lse.isfinite(), want.lse.isfinite())
    torch.testing.assert_close(got.out.double(), want.out, atol=3e-6, rtol=3e-5)
    seen = want.lse.isfinite()
    torch.testing.assert_close(got.lse.double()[seen], want.lse[seen], atol=3e-6, rtol=3e-5)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_step_is_the_last_rows_of_attention(backend):
    k, v = torch.randn(2, 100, 2, 32), torch.randn(2, 100, 2, 32)
    q = torch.randn(2, 5, 4, 32)
    indices = random_choices(random.Random(1), TokenSpans((0, 10), (0, 100)), 2, 12).unflatten(0, (2, 5))
    step = dx.trained.selected_decode(q, dx.PagedCache.contiguous(k, v), indices, backend=backend)
    torch.testing.assert_close(
        step, dx.trained.selected_attention(q, k, v, indices, block_size=1), atol=2e-6, rtol=1e-5
    )


def test_latent_cache():
    latent = torch.randn(2, 64, 1, 160)
    cache = dx.PagedCache.contiguous(latent, latent[..., :128])
    q, indices = torch.randn(2, 1, 16, 160), torch.arange(0, 64, 3)[None, None, None].expand(2, 1, 1, -1)
    got = dx.trained.selected_decode(q, cache, indices)
    torch.testing.assert_close(got, dx.trained.selected_decode(q.double(), cache, indices, backend="reference").float())


def test_wrong_choices():
    cache = dx.PagedCache.contiguous(torch.randn(2, 64, 2, 16), torch.randn(2, 64, 2, 16))
    q, good = torch.randn(2, 1, 4, 16), torch.arange(6).expand(2, 1, 1, 6)
    for wrong in (good + 60, good - 2):
        with pytest.raises(ValueError, match="must hold -1 or blocks below 64"):
            dx.trained.selected_decode(q, cache, wrong)
    with pytest.raises(ValueError, match="twice"):
        dx.trained.selected_decode(q, cache, good * 0)
    with pytest.raises(ValueError, match=r"\(2, 1\) \+ \(select_heads, slots\)"):
        dx.trained.selected_decode(q, cache, good[:, 0])
    with pytest.raises(ValueError, match="block_size"):
        dx.trained.selected_decode(q, cache, good, block_size=5)
