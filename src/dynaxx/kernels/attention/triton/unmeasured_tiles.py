# SPDX-License-Identifier: Apache-2.0
"""Tile sizes for GPUs on which none were measured, chosen by what a compiler says without the GPU.

Programs with more resident rows read less, so each entry has the most rows, and then the longest steps, for which the
compiler spills no registers inside loops. The step, and then the rows, are halved until the tiles fit in the GPU's
shared memory.
`tests/kernels/test_matrix.py` compiles them for every architecture. `dynaxx.autotune` measures better ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dynaxx.kernels.device import Gpu, padded

SMALLEST = 16  # rows of a matrix instruction


@dataclass(frozen=True)
class Rows:
    """Tiles of a kernel: rows that stay in a program, rows per step, warps and stages."""

    stay: int
    step: int
    warps: int
    stages: int


# By matrix unit, kernel and width of the widest row, rounded up.
TILES = {
    "registers": {  # sums in registers, products in the order of the program: sm_80 to sm_89, sm_120
        "forward": {64: Rows(128, 64, 8, 2), 128: Rows(64, 64, 4, 2), 256: Rows(64, 32, 8, 2), 512: Rows(64, 16, 8, 1)},
        "forward by TMA": {128: Rows(128, 64, 8, 2), 256: Rows(32, 32, 4, 2), 512: Rows(16, 16, 4, 1)},
        "dq": {64: Rows(64, 32, 4, 2), 128: Rows(64, 32, 4, 2), 256: Rows(64, 32, 8, 1), 512: Rows(32, 32, 8, 1)},
        "dkv": {64: Rows(64, 32, 8, 2), 128: Rows(64, 32, 8, 2), 256: Rows(64, 16, 8, 1), 512: Rows(32, 16, 8, 1)},
        "dkv on sm_80": {256: Rows(32, 32, 8, 1)},
        "dv": {512: Rows(32, 16, 8, 1)},
    },
    "tensor memory": {  # sums in tensor memory, tiles of 128 rows: sm_100, sm_103
        "forward": {128: Rows(128, 64, 8, 2), 256: Rows(128, 32, 8, 2), 512: Rows(64, 32, 8, 1)},
        "dq": {128: Rows(128, 64, 8, 2), 256: Rows(64, 64, 8, 1), 512: Rows(64, 32, 8, 1)},
        "dkv": {128: Rows(64, 64, 8, 2), 256: Rows(64, 32, 8, 1), 512: Rows(64, 32, 8, 1)},
        "dv": {512: Rows(64, 32, 8, 1)},
    },
    "amd": {  # 64 threads per warp, so that 4 warps have all registers; a product has tiles of 16 or 32 rows
        "forward": {64: Rows(128, 64, 4, 2), 128: Rows(64, 64, 4, 2), 256: Rows(64, 32, 4, 2), 512: Rows(64, 32, 4, 1)},
        "dq": {128: Rows(64, 64, 4, 2), 256: Rows(64, 32, 4, 1), 512: Rows(64, 16, 4, 1)},
        "dkv": {64: Rows(64, 32, 4, 2), 128: Rows(64, 32, 4, 1), 256: Rows(64, 16, 4, 1), 512: Rows(64, 16, 4, 1)},
        "dv": {512: Rows(64, 16, 4, 1)},
    },
}


def unmeasured_tiles(
    gpu: Gpu,
    kernel: str,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    block_size: tuple[int, int],
    tma: bool,
) -> tuple[int, int, int, int] | None:
    """Return the fields of `config.TileSizes` for a kernel; None for fp32, whose tiles are the same on all GPUs.

    Args:
        gpu: what the kernel runs on.
        kernel: name of the function of `config`, such as "backward_dq_tiles".
        dtype: of q, k and v.
        head_dim: of q and k.
        head_dim_v: of v.
        block_size: of the layout. Rows that stay divide their block; steps may gather several blocks of keys.
        tma: whether tiles are loaded by TMA.
    """
    if dtype == torch.float32:
        return None
    kind = kernel.removeprefix("backward_").removesuffix("_tiles")
    unit = "amd" if gpu.vendor == "amd" else "tensor memory" if gpu.has_tensor_memory else "registers"
    sizes = TILES[unit].get(f"{kind} by TMA" if tma else kind, TILES[unit][kind])
    wide = max(padded(head_dim), padded(head_dim_v))
    own = TILES[unit].get(f"{kind} on {gpu.architecture}", {}).get(wide)
    found = own or next(rows for width, rows in sizes.items() if wide <= width)
    both = padded(head_dim) + padded(head_dim_v)
    turned = kind in ("dkv", "dv")
    stay_block, step_block = block_size[::-1] if turned else block_size
    resident = padded(head_dim) if kind in ("forward", "dv") else both
    stay, step, stages = min(found.stay, stay_block), min(found.step, max(step_block, 64)), found.stages
    while (stay * resident + stages * step * both) * dtype.itemsize > gpu.shared_memory:
        if stages > 1:
            stages -= 1
        elif step > SMALLEST:
            step //= 2
        elif stay > SMALLEST:
            stay //= 2
        else:
            break
    warps = found.warps if tma or stay == found.stay else max(4, found.warps * stay // found.stay)
    return (step, stay, warps, stages) if turned else (stay, step, warps, stages)
