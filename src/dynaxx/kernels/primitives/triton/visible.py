# SPDX-License-Identifier: Apache-2.0
"""Element masks of a block applied to a tile: a band by its two bounds, any other mask by its bits.

A pair (r, c) is a query's and a key's position in their blocks. An invalid mask id shows nothing and reads nothing.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Masks(NamedTuple):
    """A layout's element masks."""

    p_bits: Any  # (masks, Q_BLOCK, words of 32 keys) int32
    p_bands: Any  # (masks, 2) int32
    num_masks: Any


@triton.jit
def masks_of(layout):
    """Return the element masks of `LayoutRows`."""
    return Masks(p_bits=layout.tables.p_bits, p_bands=layout.tables.p_bands, num_masks=layout.num_masks)


@triton.jit
def load_band(masks, mask_id):
    """Load lo and hi of the pairs lo <= r - c <= hi that mask `mask_id` shows; lo > hi if it is no band or no mask."""
    known = (mask_id >= 0) & (mask_id < masks.num_masks)
    lo = tl.load(masks.p_bands + mask_id.to(tl.int64) * 2, mask=known, other=1)
    hi = tl.load(masks.p_bands + mask_id.to(tl.int64) * 2 + 1, mask=known, other=0)
    return lo, hi


@triton.jit
def in_block(lo, hi, mask_id, is_full, masks, Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr):
    """Return safe bounds of a band (of all pairs if it hides none), and whether the bits decide instead."""
    is_bits = (lo > hi) & (mask_id >= 0) & (mask_id < masks.num_masks) & (not is_full)
    anywhere = is_full | is_bits
    lo = tl.where(anywhere, -KV_BLOCK, tl.maximum(lo, -KV_BLOCK))
    hi = tl.where(anywhere, Q_BLOCK, tl.minimum(hi, Q_BLOCK))
    return lo, hi, is_bits


@triton.jit
def shown_by_bits(
    masks, mask_id, first_r, first_c, o_r, o_c, Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return which pairs (first_r + o_r, first_c + o_c) the bits of a mask show; first_c is a multiple of 32."""
    WORDS: tl.constexpr = (KV_BLOCK + 31) // 32
    p_row = masks.p_bits + ((mask_id.to(tl.int64) * Q_BLOCK + first_r) * WORDS + first_c // 32) + o_r * WORDS
    word = (o_r + o_c) * 0
    for i_word in tl.static_range((COLUMNS + 31) // 32):
        word = tl.where(o_c // 32 == i_word, tl.load(p_row + i_word), word)
    return ((word >> (o_c % 32)) & 1) != 0


@triton.jit
def where_shown(
    tile, other, mask_id, lo, hi, is_full, masks, inner_q, part_k, first_k, seqlen_k,
    Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr,
):  # fmt: skip
    """Return a tile [queries, keys] of one block, with `other` for pairs hidden by its band lo..hi or by the lengths.

    Band and end of the sequence become a first and a last column per row: two comparisons per element.
    """
    o_k = tl.arange(0, tile.shape[1])
    lo, hi, is_bits = in_block(lo, hi, mask_id, is_full, masks, Q_BLOCK, KV_BLOCK)
    if is_bits:
        r, c = inner_q[:, None], o_k[None, :]
        visible = shown_by_bits(masks, mask_id, 0, part_k, r, c, Q_BLOCK, KV_BLOCK, tile.shape[1])
        tile = tl.where(visible, tile, other)
    first = tl.maximum(inner_q - hi - part_k, -first_k)
    last = tl.minimum(inner_q - lo - part_k, seqlen_k - 1 - first_k)
    return tl.where((o_k[None, :] >= first[:, None]) & (o_k[None, :] <= last[:, None]), tile, other)


@triton.jit
def where_visible(
    tile, other, mask_id, is_full, masks, inner_q, inner_k, first_k, offsets, seqlen_k,
    Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr,
):  # fmt: skip
    """Return a tile [queries, keys] with `other` for hidden pairs; unlike in `where_shown`, it may gather blocks."""
    if tile.shape[1] > KV_BLOCK:
        mask_id = mask_id[None, :]
    visible = visible_elements(masks, mask_id, inner_q[:, None], inner_k[None, :], Q_BLOCK, KV_BLOCK)
    pos_k = first_k + offsets
    visible = (visible | is_full) & ((pos_k >= 0) & (pos_k < seqlen_k))[None, :]
    return tl.where(visible, tile, other)


@triton.jit
def visible_elements(masks, mask_id, r, c, Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr):
    """Return which of the in-block pairs (r, c) a partial block shows, bool in the broadcast shape of r and c.

    A scalar mask id uses the band if the mask has one; mask ids of a gathered tile have the shape of r or of c.
    """
    known = (mask_id >= 0) & (mask_id < masks.num_masks)
    if len(mask_id.shape) == 0:
        lo, hi = load_band(masks, mask_id)
        if (lo > hi) & known:
            visible = shown_by_bits(masks, mask_id, 0, 0, r, c, Q_BLOCK, KV_BLOCK, KV_BLOCK)
        else:
            visible = (r - c >= lo) & (r - c <= hi)
    else:
        WORDS: tl.constexpr = (KV_BLOCK + 31) // 32
        p_word = masks.p_bits + (mask_id.to(tl.int64) * Q_BLOCK + r) * WORDS + c // 32
        word = tl.load(p_word, mask=known & (r + c >= 0), other=0)
        visible = ((word >> (c % 32)) & 1) != 0
    return visible
