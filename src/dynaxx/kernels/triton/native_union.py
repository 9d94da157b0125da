# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Selected attention by query: a program holds the q heads of one selection head at a few neighbouring positions, and
walks the union of their blocks. Reads each block once per tile, so it wants groups of 16 or neighbours that agree.

T queries, M keys, Hq / Hk / Hs query, kv and selection heads; D / E head_dim of q, k and of v. A tile has POSITIONS *
GROUP rows, position-major, GROUP being the group as a power of two.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.triton.config import padded
from dynaxx.kernels.triton.light import light_launch
from dynaxx.kernels.triton.native_config import QueryTiles
from dynaxx.kernels.triton.native_index import Unions
from dynaxx.kernels.triton.primitives import LOG2E, exp_rounded
from dynaxx.layout.native import NativeSpans

RUNTIME_SIZES = ["queries", "keys", "group_size", "heads_per_kv"]


@triton.jit
def tile_rows(
    i_tile, i_head, p_last_key, queries, group_size, POSITIONS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr
):
    """Position in the tile, query row, q head, validity and last visible key of each row of a tile, each [ROWS]."""
    o_row = tl.arange(0, ROWS)
    position = o_row // GROUP
    member = o_row % GROUP
    t = i_tile * POSITIONS + position
    inside = (position < POSITIONS) & (member < group_size) & (t < queries)
    last_key = tl.load(p_last_key + t, mask=inside, other=-1)
    return position, t, i_head * group_size + member, inside, last_key


@triton.jit
def gather_rows(p_base, first, second, stride_first, stride_second, inside, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """[len(first), BLOCK_DIM] rows at first * stride_first + second * stride_second; zero where not inside."""
    o_d = tl.arange(0, BLOCK_DIM)
    offsets = first.to(tl.int64) * stride_first + second.to(tl.int64) * stride_second
    mask = inside[:, None] & (o_d < DIM)[None, :]
    return tl.load(p_base + offsets[:, None] + o_d[None, :], mask=mask, other=0.0)


@triton.jit
def scatter_rows(
    p_base, rows, first, second, stride_first, stride_second, inside, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr
):
    """Store what `gather_rows` would load, in the pointer's dtype."""
    o_d = tl.arange(0, BLOCK_DIM)
    offsets = first.to(tl.int64) * stride_first + second.to(tl.int64) * stride_second
    mask = inside[:, None] & (o_d < DIM)[None, :]
    tl.store(p_base + offsets[:, None] + o_d[None, :], rows.to(p_base.dtype.element_ty), mask=mask)


@triton.jit
def block_rows(p_base, start, keys, stride, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_N, BLOCK_DIM] rows from key row `start` of one head; zero past the last key."""
    o_n, o_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_DIM)
    mask = (start + o_n < keys)[:, None]
    if DIM < BLOCK_DIM:
        mask = mask & (o_d < DIM)[None, :]
    p_rows = p_base + start.to(tl.int64) * stride + (o_n.to(tl.int64)[:, None] * stride + o_d[None, :])
    return tl.load(p_rows, mask=mask, other=0.0)


@triton.jit
def softmax_step(scores, row_max, scale, EXACT: tl.constexpr):
    """New maximum, what to rescale sums by, and weights of unscaled scores; -inf is hidden. Exact for fp32 inputs."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    if EXACT:
        rescale = exp_rounded((row_max - shift) * scale)
        weights = exp_rounded((scores - shift[:, None]) * scale)
    else:
        rescale = tl.exp2((row_max - shift) * (scale * LOG2E))
        weights = tl.exp2(scores * (scale * LOG2E) - (shift * (scale * LOG2E))[:, None])
    return new_max, rescale, weights


@triton.jit
def weights_of(scores, lse, scale, EXACT: tl.constexpr):
    """exp(scores * scale - lse), lse = inf for rows without weights; broadcasts."""
    weights = exp_rounded(scores * scale - lse) if EXACT else tl.exp2(scores * (scale * LOG2E) - lse * LOG2E)
    return weights


@triton.jit
def row_values(p_rows, at, inside):
    """lse and delta of rows `at` of what `row_pairs` gives; a row that is none gets lse = inf: its weights vanish.

    Both in one load: Triton repeats loads of fewer elements than threads in every layout that wants them.
    """
    pair = tl.arange(0, 2)[None, :]
    pairs = tl.load(p_rows + at.to(tl.int64)[:, None] * 2 + pair, mask=inside[:, None], other=float("inf"))
    lse, delta = tl.split(pairs)
    return lse, tl.where(inside, delta, 0.0)


@light_launch
@triton.jit(do_not_specialize=["rows", "q_heads", "queries"])
def _selected_rows_kernel(
    p_do,
    p_out,  # (T, Hq, E)
    p_lse,  # (Hq, T) contiguous
    p_dlse,
    p_rows,  # (T, Hq, 2) fp32
    rows,  # T * Hq
    queries,
    q_heads,
    stride_don,
    stride_doh,
    stride_on,
    stride_oh,
    stride_dlh,
    stride_dln,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    t, h = row // q_heads, row % q_heads
    b_do = gather_rows(p_do, t, h, stride_don, stride_doh, inside, E, BLOCK_E).to(tl.float32)
    b_out = gather_rows(p_out, t, h, stride_on, stride_oh, inside, E, BLOCK_E).to(tl.float32)
    lse = tl.load(p_lse + h * queries + t, mask=inside, other=float("-inf"))
    dlse = tl.load(p_dlse + h * stride_dlh + t * stride_dln, mask=inside, other=0.0).to(tl.float32)
    empty = lse == float("-inf")
    tl.store(p_rows + row * 2, tl.where(empty, float("inf"), lse), mask=inside)
    tl.store(p_rows + row * 2 + 1, tl.where(empty, 0.0, tl.sum(b_do * b_out, 1) - dlse), mask=inside)


@light_launch
@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _selected_fwd_kernel(
    p_q,
    p_k,
    p_v,
    p_out,  # (T, Hq, E) contiguous
    p_lse,  # (Hq, T) contiguous, fp32
    p_starts,
    p_members,
    p_counts,
    p_last_key,
    queries,
    keys,
    group_size,
    heads_per_kv,  # selection heads per kv head
    scale,  # > 0
    stride_qn,
    stride_qh,
    stride_kn,
    stride_kh,
    stride_vn,
    stride_vh,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SLOTS: tl.constexpr,  # of a tile's union
    KV_BLOCK: tl.constexpr,
    POSITIONS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    SPLIT: tl.constexpr = KV_BLOCK // BLOCK_N
    heads = tl.num_programs(0)
    i_head = tl.program_id(0).to(tl.int64)
    i_tile = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    position, t, h, inside, last_key = tile_rows(
        i_tile, i_head, p_last_key, queries, group_size, POSITIONS, GROUP, ROWS
    )
    b_q = gather_rows(p_q, t, h, stride_qn, stride_qh, inside, D, BLOCK_D)
    p_k += i_head // heads_per_kv * stride_kh
    p_v += i_head // heads_per_kv * stride_vh
    lead = i_tile * heads + i_head
    count = tl.load(p_counts + lead)
    acc = tl.zeros([ROWS, BLOCK_E], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    for i_step in range(0, count * SPLIT):
        slot = lead * SLOTS + i_step // SPLIT
        start = tl.load(p_starts + slot) + i_step % SPLIT * BLOCK_N
        limit = tl.where((tl.load(p_members + slot) >> position) & 1 != 0, last_key, -1)
        b_k = block_rows(p_k, start, keys, stride_kn, D, BLOCK_D, BLOCK_N)
        scores = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [ROWS, BLOCK_N]
        scores = tl.where((start + tl.arange(0, BLOCK_N))[None, :] <= limit[:, None], scores, float("-inf"))
        row_max, rescale, weights = softmax_step(scores, row_max, scale, b_k.dtype == tl.float32)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        b_v = block_rows(p_v, start, keys, stride_vn, E, BLOCK_E, BLOCK_N)
        acc = tl.dot(weights.to(b_v.dtype), b_v, acc * rescale[:, None], input_precision=PRECISION)
    empty = row_sum == 0
    row_sum = tl.where(empty, 1.0, row_sum)
    lse = tl.where(empty, float("-inf"), row_max * scale + tl.log(row_sum))
    tl.store(p_lse + h.to(tl.int64) * queries + t, lse, mask=inside)
    q_heads = heads * group_size
    scatter_rows(p_out, acc / row_sum[:, None], t, h, q_heads * E, E, inside, E, BLOCK_E)


@light_launch
@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _selected_bwd_dq_kernel(
    p_do,
    p_q,
    p_k,
    p_v,
    p_rows,  # (T, Hq, 2) as `row_pairs` gives them
    p_dq,  # (T, Hq, D) contiguous
    p_starts,
    p_members,
    p_counts,
    p_last_key,
    queries,
    keys,
    group_size,
    heads_per_kv,
    scale,
    stride_don,
    stride_doh,
    stride_qn,
    stride_qh,
    stride_kn,
    stride_kh,
    stride_vn,
    stride_vh,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SLOTS: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    POSITIONS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    SPLIT: tl.constexpr = KV_BLOCK // BLOCK_N
    heads = tl.num_programs(0)
    i_head = tl.program_id(0).to(tl.int64)
    i_tile = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    position, t, h, inside, last_key = tile_rows(
        i_tile, i_head, p_last_key, queries, group_size, POSITIONS, GROUP, ROWS
    )
    b_q = gather_rows(p_q, t, h, stride_qn, stride_qh, inside, D, BLOCK_D)
    b_do = gather_rows(p_do, t, h, stride_don, stride_doh, inside, E, BLOCK_E)
    lse, delta = row_values(p_rows, t * (heads * group_size) + h, inside)
    p_k += i_head // heads_per_kv * stride_kh
    p_v += i_head // heads_per_kv * stride_vh
    lead = i_tile * heads + i_head
    dq = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for i_step in range(0, tl.load(p_counts + lead) * SPLIT):
        slot = lead * SLOTS + i_step // SPLIT
        start = tl.load(p_starts + slot) + i_step % SPLIT * BLOCK_N
        limit = tl.where((tl.load(p_members + slot) >> position) & 1 != 0, last_key, -1)
        b_k = block_rows(p_k, start, keys, stride_kn, D, BLOCK_D, BLOCK_N)
        b_v = block_rows(p_v, start, keys, stride_vn, E, BLOCK_E, BLOCK_N)
        scores = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        weights = weights_of(scores, lse[:, None], scale, b_k.dtype == tl.float32)
        weights = tl.where((start + tl.arange(0, BLOCK_N))[None, :] <= limit[:, None], weights, 0.0)
        dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        ds = weights * (dp - delta[:, None])
        dq = tl.dot(ds.to(b_k.dtype), b_k, dq, input_precision=PRECISION)
    scatter_rows(p_dq, dq * scale, t, h, heads * group_size * D, D, inside, D, BLOCK_D)


def forward(
    q: Tensor, k: Tensor, v: Tensor, union: Unions, spans: NativeSpans, tiles: QueryTiles, scale: float
) -> tuple[Tensor, Tensor]:
    """Return out (T, Hq, E) and lse (Hq, T) fp32; scale > 0."""
    out = q.new_empty(*q.shape[:2], v.shape[2])
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    _selected_fwd_kernel[(union.counts.shape[1], union.counts.shape[0])](
        q, k, v, out, lse, **_arguments(q, k, v, union, spans, tiles, scale)
    )
    return out, lse


def backward_dq(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, union: Unions, spans: NativeSpans,
    tiles: QueryTiles, scale: float,
) -> Tensor:  # fmt: skip
    """Return dq (T, Hq, D)."""
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    _selected_bwd_dq_kernel[(union.counts.shape[1], union.counts.shape[0])](
        do, q, k, v, rows, dq,
        stride_don=do.stride(0), stride_doh=do.stride(1),
        **_arguments(q, k, v, union, spans, replace(tiles, num_stages=min(2, tiles.num_stages)), scale),
    )  # fmt: skip
    return dq


def row_pairs(do: Tensor, dlse: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """(T, Hq, 2) fp32: lse, and delta = rowsum(do * out) - dlse; inf and 0 for a row that sees nothing.

    Args:
        do, out: (T, Hq, E), their rows dense.
        dlse, lse: (Hq, T).
    """
    rows = lse.new_empty(*out.shape[:2], 2)
    _selected_rows_kernel[(triton.cdiv(out.shape[0] * out.shape[1], 32),)](
        do,
        out,
        lse.contiguous(),
        dlse,
        rows,
        rows=out.shape[0] * out.shape[1],
        queries=out.shape[0],
        q_heads=out.shape[1],
        stride_don=do.stride(0),
        stride_doh=do.stride(1),
        stride_on=out.stride(0),
        stride_oh=out.stride(1),
        stride_dlh=dlse.stride(0),
        stride_dln=dlse.stride(1),
        E=out.shape[2],
        BLOCK_E=padded(out.shape[2]),
        ROWS=32,
        num_warps=4,
    )
    return rows


def _arguments(
    q: Tensor, k: Tensor, v: Tensor, union: Unions, spans: NativeSpans, tiles: QueryTiles, scale: float
) -> dict[str, object]:
    heads = union.counts.shape[1]
    return {
        "p_starts": union.starts,
        "p_members": union.members,
        "p_counts": union.counts,
        "p_last_key": spans.last_key,
        "queries": q.shape[0],
        "keys": k.shape[0],
        "group_size": q.shape[1] // heads,
        "heads_per_kv": heads // k.shape[1],
        "scale": scale,
        "stride_qn": q.stride(0),
        "stride_qh": q.stride(1),
        "stride_kn": k.stride(0),
        "stride_kh": k.stride(1),
        "stride_vn": v.stride(0),
        "stride_vh": v.stride(1),
        "D": q.shape[2],
        "E": v.shape[2],
        "BLOCK_D": padded(q.shape[2]),
        "BLOCK_E": padded(v.shape[2]),
        "SLOTS": union.starts.shape[2],
        "KV_BLOCK": spans.sizes.slc_block,
        "POSITIONS": tiles.positions,
        "GROUP": tiles.group,
        "ROWS": tiles.rows,
        "BLOCK_N": min(tiles.block_n, spans.sizes.slc_block),
        "PRECISION": "ieee",
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
