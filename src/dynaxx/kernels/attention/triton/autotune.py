# SPDX-License-Identifier: Apache-2.0
"""Search for tile sizes for one problem shape on this GPU: descend from the sizes of `config` to the best neighbour.

Every candidate must reproduce the results of the default tiles before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from typing import NamedTuple

import torch
from torch import Tensor
from triton.testing import do_bench

from dynaxx.kernels.attention.triton import config
from dynaxx.kernels.attention.triton.backward import attention_backward
from dynaxx.kernels.attention.triton.config import TileSizes
from dynaxx.kernels.attention.triton.forward import attention_forward
from dynaxx.kernels.attention.triton.tuned_tiles import keep, kind_of_launch
from dynaxx.kernels.device import gpu_of
from dynaxx.kernels.runtime.arguments import steps_by_tma
from dynaxx.layout import BlockLayout

LARGEST_TILE, SMALLEST_TILE = 128, 16
WORTH = 0.97  # a step must reduce the time to at most this share
SAME = {torch.float32: 1e-5}  # relative error (norm) that another order of summation may cause; for other dtypes:
SAME_HALF = 1e-2


class TunedKernel(NamedTuple):
    """The result of tuning one kernel."""

    kernel: str  # name of the function of `config` that chooses the kernel's tiles
    tiles: TileSizes
    ms: float  # time of the pass that contains the kernel, with these tiles
    default_ms: float  # time with the tiles that `config` chooses


def autotune(
    q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, scale: float, softcap: float | None, gradients: bool
) -> list[TunedKernel]:
    """Tune the forward kernel and, if requested, both backward kernels; store what is faster. Waits for the GPU.

    Raises:
        OSError: the results cannot be written.
    """
    fresh = lambda: replace(layout)  # launches are cached by layout, regardless of their tiles
    forward = lambda: (of := fresh(), lambda: attention_forward(q, k, v, of, scale, softcap))[1]
    out, lse = forward()()
    do, dlse = torch.randn_like(out), torch.zeros_like(lse)
    backward = lambda: (
        of := fresh(),
        lambda: attention_backward(do, dlse, q, k, v, out, lse, of, scale, softcap),
    )[1]
    found = [_tune("forward_tiles", forward, q, k, v, layout)]
    if gradients:
        found += [_tune(name, backward, q, k, v, layout) for name in ("backward_dq_tiles", "backward_dkv_tiles")]
    return found


def _tune(
    kernel: str,
    make: Callable[[], Callable[[], Sequence[Tensor]]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
) -> TunedKernel:
    """Tune one kernel; `make()` creates its pass anew, so that it launches with the current tiles."""
    tma = min(layout.block_size) >= config.TMA_BLOCK and steps_by_tma(q, k, v)
    kind = kind_of_launch(kernel, q.dtype, q.shape[3], v.shape[3], layout.block_size, tma)
    choose, gpu = getattr(config, kernel), gpu_of(q.device)

    def use(tiles: TileSizes | None, store: bool = False) -> None:
        keep(kind, gpu, None if tiles is None else astuple(tiles), store)
        choose.cache_clear()

    use(None)
    default = choose(gpu, q.dtype, q.shape[3], v.shape[3], layout.block_size, tma)
    expected = make()()

    def time(tiles: TileSizes) -> float | None:
        use(tiles)
        run = make()
        for x in expected:
            torch.full_like(x, torch.nan)  # freed at once, so that the next results get memory full of NaN
        try:
            if not _same(run(), expected):
                return None
            return float(do_bench(run, warmup=5, rep=30, return_mode="median"))
        except Exception:  # tiles that do not fit fail in many ways, during compilation or launch
            return None

    try:
        tiles, ms, default_ms = descend(default, lambda tiles: neighbours(tiles, kernel, layout.block_size, tma), time)
    except BaseException:
        use(None)
        raise
    use(None if tiles == default else tiles, store=True)
    return TunedKernel(kernel, tiles, ms, default_ms)


def descend(
    start: TileSizes, steps: Callable[[TileSizes], Iterator[TileSizes]], time: Callable[[TileSizes], float | None]
) -> tuple[TileSizes, float, float]:
    """Move to the fastest neighbour as long as it is clearly faster; return the last tiles, their time and the first.

    Raises:
        RuntimeError: the initial tiles do not run.
    """
    known = {start: time(start)}
    here, first = start, known[start]
    if first is None:
        raise RuntimeError(f"the default tiles do not run: {start}")
    best = first
    while True:
        for tiles in steps(here):
            if tiles not in known:
                known[tiles] = time(tiles)
        ms, fastest = min((each, i) for i, each in enumerate(known.values()) if each is not None)
        if ms > WORTH * best:
            return here, best, first
        here, best = list(known)[fastest], ms


def neighbours(tiles: TileSizes, kernel: str, block_size: tuple[int, int], tma: bool) -> Iterator[TileSizes]:
    """Yield tiles that differ in one number; the resident side divides its block, the other may gather small blocks."""
    gathered = [size if tma else max(size, 64) for size in block_size]
    most_m, most_n = (gathered[0], block_size[1]) if kernel == "backward_dkv_tiles" else (block_size[0], gathered[1])
    for block_m in (tiles.block_m // 2, tiles.block_m * 2):
        if SMALLEST_TILE <= block_m <= min(most_m, LARGEST_TILE):
            yield replace(tiles, block_m=block_m)
    for block_n in (tiles.block_n // 2, tiles.block_n * 2):
        if SMALLEST_TILE <= block_n <= min(most_n, LARGEST_TILE):
            yield replace(tiles, block_n=block_n)
    yield replace(tiles, num_warps=4 if tiles.num_warps == 8 else 8)
    for num_stages in (tiles.num_stages - 1, tiles.num_stages + 1):
        if 1 <= num_stages <= 4:
            yield replace(tiles, num_stages=num_stages)
    yield replace(tiles, max_registers=None if tiles.max_registers else 128)


def _same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Return whether results equal those of the default tiles up to the order of sums, with the same empty rows."""
    for a, b in zip(found, expected, strict=True):
        if not torch.equal(a.isfinite(), b.isfinite()):
            return False
        a, b = (x.where(x.isfinite(), 0).float() for x in (a, b))
        if (a - b).norm() > SAME.get(expected[0].dtype, SAME_HALF) * b.norm():
            return False
    return True
