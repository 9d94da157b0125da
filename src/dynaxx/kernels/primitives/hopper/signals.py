# SPDX-License-Identifier: Apache-2.0
"""Numbers that the warps of a Hopper kernel exchange through shared memory, and constraints on the order of ptxas."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dynaxx.kernels.compat import barrier

NUMBERS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))  # layout of a buffer of int32, [count, 1]


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate COUNT barriers, each of which completes after ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def send_number(numbers, at, value):
    """Write one number; for the producer, which is one warp."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    numbers.index(at).store(gl.full([1], 0, gl.int32, layout) + value)


@gluon.jit
def read_number(numbers, at):
    """Read one number; for the producer, after a barrier."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    return gl.max(numbers.index(at).load(layout), 0)


@gluon.jit
def publish_number(numbers, at, value):
    """Write one number and synchronize; for a warpgroup."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    numbers.index(at).store(gl.full([1], 0, gl.int32, layout) + value)
    barrier()


@gluon.jit
def receive_number(numbers, at):
    """Read one number; for a warpgroup, after the barrier on which the producer signals it."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(numbers.index(at).load(layout), 0)


@gluon.jit
def opaque_zero(i):
    """Return 0, computed from the loop index `i` so that no compiler can tell.

    Added to the index of a buffer, it keeps the computation of the 64-bit descriptors of its tile, one per 16 columns,
    inside the loop. LLVM would otherwise compute them before the loop, where they exhaust the registers.
    """
    return i >> 30


@gluon.jit
def hold_before_wait(x):
    """Return x >= 0, used in a store that never happens.

    This keeps a following wait for wgmma after the computation of x. ptxas would otherwise move the wait up, and the
    tensor cores would idle.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred negative;
        .reg .b32 nowhere;
        mov.b32 nowhere, 0;
        setp.lt.f32 negative, $1, 0fBF800000;
        @negative st.shared.f32 [nowhere], $1;
        mov.f32 $0, $1;
        }""",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def after_stores(x):
    """Return x, int32, after all tiles that this thread stored by TMA are in memory; later stores follow them."""
    return gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )
