# SPDX-License-Identifier: Apache-2.0
"""Tile sizes tuned on a machine are searched, kept and read correctly; timing itself needs a GPU."""

import errno
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import dynaxx as dx
from dynaxx.ops.autotune import autotune as tune_tiles

pytest.importorskip("triton")

from dynaxx.kernels.attention.triton import autotune, config
from dynaxx.kernels.attention.triton import tuned_tiles as tuned
from dynaxx.kernels.attention.triton.config import TileSizes
from dynaxx.kernels.device import CARDS, gpu_of

SHAPE = (torch.bfloat16, 128, 128, (128, 64), False)
GPU = replace(CARDS["H200"], name="Some GPU (80 GB)")


@pytest.fixture
def on_disk(tmp_path, monkeypatch):
    """Use an empty cache folder."""
    monkeypatch.setenv("DYNAXX_CACHE", str(tmp_path))
    forget()
    yield tuned.tuned_file(GPU)
    forget()


def forget():
    tuned._stored.cache_clear()
    for choose in (config.forward_tiles, config.backward_dq_tiles, config.backward_dkv_tiles):
        choose.cache_clear()


def test_tuned_tiles_are_used_in_later_processes(on_disk):
    default = config.forward_tiles(GPU, *SHAPE)
    better = (32, 64, 4, 3, 128)
    tuned.keep(tuned.kind_of_launch("forward_tiles", *SHAPE), GPU, better)
    forget()  # as another process would
    assert config.forward_tiles(GPU, *SHAPE) == TileSizes(*better) != default
    assert config.forward_tiles(GPU, torch.float16, *SHAPE[1:]) == default
    assert config.backward_dq_tiles(GPU, *SHAPE) != TileSizes(*better)
    tuned.keep(tuned.kind_of_launch("backward_dq_tiles", *SHAPE), GPU, (16, 16, 4, 1, None))
    assert len(json.loads(on_disk.read_text())) == 2
    assert [path.name for path in on_disk.parent.iterdir()] == [on_disk.name]
    assert "Some-GPU-80-GB-" in on_disk.name
    on_disk.unlink()
    forget()
    assert config.forward_tiles(GPU, *SHAPE) == default


def test_a_full_disk_leaves_what_was_there(on_disk, monkeypatch):
    kind = tuned.kind_of_launch("forward_tiles", *SHAPE)
    tuned.keep(kind, GPU, (32, 64, 4, 3, 128))
    before = on_disk.read_text()

    def half(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", half)
        with pytest.raises(OSError, match="No space left"):
            tuned.keep(kind, GPU, (64, 64, 4, 3, 128))
    assert on_disk.read_text() == before
    assert [path.name for path in on_disk.parent.iterdir()] == [on_disk.name]


def test_defaults_replace_what_was_stored_and_trials_are_not_stored(on_disk):
    tuned.keep("a", GPU, (32, 64, 4, 3, 128))
    tuned.keep("b", GPU, (64, 64, 4, 3, 128), store=False)
    tuned.keep("c", GPU, (16, 64, 4, 3, 128))
    tuned.keep("a", GPU, None)
    assert list(json.loads(on_disk.read_text())) == ["c"]


def test_two_writers_at_once_lose_nothing(on_disk):
    """Threads stand for processes: each write opens and locks the folder anew."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: tuned.keep(str(number), GPU, (32, 64, 4, 3, 128)), range(40)))
    assert len(json.loads(on_disk.read_text())) == 40


@pytest.mark.parametrize(
    "text", ["{", "[]", "[" * 100_000, '{"a": [3, 64, 4, 2, null]}', '{"a": [64, 64, 4]}', '{"a": 1}']
)
def test_a_broken_file_is_ignored_and_said(on_disk, caplog, text):
    default = config.forward_tiles(GPU, *SHAPE)
    on_disk.parent.mkdir(parents=True)
    on_disk.write_text(text)
    forget()
    with caplog.at_level(logging.WARNING, "dynaxx"):
        assert config.forward_tiles(GPU, *SHAPE) == default
    assert "is ignored" in caplog.text


def test_the_fastest_neighbour_until_none_is_faster():
    cost = lambda tiles: abs(tiles.block_m - 16) + 2 * abs(tiles.num_warps - 4) + tiles.num_stages
    timed = []

    def time(tiles):
        timed.append(tiles)
        return None if tiles.block_n > 64 else float(cost(tiles))  # larger tiles do not run

    steps = lambda tiles: autotune.neighbours(tiles, "forward_tiles", (128, 128), True)
    found, ms, default_ms = autotune.descend(TileSizes(128, 64, 8, 3), steps, time)
    assert (found.block_m, found.num_warps, found.num_stages) == (16, 4, 1)
    assert (ms, default_ms) == (1.0, 123.0)
    assert len(timed) == len(set(timed))
    with pytest.raises(RuntimeError, match="do not run"):
        autotune.descend(TileSizes(128, 128, 8, 3), steps, time)


@pytest.mark.parametrize("kernel", ["forward_tiles", "backward_dq_tiles", "backward_dkv_tiles"])
@pytest.mark.parametrize("tma", [False, True])
def test_neighbours_fit_their_blocks(kernel, tma):
    for block_size in ((64, 64), (128, 64), (64, 128), *(() if tma else ((16, 16), (32, 128), (16, 64)))):
        start = getattr(config, kernel)(GPU, torch.float16, 64, 64, block_size, tma)
        for tiles in autotune.neighbours(start, kernel, block_size, tma):
            fixed, moving = (tiles.block_m, tiles.block_n)[:: -1 if "dkv" in kernel else 1]
            fixed_block, moving_block = block_size[:: -1 if "dkv" in kernel else 1]
            assert fixed_block % fixed == 0
            assert moving <= max(moving_block, 64)
            assert moving_block % moving == 0 or (not tma and moving % moving_block == 0)


def test_without_a_gpu_it_says_so():
    q = torch.randn(1, 64, 2, 32)
    layout = dx.SlidingWindow(16).layout(64, block_size=16)
    with pytest.raises((dx.UnsupportedInputError, ValueError), match="GPU"):
        tune_tiles(q, q, q, layout)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNAXX_CACHE", str(tmp_path))
    monkeypatch.setattr(
        autotune, "neighbours", lambda tiles, *rest: iter([TileSizes(32, 32, 4, 1), TileSizes(16, 64, 4, 2)])
    )
    forget()
    q, k, v = (torch.randn(1, 1024, heads, 64, device="cuda", dtype=torch.float16) for heads in (4, 2, 2))
    layout = dx.SlidingWindow(300).layout(1024, block_size=32, device="cuda")
    expected = dx.sparse_attention(q, k, v, layout, backend="triton")
    found = tune_tiles(q, k, v, layout, gradients=False)
    try:
        assert [each.kernel for each in found] == ["forward_tiles"]
        assert found[0].ms <= found[0].default_ms
        assert tuned.tuned_file(gpu_of(q.device)).exists()
        again = dx.sparse_attention(q, k, v, layout, backend="triton")
        assert (again - expected).norm() <= 1e-2 * expected.norm()
    finally:
        forget()
