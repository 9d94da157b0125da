# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Numbers passed through a ring in shared memory, from a producer warp to a warpgroup, as in the Hopper kernels.

The kernel does nothing else, so a tool that reports this ring would report those kernels as well.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dynaxx.kernels.attention.hopper.forward import barriers
from dynaxx.kernels.compat import barrier
from dynaxx.kernels.primitives.hopper.signals import NUMBERS, receive_number, send_number

SLOTS = gl.constexpr(2)


@gluon.jit
def _produce(numbers, full, empty, count, ORDERED: gl.constexpr):
    for i in range(count):
        slot = i % SLOTS
        if ORDERED:
            mbarrier.wait(empty.index(slot), ((i // SLOTS) & 1) ^ 1)
        send_number(numbers, slot, i)
        barrier()
        mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def _consume(p_out, numbers, full, empty, count):
    total = 0
    for i in range(count):
        slot = i % SLOTS
        mbarrier.wait(full.index(slot), (i // SLOTS) & 1)
        total += receive_number(numbers, slot)
        mbarrier.arrive(empty.index(slot), count=1)
    gl.store(p_out, total)


@gluon.jit
def _ring_kernel(p_out, count, ORDERED: gl.constexpr):
    numbers = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], NUMBERS)
    full = barriers(SLOTS, 1)
    empty = barriers(SLOTS, 1)
    gl.warp_specialize([
        (_consume, (p_out + gl.program_id(0), numbers, full, empty, count)),
        (_produce, (numbers, full, empty, count, ORDERED)),
    ], [1], [24])  # fmt: skip


def pass_through_a_ring(ordered: bool) -> None:
    """Sum 0 to 63 in 64 programs; without mbarriers, the producer overwrites values before they are read."""
    out = torch.empty(64, dtype=torch.int32, device="cuda")
    _ring_kernel[(64,)](out, 64, ORDERED=ordered, num_warps=4)
    if ordered:
        assert out.eq(63 * 32).all(), out
