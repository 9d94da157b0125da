# SPDX-License-Identifier: Apache-2.0
"""Multiply sums by factors that are nearly always 1."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dynaxx.kernels.primitives.hopper.columns import columns_of_threads, tile_of_columns


@gluon.jit
def rescaled(sums, factor):
    """Return sums [rows, columns] times factor [rows]; a warp whose factors are all 1 skips the products."""
    layout: gl.constexpr = sums.type.layout
    COUNT: gl.constexpr = sums.shape[1] // 4
    columns = columns_of_threads(sums)
    narrow: gl.constexpr = columns[0].type.layout
    given = ()
    for u in gl.static_range(COUNT):
        given += (gl.convert_layout(columns[u], narrow, assert_trivial=True),)  # type: ignore[assignment]
    same = gl.convert_layout(factor, gl.SliceLayout(1, narrow), assert_trivial=True)
    given += (gl.zeros([sums.shape[0], 4], gl.float32, narrow) + same[:, None],)  # type: ignore[assignment]
    got = gl.inline_asm_elementwise(
        _multiply(COUNT), _registers(COUNT), given, dtype=_floats(COUNT), is_pure=True, pack=2
    )
    return tile_of_columns(got, 0, COUNT, layout)


@gluon.constexpr_function
def _floats(count):
    return (gl.float32,) * count


@gluon.constexpr_function
def _registers(COUNT):
    return ",".join(["=f"] * (2 * COUNT) + [str(i) for i in range(2 * COUNT)] + ["f"] * 2)


@gluon.constexpr_function
def _multiply(COUNT):
    """Return PTX that multiplies COUNT numbers of each of a thread's two rows in place, unless both factors are 1."""
    factors = [4 * COUNT, 4 * COUNT + 1]
    lines = [".reg .pred other;", f"setp.neu.f32 other, ${factors[0]}, 0f3F800000;"]
    lines += [f"setp.neu.or.f32 other, ${factors[1]}, 0f3F800000, other;", "vote.sync.any.pred other, other, -1;"]
    lines += ["@!other bra.uni done;"]
    lines += [f"mul.f32 ${2 * i + row}, ${2 * i + row}, ${factors[row]};" for i in range(COUNT) for row in (0, 1)]
    return "\n".join(["{", *lines, "done:", "}"])
