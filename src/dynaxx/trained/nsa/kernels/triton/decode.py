# SPDX-License-Identifier: Apache-2.0
"""A decode step of native sparse attention in Triton: lengths of the branches, selection of blocks, their pages.

    seqused -> lengths;  q, compressed pages, lse -> scores -> top-k -> blocks -> pages

Results are those of `kernels.nsa.reference_decode`. Lengths are read on the device, so one captured graph serves every
length.

Legend: B sequences with one query each; Hq, Hk query and kv heads; D head_dim of q and k, E head_dim of v; C selection
blocks that a sequence may have; n selected blocks. Positions of compressed tokens are defined in
`trained.nsa.compressed_pages.CompressedPages`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.decode.triton.pages import PageTable, physical_pages, table_arguments
from dynaxx.kernels.device import padded
from dynaxx.kernels.runtime.arguments import strides_of, unit_stride
from dynaxx.kernels.runtime.launch_cache import record_or_replay
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.layout.paging import PagedCache
from dynaxx.trained.nsa.compressed_pages import NsaLengths
from dynaxx.trained.nsa.kernels.gpu.gate import gated_sum_forward as gated_sum
from dynaxx.trained.nsa.kernels.gpu.rows import weights_of
from dynaxx.trained.nsa.kernels.gpu.top import strides_per, top_blocks
from dynaxx.trained.nsa.kernels.triton.windows import compress_windows, gather_windows, store_compressed
from dynaxx.trained.nsa.spans import NsaSizes

__all__ = [
    "compress_windows",
    "gated_sum",
    "gather_windows",
    "kept_blocks",
    "pages_of",
    "record_or_replay",
    "select_blocks",
    "step_lengths",
    "store_compressed",
]

LENGTHS = 128  # sequences per program
TOKENS = 64  # compressed tokens per program
MAX_ROWS = 64  # q heads of a group processed together


@kernel_launcher
@triton.jit(do_not_specialize=["batch", "row", "window"])
def _lengths_kernel(
    p_seqused, p_lengths, batch, row, window, LENGTH: tl.constexpr, STRIDE: tl.constexpr, SLC: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the fields of `NsaLengths` as (5, B), `row` numbers apart."""
    i_b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i_b < batch
    used = tl.load(p_seqused + i_b, mask=inside, other=0)
    p_lengths += i_b
    tl.store(p_lengths, used // STRIDE, mask=inside)
    tl.store(p_lengths + row, used * 0 + (LENGTH // STRIDE - 1), mask=inside)
    tl.store(p_lengths + 2 * row, tl.where(used < LENGTH, 0, (used - LENGTH) // STRIDE + 1), mask=inside)
    tl.store(p_lengths + 3 * row, (used + SLC - 1) // SLC, mask=inside)
    tl.store(p_lengths + 4 * row, tl.maximum(used - window, 0), mask=inside)


@kernel_launcher
@triton.jit(do_not_specialize=["slots", "max_pages"])
def _pages_kernel(p_blocks, p_pages, slots, max_pages, PER_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    """Compute `pages_of` for one list."""
    i_list = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, BLOCK)
    inside = slot < slots * PER_BLOCK
    block = tl.load(p_blocks + i_list * slots + slot // PER_BLOCK, mask=inside, other=-1)
    page = block * PER_BLOCK + slot % PER_BLOCK
    page = tl.where((block >= 0) & (page < max_pages), page, -1)
    tl.store(p_pages + i_list * slots * PER_BLOCK + slot, page, mask=inside)


@kernel_launcher
@triton.jit(do_not_specialize=["heads", "slots", "kept"])
def _kept_blocks_kernel(
    p_blocks,  # (B, Hk, slots)
    p_out,  # (B, Hk, kept + FIRST + LOCAL)
    p_num_blocks, heads, slots, kept, FIRST: tl.constexpr, LOCAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute `kept_blocks` for one list."""
    i_list = tl.program_id(0)
    seen = tl.load(p_num_blocks + i_list // heads)
    slot = tl.arange(0, BLOCK)
    block = tl.load(p_blocks + i_list.to(tl.int64) * slots + slot, mask=(slot < slots) & (slot < kept), other=-1)
    block = tl.where((block >= FIRST) & (block < seen - LOCAL), block, -1)
    first, last = slot - kept, slot - kept - FIRST + seen - LOCAL
    block = tl.where((first >= 0) & (first < FIRST), tl.where(first < seen, first, -1), block)
    block = tl.where(first >= FIRST, tl.where((last >= FIRST) & (last >= 0), last, -1), block)
    width = kept + FIRST + LOCAL
    tl.store(p_out + i_list.to(tl.int64) * width + slot, block, mask=slot < width)


@kernel_launcher
@triton.jit(do_not_specialize=["num_physical", "group_size", "kv_heads", "blocks"])
def _decode_scores_kernel(
    p_q, p_k,
    p_lse,  # (B, Hq, 1) contiguous
    p_own,  # (B, Hk, C) fp32, contributions of tokens to the block in which they start
    p_next,  # (B, Hk, C) fp32, contributions of tokens that start in the previous block; written only if PER_TOKEN > 1
    p_num_cmp,  # (B,) int32
    p_table, p_seqused, p_leftpad, table_stride, num_physical, group_size, kv_heads, blocks, scale,
    q_strides,  # `Strides`
    k_strides,  # `PageStrides`
    PAGED: tl.constexpr, HAS_LEFTPAD: tl.constexpr,
    PAGE: tl.constexpr,  # compressed tokens per page
    D: tl.constexpr, BLOCK_D: tl.constexpr,
    PER_TOKEN: tl.constexpr,  # strides per compressed token
    PER_BLOCK: tl.constexpr,  # strides per block
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MAX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute scores of blocks for one query, like `_nsa_scores_kernel` of nsa.select."""
    table = PageTable(p_table, table_stride, num_physical)
    BLOCKS: tl.constexpr = BLOCK_N // PER_BLOCK
    i_list, i_part = tl.program_id(0), tl.program_id(1)
    i_b, i_h = i_list // kv_heads, i_list % kv_heads
    tokens = tl.load(p_num_cmp + i_b)
    if i_part * BLOCK_N < tokens:
        o_d, o_m = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_M)
        token = i_part * BLOCK_N + tl.arange(0, BLOCK_N)
        place = token + PER_TOKEN - 1
        known = token < tokens
        page = physical_pages(table, i_b, place // PAGE, known, PAGED).to(tl.int64)
        p_k += i_b.to(tl.int64) * k_strides.batch + i_h.to(tl.int64) * k_strides.head
        p_rows = p_k + page * k_strides.page + (place % PAGE).to(tl.int64) * k_strides.token
        b_k = tl.load(p_rows[:, None] + o_d[None, :], mask=(page >= 0)[:, None] & (o_d < D)[None, :], other=0.0)
        total = tl.zeros([BLOCK_N], tl.float32)
        for start in range(0, group_size, BLOCK_M):
            member = start + o_m
            h = i_h * group_size + member
            inside = member < group_size
            p_row = p_q + i_b.to(tl.int64) * q_strides.b + h.to(tl.int64) * q_strides.h
            b_q = tl.load(p_row[:, None] + o_d[None, :], mask=inside[:, None] & (o_d < D)[None, :], other=0.0)
            lse = tl.load(p_lse + i_b.to(tl.int64) * group_size * kv_heads + h, mask=inside, other=float("inf"))
            scores = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
            total += tl.sum(weights_of(scores, lse[None, :], scale, b_q.dtype == tl.float32), 1)
        total = tl.where(known, total, 0.0)
        by_block = tl.reshape(total, [BLOCKS, PER_BLOCK])
        shared = tl.minimum(PER_BLOCK - tl.arange(0, PER_BLOCK), PER_TOKEN)[None, :]
        own = tl.max(by_block, 1) if MAX else tl.sum(by_block * shared, 1)
        block = i_part * BLOCKS + tl.arange(0, BLOCKS)
        row = i_list.to(tl.int64) * blocks + block
        tl.store(p_own + row, own, mask=block < blocks)
        if PER_TOKEN > 1:
            over = PER_TOKEN - shared
            behind = tl.max(tl.where(over > 0, by_block, 0.0), 1) if MAX else tl.sum(by_block * over, 1)
            tl.store(p_next + row + 1, behind, mask=block + 1 < blocks)


def kept_blocks(blocks: Tensor, lengths: NsaLengths, sizes: NsaSizes) -> Tensor:
    """Return earlier blocks with the current forced blocks, like `kernels.nsa.reference_decode`, in one kernel."""
    batch, heads, slots = blocks.shape
    width = sizes.slc_count + sizes.first_blocks + sizes.local_blocks
    kept = torch.empty(batch, heads, width, dtype=torch.int32, device=blocks.device)
    if kept.numel():
        _kept_blocks_kernel[(batch * heads,)](
            blocks.int().contiguous(),
            kept,
            lengths.blocks,
            heads=heads,
            slots=slots,
            kept=sizes.slc_count,
            FIRST=sizes.first_blocks,
            LOCAL=sizes.local_blocks,
            BLOCK=triton.next_power_of_2(width),
        )
    return kept


def pages_of(blocks: Tensor, pages_per_block: int, max_pages: int) -> Tensor:
    """Return the pages of blocks, like `kernels.nsa.reference_decode`, in one kernel."""
    if pages_per_block == 1:
        return blocks
    batch, heads, slots = blocks.shape
    pages = blocks.new_empty(batch, heads, slots * pages_per_block)
    if pages.numel():
        _pages_kernel[(batch * heads,)](
            blocks.contiguous(),
            pages,
            slots=slots,
            max_pages=max_pages,
            PER_BLOCK=pages_per_block,
            BLOCK=triton.next_power_of_2(slots * pages_per_block),
        )
    return pages


def step_lengths(seqused: Tensor, sizes: NsaSizes) -> NsaLengths:
    """Return the lengths that each branch reads, in one kernel, each 16-byte aligned for `kernel_launcher`."""
    batch = seqused.shape[0]
    lengths = seqused.new_empty(5, -(-batch // 4) * 4)
    if batch:
        _lengths_kernel[(triton.cdiv(batch, LENGTHS),)](
            seqused.contiguous(),
            lengths,
            batch=batch,
            row=lengths.shape[1],
            LENGTH=sizes.cmp_block,
            STRIDE=sizes.cmp_stride,
            SLC=sizes.slc_block,
            window=sizes.window,
            BLOCK=LENGTHS,
        )
    return NsaLengths(*(lengths[i, :batch] for i in range(5)))


def select_blocks(
    q: Tensor, cache: PagedCache, lse: Tensor, lengths: NsaLengths, sizes: NsaSizes, max_blocks: int, scale: float
) -> Tensor:
    """Return the selected blocks, like `kernels.nsa.reference_decode`."""
    heads = cache.kv_heads
    per_token, per_block = strides_per(sizes)
    q = unit_stride(q.to(torch.promote_types(q.dtype, cache.k.dtype)))
    blocks = -(-max(1, max_blocks) // 16) * 16
    indices = torch.empty(cache.batch, heads, sizes.slc_count, dtype=torch.int32, device=q.device)
    if not indices.numel():
        return indices
    own = torch.empty(cache.batch, heads, blocks, dtype=torch.float32, device=q.device)
    behind = torch.empty_like(own) if per_token > 1 else own
    tile = max(per_block, TOKENS)
    group_size = q.shape[2] // heads
    _decode_scores_kernel[(cache.batch * heads, -(-blocks * per_block // tile))](
        q,
        cache.k,
        lse.contiguous(),
        own,
        behind,
        lengths.tokens,
        **table_arguments(cache),
        group_size=group_size,
        kv_heads=heads,
        blocks=blocks,
        scale=scale,
        q_strides=strides_of(q),
        k_strides=cache.strides(cache.k),
        PAGE=cache.page_size,
        D=q.shape[3],
        BLOCK_D=padded(q.shape[3]),
        PER_TOKEN=per_token,
        PER_BLOCK=per_block,
        BLOCK_M=max(16, min(MAX_ROWS, triton.next_power_of_2(group_size))),
        BLOCK_N=tile,
        MAX=sizes.pool == "max",
        PRECISION="ieee",
    )
    top_blocks(own, behind, indices, lengths.blocks, lengths.tokens, 0, sizes)
    return indices
