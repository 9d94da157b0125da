# SPDX-License-Identifier: Apache-2.0
"""Describe a GPU to kernels and tile sizes: one description, asked from torch or made by hand.

    gpu_of(tensor.device).has_tma     the GPU that holds a tensor
    CARDS["MI300X"].has_tma           a GPU that this machine lacks, with published figures
    with described_as(CARDS["L4"]):   code that prepares kernels for a GPU that this machine lacks

Importing this module loads no Triton.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch

KIB, GIB = 1 << 10, 1 << 30
RESERVED = 1 * KIB  # bytes of shared memory that CUDA takes per program
FAMILIES = {
    "sm_75": "Turing", "sm_80": "Ampere", "sm_86": "Ampere", "sm_87": "Ampere", "sm_89": "Ada", "sm_90": "Hopper",
    "sm_100": "Blackwell", "sm_103": "Blackwell", "sm_110": "Blackwell", "sm_120": "Blackwell", "sm_121": "Blackwell",
    "gfx90a": "CDNA 2", "gfx942": "CDNA 3", "gfx950": "CDNA 4",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Gpu:
    """A GPU. Two descriptions are equal only if they are the same object, so that they are quick to look up."""

    vendor: Literal["nvidia", "amd", "interpreter"]
    architecture: str  # "sm_90", "gfx942": what a compiler generates code for
    name: str
    processors: int  # multiprocessors, or compute units
    memory: int  # bytes
    shared_memory: int  # bytes that one program may use
    shared_memory_of_processor: int  # bytes that the programs of a multiprocessor share
    registers: int  # of 32 bits, that the programs of a multiprocessor share
    bandwidth: float | None = None  # bytes per second from and to memory, as published
    half_rate: float | None = None  # fp16 or bf16 operations per second without sparsity, as published

    @property
    def capability(self) -> tuple[int, int]:
        """Return NVIDIA's compute capability, such as (9, 0). AMD's numbers mean something else and give (0, 0)."""
        if self.vendor != "nvidia":
            return (0, 0)
        number = int(self.architecture.removeprefix("sm_"))
        return number // 10, number % 10

    @property
    def family(self) -> str:
        """Return the name of the architecture, such as "Hopper", or what a compiler calls it."""
        return FAMILIES.get(self.architecture, self.architecture)

    @property
    def has_tma(self) -> bool:
        """Return whether there is a tensor memory accelerator (TMA), the copy unit of Hopper and later.

        Also true under the interpreter, which supports its descriptors.
        """
        return self.capability >= (9, 0) or self.vendor == "interpreter"

    @property
    def has_wgmma(self) -> bool:
        """Return whether a warpgroup's matrix instructions read their left operand from registers: Hopper's wgmma.

        Also true under the interpreter, so that the kernels that rely on it are tested there.
        """
        return self.capability[0] == 9 or self.vendor == "interpreter"

    @property
    def has_tensor_memory(self) -> bool:
        """Return whether matrix instructions sum in a memory of their own: tcgen05 of Blackwell's datacenter GPUs."""
        return self.capability[0] in (10, 11)

    @property
    def multiplies_by_warpgroup(self) -> bool:
        """Return whether four warps issue a matrix instruction together: wgmma or tcgen05. Else tiles are smaller."""
        return self.has_wgmma or self.has_tensor_memory

    @property
    def overlaps_launches(self) -> bool:
        """Return whether a kernel can start before its predecessor ends; the kernel then calls `gdc_wait`."""
        return self.capability >= (9, 0)

    @property
    def overlap(self) -> dict[str, bool]:
        """Return the launch options for `overlaps_launches`."""
        return {"PDL": True, "launch_pdl": True} if self.overlaps_launches else {"PDL": False}

    @property
    def has_e4m3(self) -> bool:
        """Return whether instructions convert to float8_e4m3fn. AMD's GPUs before CDNA 4 have another 8-bit format."""
        return self.capability >= (8, 9) or self.architecture == "gfx950"

    def input_precision(self, exact: bool) -> str:
        """Return how `tl.dot` multiplies fp32: as tf32, in three products if `exact`. AMD's GPUs have no tf32."""
        return "ieee" if self.vendor == "amd" else "tf32x3" if exact else "tf32"

    def limit_registers(self, most: int | None) -> dict[str, int]:
        """Return the launch option for at most `most` registers per thread; AMD's compiler chooses on its own."""
        return {} if most is None or self.vendor == "amd" else {"maxnreg": most}

    def __str__(self) -> str:
        """Return the name and the architecture."""
        return f"{self.name} ({self.architecture})"


INTERPRETER = Gpu("interpreter", "interpreter", "Triton's interpreter", 6, 1 << 40, 1 << 20, 1 << 20, 1 << 16)


SHARED_MEMORY_OF_AMD = {"gfx950": 160 * KIB}  # of which some drivers report 64 KiB


def _nvidia(architecture: str, name: str, processors: int, gib: int, shared_kib: int, *rates: float) -> Gpu:
    shared = shared_kib * KIB
    return Gpu("nvidia", architecture, name, processors, gib * GIB, shared - RESERVED, shared, 1 << 16, *rates)


def _amd(architecture: str, name: str, processors: int, gib: int, shared_kib: int, *rates: float) -> Gpu:
    shared = shared_kib * KIB
    return Gpu("amd", architecture, name, processors, gib * GIB, shared, shared, 1 << 17, *rates)


# One card or more of each architecture, with the vendors' figures: bytes and operations per second.
CARDS = {
    "A100": _nvidia("sm_80", "A100", 108, 80, 164, 2.04e12, 312e12),
    "RTX 3090": _nvidia("sm_86", "RTX 3090", 82, 24, 100, 0.94e12, 71e12),
    "RTX 4090": _nvidia("sm_89", "RTX 4090", 128, 24, 100, 1.01e12, 165e12),
    "L40S": _nvidia("sm_89", "L40S", 142, 48, 100, 0.86e12, 362e12),
    "L4": _nvidia("sm_89", "L4", 58, 24, 100, 0.30e12, 121e12),
    "H100": _nvidia("sm_90", "H100", 132, 80, 228, 3.35e12, 989e12),
    "H200": _nvidia("sm_90", "H200", 132, 141, 228, 4.8e12, 989e12),
    "B200": _nvidia("sm_100", "B200", 148, 180, 228, 8e12, 2250e12),
    "B300": _nvidia("sm_103", "B300", 148, 270, 228, 8e12, 2250e12),
    "RTX 5090": _nvidia("sm_120", "RTX 5090", 170, 32, 100, 1.79e12, 210e12),
    "MI300X": _amd("gfx942", "MI300X", 304, 192, 64, 5.3e12, 1307e12),
    "MI355X": _amd("gfx950", "MI355X", 256, 288, 160, 8e12, 2500e12),
}


def gpu_of(device: torch.device) -> Gpu:
    """Return the GPU of a device, or what `described_as` says; for a CPU, `INTERPRETER`."""
    return _described[-1] if _described else _gpu_of(device)


@lru_cache(maxsize=64)
def _gpu_of(device: torch.device) -> Gpu:
    if device.type != "cuda":
        return INTERPRETER
    return describe(torch.cuda.get_device_properties(device), hip=torch.version.hip is not None)


def describe(properties: Any, *, hip: bool) -> Gpu:
    """Return the description of a GPU.

    Args:
        properties: what `torch.cuda.get_device_properties` returns.
        hip: whether torch is built for AMD's GPUs, which also report capabilities of 9.x.
    """
    architecture = properties.gcnArchName.partition(":")[0] if hip else f"sm_{properties.major}{properties.minor}"
    shared = SHARED_MEMORY_OF_AMD.get(architecture, properties.shared_memory_per_block)
    total = shared if hip else properties.shared_memory_per_multiprocessor
    found = Gpu(
        vendor="amd" if hip else "nvidia",
        architecture=architecture,
        name=properties.name,
        processors=properties.multi_processor_count,
        memory=properties.total_memory,
        shared_memory=shared if hip else getattr(properties, "shared_memory_per_block_optin", total - RESERVED),
        shared_memory_of_processor=total,
        registers=properties.regs_per_multiprocessor,
    )
    card = next((card for card in CARDS.values() if _is_card(found, card)), None)
    return found if card is None else replace(found, bandwidth=card.bandwidth, half_rate=card.half_rate)


def _is_card(gpu: Gpu, card: Gpu) -> bool:
    """Return whether a GPU is this card, and not another of that name with fewer processors or other memory."""
    named = re.search(rf"\b{card.name}\b", gpu.name) and gpu.architecture == card.architecture
    return bool(named) and gpu.processors == card.processors and abs(gpu.memory / card.memory - 1) < 0.1


_described: list[Gpu] = []


@contextmanager
def described_as(gpu: Gpu) -> Iterator[None]:
    """Describe every device as this GPU, in all threads: kernels are then prepared for it, on tensors of a CPU."""
    _described.append(gpu)
    try:
        yield
    finally:
        _described.pop()


def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 6 under Triton's interpreter."""
    return gpu_of(device).processors


def interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def padded(head_dim: int) -> int:
    """Return the tile width for head_dim: a power of two, at least 16."""
    return max(16, power_of_two(head_dim))


def power_of_two(least: int) -> int:
    """Return the smallest power of two >= `least` >= 1. Triton's own function takes 3 us of host time."""
    return 1 << (least - 1).bit_length()
