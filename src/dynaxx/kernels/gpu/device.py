# SPDX-License-Identifier: Apache-2.0
"""Properties of GPUs and of the installed Triton, and sizes of tiles. Importing this module does not load Triton."""

from __future__ import annotations

import importlib.metadata
import os
from functools import lru_cache

import torch

INTERPRETER_SHARED_MEMORY = 1 << 20


def interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def padded(head_dim: int) -> int:
    """Return the tile width for head_dim: a power of two, at least 16."""
    return max(16, power_of_two(head_dim))


def power_of_two(least: int) -> int:
    """Return the smallest power of two >= `least` >= 1. Triton's own function takes 3 us of host time."""
    return 1 << (least - 1).bit_length()


@lru_cache(maxsize=16)
def feeds_registers(device: torch.device) -> bool:
    """Return whether matrix instructions read their left operand from registers or shared memory, as on Hopper.

    Also true under the interpreter, so that the kernels that rely on it are tested there.
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


@lru_cache(maxsize=16)
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may use."""
    if device.type != "cuda":
        return INTERPRETER_SHARED_MEMORY
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"])


@lru_cache(maxsize=16)
def overlap(device: torch.device) -> dict[str, bool]:
    """Return launch options that let a kernel start before its predecessor ends; the kernel then calls `gdc_wait`."""
    able = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}


@lru_cache(maxsize=16)
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 6 under Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 6


@lru_cache(maxsize=16)
def has_tma(device: torch.device) -> bool:
    """Return whether the GPU has a tensor memory accelerator (TMA), the copy unit of Hopper and later."""
    return torch.cuda.get_device_capability(device)[0] >= 9


@lru_cache(maxsize=16)
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU, (major, minor)."""
    return torch.cuda.get_device_capability(device)


@lru_cache(maxsize=1)
def triton_version() -> tuple[int, ...] | None:
    """Return (major, minor) of the installed Triton; None if it is not installed."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(int(part) for part in version.split(".")[:2])
