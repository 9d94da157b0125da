# SPDX-License-Identifier: Apache-2.0
"""Chunks written into an engine's pages by a kernel: equal to the same chunks written by torch."""

import pytest
import torch

from dynaxx.integrations.runtime import summary_updates
from dynaxx.integrations.runtime.paged import FP8, Pages, write
from dynaxx.integrations.runtime.paged_warmup import LayerShape, Softmax, run_write
from dynaxx.integrations.runtime.summary_updates import write_chunk
from interpreter import DEVICE, run_interpreted, runs_here, starts_interpreter


@pytest.mark.slow
@starts_interpreter
def test_under_the_interpreter():
    run_interpreted(__file__)


def pages_of(layout, page_size, dim, dtype):
    """Return pages of ones; `layout` says which strides."""
    if layout == "tokens first":
        return Pages(torch.ones(9, page_size, 3, 2 * dim, dtype=dtype, device=DEVICE).transpose(1, 2))
    wide = 3 if layout == "wide" else 2
    return Pages(torch.ones(9, 3, page_size, wide * dim, dtype=dtype, device=DEVICE)[..., : 2 * dim])


@runs_here
@pytest.mark.parametrize("layout", ["heads first", "tokens first", "wide"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_chunk_lies_in_its_pages(layout, dtype, monkeypatch):
    monkeypatch.setattr(summary_updates, "FEWEST", 1)
    draw = torch.Generator().manual_seed(0)
    for page_size, dim, tokens in ((16, 16, 100), (32, 24, 33), (128, 64, 1), (64, 8, 500)):
        both = torch.randn(tokens + 3, 5 + 6, dim, generator=draw).to(DEVICE, dtype)
        k, v = both[:, 5:8], both[:, 8:]
        slots = torch.randperm(9 * page_size, generator=draw)[:tokens].to(DEVICE)
        slots[::7] = -1
        got, want = pages_of(layout, page_size, dim, dtype), pages_of(layout, page_size, dim, dtype)
        if len(slots) > 9 * page_size:
            continue
        assert write_chunk(got, k, v, slots)
        write(want, k, v, slots)
        assert torch.equal(got.memory, want.memory)


@runs_here
def test_chunks_that_the_engine_must_write(monkeypatch):
    k, slots = torch.randn(2000, 3, 16, device=DEVICE), torch.arange(2000, device=DEVICE) % 100
    pages = pages_of("heads first", 16, 16, torch.float32)
    before = pages.memory.clone()
    scale = torch.ones((), device=DEVICE)
    assert not write_chunk(pages, k, k, slots[: summary_updates.FEWEST - 1])
    assert not write_chunk(Pages(pages.memory.to(FP8), scale, scale), k, k, slots)
    assert not write_chunk(pages, k.half(), k.half(), slots)
    assert not write_chunk(pages, k.transpose(1, 2).contiguous().transpose(1, 2), k, slots)
    assert torch.equal(pages.memory, before)
    assert write_chunk(pages, k, k, slots)


@runs_here
def test_the_kernel_is_prepared():
    run_write(LayerShape(4, 2, 16, torch.float32, torch.device(DEVICE), Softmax(1.0)), 16)
