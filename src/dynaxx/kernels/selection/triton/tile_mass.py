# SPDX-License-Identifier: Apache-2.0
"""Block scores from tiles in a fused kernel: a softmax over key tiles for each query tile, summed to blocks.

    query tiles (resident) -> key tiles stream: log of each block's sum (notes), running total -> notes / total -> mass

A program takes TILE_M query tiles of one head through the key tiles once. For each query tile it stores the log of
every block's sum, the notes. The totals are known only at the end, and turn the notes into shares. Nothing of size
(query tiles x key tiles) is stored, and the notes, (query tiles x blocks), are still in the cache when they are read
again. If there are so few query tiles at a time that most of a GPU would idle, as for very long sequences, several
programs share the key tiles, and a second kernel turns their notes into shares.

Legend: B batch; Hq, Hk query and kv heads; T tiles of keys; M tiles of queries; D head_dim; C kv blocks; R rows of the
result; S parts of the key tiles.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.device import gpu_of, padded, processors
from dynaxx.kernels.runtime.arguments import at_most_fp32, strides_of, unit_stride
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.layout import BlockGrid

LOG2_E = math.log2(math.e)
MAX_SPLITS = 16  # programs that share the key tiles
MIN_STEPS = 4  # steps of each of these programs
BLOCK_C = 32  # columns of notes that are read at a time
COLUMNS = 256  # columns that a program of the second kernel turns into shares


@triton.jit
def _tokens(p_x, o_t, place, o_d, tiles, tokens, stride_n, PARTS: tl.constexpr, D: tl.constexpr):
    """Load [tiles, BLOCK_D] elements o_d of the token at `place` in each tile; past the end, of the last token."""
    token = tl.minimum(o_t * PARTS + place, tokens - 1).to(tl.int64)
    inside = (o_t < tiles)[:, None] & (o_d < D)[None, :]
    return tl.load(p_x + token[:, None] * stride_n + o_d[None, :], mask=inside, other=0.0)


@triton.jit
def _write_shares(
    p_notes, p_mass, total, o_m, m_m, o_row, begin, end, rows, kv_blocks,
    Q_PARTS: tl.constexpr, TILE_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write the mass of blocks `begin` to `end` for the rows of TILE_M query tiles, from their notes and totals."""
    for first in range(begin, end, BLOCK_C):
        o_c = first + tl.arange(0, BLOCK_C)
        p_own = p_notes + o_m.to(tl.int64)[:, None] * kv_blocks + o_c[None, :]
        note = tl.load(p_own, mask=m_m & (o_c < end)[None, :], other=float("-inf"))
        shares = tl.reshape(tl.exp2(note - total[:, None]), [TILE_M // Q_PARTS, Q_PARTS, BLOCK_C])
        inside = (o_row < rows)[:, None] & (o_c < kv_blocks)[None, :]
        tl.store(p_mass + o_row.to(tl.int64)[:, None] * kv_blocks + o_c[None, :], tl.sum(shares, 1), mask=inside)


@kernel_launcher
@triton.jit(do_not_specialize=["tiles_q", "tiles_k", "tokens_q", "tokens_k", "seqlen_k", "first_tile", "offset", "rows",
                               "kv_blocks", "q_heads", "group_size", "steps"])  # fmt: skip
def _tile_mass_kernel(
    p_q,
    p_k,
    p_notes,  # (B, Hq, M, C) fp32, working memory
    p_sums,  # (B, Hq, M, S) fp32, log of the total of each part's notes, if SPLIT
    p_mass,  # (B, Hq, R, C) fp32, initially zero
    tiles_q,
    tiles_k,
    tokens_q,
    tokens_k,
    seqlen_k,
    first_tile,
    offset,
    rows,
    kv_blocks,
    q_heads,
    group_size,
    steps,
    scale,
    stride_m,
    q_strides,
    k_strides,
    Q_SIZE: tl.constexpr,
    K_SIZE: tl.constexpr,
    Q_PARTS: tl.constexpr,
    K_PARTS: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PARTS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    STEPS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D  # steps per token
    i_bh = tl.program_id(1).to(tl.int64)
    i_tile = tl.num_programs(0) - 1 - tl.program_id(0)  # longest rows first, under a causal mask
    o_m = i_tile * TILE_M + tl.arange(0, TILE_M)
    m_m = (o_m < tiles_q)[:, None]
    o_d = tl.arange(0, BLOCK_D)
    p_q += i_bh // q_heads * q_strides.b + i_bh % q_heads * q_strides.h
    p_k += i_bh // q_heads * k_strides.b + i_bh % q_heads // group_size * k_strides.h
    p_notes += i_bh * tiles_q * kv_blocks
    stop, whole = tiles_k, seqlen_k // K_SIZE  # tiles that some query sees; tiles that all queries see completely
    ends = (first_tile + o_m + 1) * Q_SIZE - 1 + offset
    if CAUSAL:
        last = (first_tile + i_tile * TILE_M + TILE_M) * Q_SIZE - 1 + offset
        stop = tl.where(last < 0, 0, tl.minimum(last // K_SIZE + 1, tiles_k))
        whole = tl.minimum(whole, tl.maximum(last - (TILE_M - 1) * Q_SIZE + K_SIZE, 0) // K_SIZE)
    row_max = tl.full([TILE_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_M], tl.float32)
    if PARTS * STEPS == 1:
        b_held = _tokens(p_q, o_m, 0, o_d, tiles_q, tokens_q, q_strides.n, PARTS, D)
    begin = 0
    if SPLIT:
        begin = tl.program_id(2) * steps * TILE_T
        stop = tl.minimum(stop, begin + steps * TILE_T)
    for first in range(begin, stop, TILE_T):
        o_t = first + tl.arange(0, TILE_T)
        if PARTS * STEPS == 1:
            logits = tl.dot(b_held, tl.trans(_tokens(p_k, o_t, 0, o_d, tiles_k, tokens_k, k_strides.n, PARTS, D)))
        else:
            logits = tl.zeros([TILE_M, TILE_T], tl.float32)
            for step in range(PARTS * STEPS):
                place, o_e = step // STEPS, step % STEPS * BLOCK_D + o_d
                b_q = _tokens(p_q, o_m, PARTS - 1 - place, o_e, tiles_q, tokens_q, q_strides.n, PARTS, D)
                b_k = _tokens(p_k, o_t, place, o_e, tiles_k, tokens_k, k_strides.n, PARTS, D)
                logits = tl.dot(b_q, tl.trans(b_k), logits)
        logits *= scale  # now in base 2
        if first + TILE_T > whole:
            keys = tl.minimum(tl.maximum(seqlen_k - o_t * K_SIZE, 1), K_SIZE).to(tl.float32)
            visible = m_m & (o_t < tiles_k)[None, :]
            if CAUSAL:
                visible = visible & (o_t[None, :] * K_SIZE <= ends[:, None])
            logits = tl.where(visible, logits + tl.log2(keys / K_SIZE)[None, :], float("-inf"))
        blocks = tl.reshape(logits, [TILE_M, TILE_T // K_PARTS, K_PARTS])
        best = tl.max(blocks, 2)
        shift = tl.where(best == float("-inf"), 0.0, best)
        found = tl.sum(tl.exp2(blocks - shift[:, :, None]), 2)
        note = tl.where(found == 0, float("-inf"), shift + tl.log2(tl.where(found == 0, 1.0, found)))
        o_c = first // K_PARTS + tl.arange(0, TILE_T // K_PARTS)
        p_own = p_notes + o_m.to(tl.int64)[:, None] * kv_blocks + o_c[None, :]
        tl.store(p_own, note, mask=m_m & (o_c < kv_blocks)[None, :])
        new_max = tl.maximum(row_max, tl.max(best, 1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        row_sum = row_sum * tl.exp2(row_max - shift) + tl.sum(tl.exp2(note - shift[:, None]), 1)
        row_max = new_max
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    total = shift + tl.log2(tl.where(row_sum == 0, 1.0, row_sum))
    if SPLIT:
        p_own = p_sums + (i_bh * tiles_q + o_m) * tl.num_programs(2) + tl.program_id(2)
        tl.store(p_own, tl.where(row_sum == 0, float("-inf"), total), mask=o_m < tiles_q)
    else:
        tl.debug_barrier()  # waits until all threads have written their notes
        o_row = i_tile * (TILE_M // Q_PARTS) + tl.arange(0, TILE_M // Q_PARTS)
        end = (stop + K_PARTS - 1) // K_PARTS
        p_mass += i_bh * stride_m
        _write_shares(
            p_notes, p_mass, total, o_m, m_m, o_row, 0, end, rows, kv_blocks, Q_PARTS, TILE_M, BLOCK_C
        )  # fmt: skip


@kernel_launcher
@triton.jit(do_not_specialize=["tiles_q", "tiles_k", "first_tile", "offset", "rows", "kv_blocks", "splits"])
def _tile_shares_kernel(
    p_notes,  # (B, Hq, M, C) fp32
    p_sums,  # (B, Hq, M, S) fp32
    p_mass,  # (B, Hq, R, C) fp32, initially zero
    tiles_q,
    tiles_k,
    first_tile,
    offset,
    rows,
    kv_blocks,
    splits,
    stride_m,
    Q_SIZE: tl.constexpr,
    K_SIZE: tl.constexpr,
    Q_PARTS: tl.constexpr,
    K_PARTS: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE_M: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    i_bh, i_tile = tl.program_id(1).to(tl.int64), tl.program_id(0)
    o_m = i_tile * TILE_M + tl.arange(0, TILE_M)
    m_m = (o_m < tiles_q)[:, None]
    o_s = tl.arange(0, SPLITS)
    p_own = p_sums + (i_bh * tiles_q + o_m)[:, None] * splits + o_s[None, :]
    sums = tl.load(p_own, mask=m_m & (o_s < splits)[None, :], other=float("-inf"))
    best = tl.max(sums, 1)
    shift = tl.where(best == float("-inf"), 0.0, best)
    found = tl.sum(tl.exp2(sums - shift[:, None]), 1)
    total = shift + tl.log2(tl.where(found == 0, 1.0, found))
    stop = tiles_k
    if CAUSAL:
        last = (first_tile + i_tile * TILE_M + TILE_M) * Q_SIZE - 1 + offset
        stop = tl.where(last < 0, 0, tl.minimum(last // K_SIZE + 1, tiles_k))
    begin = tl.program_id(2) * COLUMNS
    end = tl.minimum((stop + K_PARTS - 1) // K_PARTS, begin + COLUMNS)
    o_row = i_tile * (TILE_M // Q_PARTS) + tl.arange(0, TILE_M // Q_PARTS)
    p_notes += i_bh * tiles_q * kv_blocks
    p_mass += i_bh * stride_m
    _write_shares(p_notes, p_mass, total, o_m, m_m, o_row, begin, end, rows, kv_blocks, Q_PARTS, TILE_M, BLOCK_C)


def tile_mass(
    queries: Tensor,
    keys: Tensor,
    first_tile: int,
    mass: Tensor,
    grid: BlockGrid,
    sizes: tuple[int, int],
    *,
    panel: int = 1,
    parts: int = 1,
    scale: float = 1.0,
) -> None:
    """Write the mass of each kv block for some rows of q blocks.

    A tile's vector consists of `parts` tokens side by side; those of queries are in reverse order. Past the end, the
    last token is repeated.

    Args:
        queries: (B, M * parts, Hq, D), tokens of the rows' query tiles, from `first_tile`; the last may be missing.
        keys: (B, T * parts, Hk, D), tokens of all key tiles, in the same dtype; the last may be missing.
        first_tile: first query tile.
        mass: (B, Hq, rows, C) fp32, zeros, some rows of a contiguous tensor; receives the mass. Each query tile's
            shares sum to 1, or to 0 if it sees nothing. A row is a panel of q blocks.
        grid: lengths and block sizes.
        sizes: tokens of the sequence per tile of queries and of keys; they divide the blocks.
        panel: q blocks per panel.
        parts: tokens per vector.
        scale: factor for the products.
    """
    (batch, tokens_q, q_heads, dim), tokens_k = queries.shape, keys.shape[1]
    tiles_q, tiles_k = -(-tokens_q // parts), -(-tokens_k // parts)
    q_parts, k_parts = panel * grid.block_size[0] // sizes[0], grid.block_size[1] // sizes[1]
    queries, keys = (unit_stride(at_most_fp32(x)) for x in (queries, keys))
    settings = _settings(queries, q_parts, k_parts, parts)
    programs = (-(-tiles_q // settings["TILE_M"]), batch * q_heads)
    steps, splits = _splits(programs[0] * programs[1], -(-tiles_k // settings["TILE_T"]), queries.device)
    notes = torch.empty(batch, q_heads, tiles_q, grid.kv_blocks, device=queries.device, dtype=torch.float32)
    sums = (
        torch.empty(batch, q_heads, tiles_q, splits, device=queries.device, dtype=torch.float32)
        if splits > 1
        else notes
    )
    where = {
        "tiles_q": tiles_q,
        "tiles_k": tiles_k,
        "first_tile": first_tile,
        "offset": grid.offset,
        "rows": mass.shape[2],
        "kv_blocks": grid.kv_blocks,
        "stride_m": mass.stride(1),
        "Q_SIZE": sizes[0],
        "K_SIZE": sizes[1],
        "Q_PARTS": q_parts,
        "K_PARTS": k_parts,
        "CAUSAL": grid.causal,
        "TILE_M": settings["TILE_M"],
        "BLOCK_C": BLOCK_C,
    }
    _tile_mass_kernel[(*programs, splits)](
        queries,
        keys,
        notes,
        sums,
        mass,
        tokens_q=tokens_q,
        tokens_k=tokens_k,
        seqlen_k=grid.seqlen_k,
        q_heads=q_heads,
        group_size=q_heads // keys.shape[2],
        steps=steps,
        scale=float(scale) * LOG2_E,
        q_strides=strides_of(queries),
        k_strides=strides_of(keys),
        SPLIT=splits > 1,
        PARTS=parts,
        D=dim,
        **where,
        **{name: value for name, value in settings.items() if name != "TILE_M"},
    )
    if splits > 1:
        _tile_shares_kernel[(*programs, -(-grid.kv_blocks // COLUMNS))](
            notes, sums, mass, splits=splits, SPLITS=MAX_SPLITS, COLUMNS=COLUMNS, num_warps=4, **where
        )


def _splits(programs: int, tiles: int, device: torch.device) -> tuple[int, int]:
    """Return how many tiles of keys a program processes, and how many programs share them."""
    few = programs < processors(device)
    splits = min(-(-2 * processors(device) // programs), tiles // MIN_STEPS, MAX_SPLITS) if few else 1
    steps = -(-tiles // max(1, splits))
    return steps, -(-tiles // steps)


def _settings(queries: Tensor, q_parts: int, k_parts: int, parts: int) -> dict[str, int]:
    """Return the tile sizes and the number of warps.

    Long vectors form a matrix product (H200, 131k tokens in tiles of 16: 16.3 ms with 128 x 128, 26 ms with 64 x 64).
    Short ones stay in registers, and then exponentials and sums dominate (4.5 ms; 6.2 ms if not in registers).
    """
    width, memory, half = padded(queries.shape[3]), gpu_of(queries.device).shared_memory, queries.itemsize == 2
    wide = half and parts * width >= 512
    tile_m, tile_t = (max(128 if wide else 64, least) for least in (q_parts, k_parts))
    held = half and parts == 1 and (tile_m + 2 * tile_t) * width * 2 + (8 << 10) <= memory
    return {
        "TILE_M": tile_m,
        "TILE_T": tile_t,
        "BLOCK_D": width if held else min(64, width),
        "num_warps": 4 if tile_m * tile_t <= 64 * 64 else 8,
        "num_stages": 2 if held else 4 if wide and memory >= 144 << 10 else 3,
    }
