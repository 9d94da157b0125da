# SPDX-License-Identifier: Apache-2.0
"""A recorded decode step of native sparse attention contains only its launches, and repeats the first call's result."""

import os

import pytest
import torch

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles")

from driver_standin import CALLS, standin  # noqa: E402, F401
from test_launcher import started  # noqa: E402, F401

import dynaxx as dx  # noqa: E402
from dynaxx.kernels.support import triton as support  # noqa: E402
from dynaxx.ops import decode_checks  # noqa: E402
from dynaxx.trained.nsa import decode as nsa_decode  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
SIZES = dx.trained.NsaSizes(slc_count=4, window=70)


def inputs(seed=0, batch=3, page_size=64, steps=1, weighted=False):
    torch.manual_seed(seed)
    pages = 512 // page_size
    k, v = torch.randn(2, batch * pages, page_size, 2, 64)
    table = torch.randperm(batch * pages).int().view(batch, pages)
    lengths = torch.tensor([500 - seed, 64 + seed, 300][:batch], dtype=torch.int32)
    cache = dx.PagedCache(*(x.to(DEVICE) for x in (k, v, lengths, table)))
    weight = torch.rand(SIZES.cmp_block, 2).to(DEVICE) if weighted else None
    q, gates = torch.randn(batch, steps, 8, 64).to(DEVICE), torch.rand(batch, steps, 8, 3).to(DEVICE)
    return dx.trained.compress_pages(cache, SIZES, weight, weight, backend="triton"), q, gates, weight


def step(cache, q, gates, weight, blocks=None):
    dx.trained.compress_pages(cache, compress_k=weight, compress_v=weight, new_tokens=1, backend="triton")
    return dx.trained.nsa_decode(q, cache, gates, block_indices=blocks, backend="triton")


def steps_in(kept):
    """Return the recordings of steps."""
    return [known for (call, *_), known in kept.items() if call is nsa_decode._step and known.launches is not None]


@pytest.mark.skipif(DEVICE == "cuda", reason="what is compiled for the driver that writes down would stay")
@pytest.mark.parametrize("page_size", [16, 64])
def test_only_launches_are_left(standin, kept, monkeypatch, page_size):  # noqa: F811
    """Compare the grids of kernels with a first call's, in order. Nothing runs, so no value is read."""
    monkeypatch.setattr(support, "decode_reasons", lambda problem: [])
    monkeypatch.setattr(decode_checks, "looks_at_values", lambda device: False)
    monkeypatch.setattr(decode_checks, "_known", {})
    calls, replays = [], []
    for seed in range(4):
        given = inputs(seed, page_size=page_size)
        CALLS.clear()
        standin.launched.clear()
        out, blocks = step(*given)
        calls.append([each[:3] for each in CALLS])
        replays.append([tuple(each.sizes[:3]) for each in standin.launched])
        assert (out.shape, blocks.shape) == ((3, 1, 8, 64), (3, 1, 2, 4))
    assert len(calls[0]) == 15 + (page_size < 64)
    assert calls == [calls[0], calls[0], [], []]
    assert replays == [[], [], calls[0], calls[0]]
    assert len(steps_in(kept)) == 1


CASES = {
    "pages of a block": {},
    "smaller pages": {"page_size": 16},
    "one sequence": {"batch": 1},
    "several queries": {"steps": 3},
    "weights": {"weighted": True},
}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", CASES)
def test_repeats_give_what_first_calls_give(name, kept):
    def both(given):
        out, blocks = step(*given)
        return out, blocks, *step(*given, blocks), given[0].compressed.k, given[0].compressed.v

    every = [inputs(seed, **CASES[name]) for seed in range(4)]
    repeats = [both(each) for each in every]
    assert steps_in(kept)
    for each, repeat in zip(every, repeats, strict=True):
        kept.clear()
        for a, b in zip(repeat, both(each), strict=True):
            assert torch.equal(a, b)
