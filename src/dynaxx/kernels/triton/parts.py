# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Parts of long rows and columns in Triton kernels: which one a program has, and what of the line. See `split`."""

import triton
import triton.language as tl

WHOLE = tl.constexpr(-1)  # slot of a line that is not split
NOTHING = tl.constexpr(-2)  # slot of one that is, whose parts other programs have


@triton.jit
def part_of(i_program, p_parts, num_parts, batch_copies, head_copies, num_lines, heads, TILES: tl.constexpr):
    """The part that a program has a tile of, if there are so many; else what is not used.

    Returns:
        its slot, or WHOLE; batch entry, head, row (or column) and tile of it; its entries first..last of the line.
    """
    copies = batch_copies * head_copies
    is_part = i_program < num_parts * copies * TILES
    slot = tl.where(is_part, i_program // TILES, 0)
    p_part = p_parts + slot // copies * 3
    line = tl.load(p_part)
    line_heads = heads // head_copies
    i_b = line // num_lines // line_heads + slot % copies // head_copies
    i_h = line // num_lines % line_heads + slot % head_copies
    slot = tl.where(is_part, slot, WHOLE)
    return slot, i_b, i_h, line % num_lines, i_program % TILES, tl.load(p_part + 1), tl.load(p_part + 2)


@triton.jit
def entries_of(slot, start, partial, total, first, last, limit):
    """What a program has of a row's entries: its part, all, or NOTHING of a long one that is not a part."""
    split = (slot == WHOLE) & (total > limit)
    begin = tl.where(slot == WHOLE, 0, tl.minimum(first, total))
    end = tl.where(slot == WHOLE, tl.where(split, 0, total), tl.minimum(last, total))
    total = end - begin
    partial = tl.minimum(tl.maximum(partial - begin, 0), total)
    return tl.where(split, NOTHING, slot), start + begin, partial, total


@triton.jit
def store_part(p_sums, slot, rows, inner, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Leave a tile of a part, at positions `inner` of its block: (slots, BLOCK, D) fp32. Else nothing."""
    o_d = tl.arange(0, BLOCK_D)
    p_rows = p_sums + (tl.maximum(slot, 0).to(tl.int64) * BLOCK + inner)[:, None] * D + o_d[None, :]
    tl.store(p_rows, rows, mask=(inner < tl.where(slot >= 0, BLOCK, 0))[:, None] & (o_d < D)[None, :])
