# SPDX-License-Identifier: Apache-2.0
"""Lazy softmax of the Hopper forward: weights relative to the maximum of earlier steps, without waiting for a new one.

A softmax needs its base only to keep sums and weights in range; any number near the largest score will do.

bf16 has the range of fp32, and weights far above 1 have the same relative rounding as small ones. Only the masked steps
of a row, which come first, therefore compute maxima. Full steps check nothing until the row is done. The row's sum then
tells whether a weight was too large (about 44 nats above the scores of masked steps), or whether all were too small.
Units of work with such a row are computed again, with maxima in every step.

Masked steps use maxima because a query may see only few keys in them. If it sees one key, the weight must be exactly 1.
Any other weight is rounded for the product with v but not in the row's sum, which would change all of out.

fp16 has a smaller range. At head_dim 64, a thread's sum of a full step's weights tells whether they still fit. If a sum
is above GROWN, the warp branches, finds the maxima, recomputes the weights of its step and rescales its state. All
other steps use no maxima and rescale nothing: no weight exceeds GROWN, which fp16 can represent.

A thread has columns 2 t and 2 t + 1 of every eight, where t is its index among the four threads that share a row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dynaxx.kernels.primitives.hopper.columns import columns_of_threads, tile_of_columns

GROWN = gl.constexpr("0f43800000")  # 256, in PTX notation


@gluon.constexpr_function
def without_maxima(consumers, head_dim, dtype):
    """Return whether full steps skip maxima; in fp16 only if exponentials take as long as the products."""
    return unchecked(dtype) or (consumers == 2 and head_dim == 64)


@gluon.constexpr_function
def unchecked(dtype):
    """Return whether weights are checked only when a row is done: for bf16, which has the range of fp32."""
    return dtype == gl.bfloat16


@gluon.jit
def weights_relative_to(base, scores, scale_log2):
    """Return exp2(scores * scale_log2 - base), with a base [rows, 4] per thread, and each thread's sums [rows, 4]."""
    ROWS: gl.constexpr = scores.shape[0]
    COLUMNS: gl.constexpr = scores.shape[1]
    layout: gl.constexpr = scores.type.layout
    scores = gl.reshape(scores, [ROWS, COLUMNS // 8, 4, 2])
    thread_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, scores.type.layout))
    shift = gl.convert_layout(base, thread_layout, assert_trivial=True)
    weights = gl.exp2(scores * scale_log2 - gl.expand_dims(gl.expand_dims(shift, 1), 3))
    sums = gl.convert_layout(gl.sum(gl.sum(weights, 3), 1), base.type.layout)
    return gl.convert_layout(gl.reshape(weights, [ROWS, COLUMNS]), layout), sums


@gluon.jit
def rescaled_where_grown(weights, sums, row_sum, base, acc, scores, scale_log2):
    """Return weights, row_sum including `sums`, base and acc, rescaled to the largest score if a sum exceeds GROWN."""
    w_layout: gl.constexpr = weights.type.layout
    acc_layout: gl.constexpr = acc.type.layout
    row_layout: gl.constexpr = row_sum.type.layout
    COLUMNS: gl.constexpr = weights.shape[1] // 4
    SUMS: gl.constexpr = acc.shape[1] // 4
    columns = columns_of_threads(weights)
    layout: gl.constexpr = columns[0].type.layout
    args = columns + columns_of_threads(acc) + (row_sum, base) + columns_of_threads(scores) + (sums,)
    given = ()
    for u in gl.static_range(len(args)):
        given += (gl.convert_layout(args[u], layout, assert_trivial=True),)  # type: ignore[assignment]
    given += (gl.full([weights.shape[0], 4], 0, gl.float32, layout) + scale_log2,)  # type: ignore[assignment]
    got = gl.inline_asm_elementwise(
        _where_grown(COLUMNS, SUMS),
        _registers(COLUMNS, SUMS),
        given,
        dtype=_floats(COLUMNS + SUMS + 2),
        is_pure=True,
        pack=2,
    )
    row_sum = gl.convert_layout(got[COLUMNS + SUMS], row_layout, assert_trivial=True)
    base = gl.convert_layout(got[COLUMNS + SUMS + 1], row_layout, assert_trivial=True)
    weights = tile_of_columns(got, 0, COLUMNS, w_layout)
    return weights, row_sum, base, tile_of_columns(got, COLUMNS, SUMS, acc_layout)


@gluon.constexpr_function
def _floats(count):
    return (gl.float32,) * count


@gluon.constexpr_function
def _registers(COLUMNS, SUMS):
    kept = 2 * (COLUMNS + SUMS + 2)
    return ",".join(["=f"] * kept + [str(i) for i in range(kept)] + ["f"] * (2 * COLUMNS + 4))


@gluon.constexpr_function
def _where_grown(COLUMNS, SUMS):
    """Return PTX that rescales each of a thread's two rows to its largest score if a sum exceeds GROWN.

    The code changes in place COLUMNS weights, SUMS results, row_sum and base. It reads the scores, the sum of the
    weights and the scale.
    """
    kept = COLUMNS + SUMS + 2
    lines = [".reg .pred grown;", ".reg .f32 largest, other, ratio, shift, x;"]
    parts = [2 * (2 * kept + COLUMNS) + row for row in (0, 1)]
    lines += [f"setp.gtu.f32 grown, ${parts[0]}, {GROWN.value};"]  # also true for NaN
    lines += [f"setp.gtu.or.f32 grown, ${parts[1]}, {GROWN.value}, grown;"]
    lines += ["vote.sync.any.pred grown, grown, -1;", "@grown bra.uni grows;"]
    for row in (0, 1):
        total = 2 * (kept - 2) + row
        lines += [f"add.f32 ${total}, ${total}, ${parts[row]};"]
    lines += ["bra.uni done;", "grows:"]
    for row in (0, 1):
        total, base = 2 * (kept - 2) + row, 2 * (kept - 1) + row
        scores = [2 * i + row for i in range(2 * kept, 2 * kept + COLUMNS)]
        scale = 2 * (2 * kept + COLUMNS + 1) + row
        lines += [f"mov.f32 largest, ${scores[0]};"] + [f"max.f32 largest, largest, ${i};" for i in scores[1:]]
        for lanes in (1, 2):
            lines += [f"shfl.sync.bfly.b32 other, largest, {lanes}, 31, -1;", "max.f32 largest, largest, other;"]
        lines += [f"mul.f32 largest, largest, ${scale};", f"max.f32 largest, ${base}, largest;"]
        lines += [f"sub.f32 ratio, ${base}, largest;", "ex2.approx.ftz.f32 ratio, ratio;"]
        lines += [f"mov.f32 ${base}, largest;"]
        lines += ["neg.f32 shift, largest;", f"mul.f32 ${total}, ${total}, ratio;"]
        for i in range(COLUMNS):
            lines += [f"fma.rn.f32 x, ${scores[i]}, ${scale}, shift;", f"ex2.approx.ftz.f32 ${2 * i + row}, x;"]
            lines += [f"add.f32 ${total}, ${total}, ${2 * i + row};"]
        lines += [f"mul.f32 ${2 * i + row}, ${2 * i + row}, ratio;" for i in range(COLUMNS, COLUMNS + SUMS)]
    return "\n".join(["{", *lines, "done:", "}"])
