# SPDX-License-Identifier: Apache-2.0
"""Convert xFormers' masks to layouts.

Masks are recognized by their class names, so xFormers is not imported. Classes that are not in the table are refused,
including subclasses of known ones, because they may change the mask. Gaps and padding between keys become sequences
without queries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from typing_extensions import override

from dynaxx.arguments import typed
from dynaxx.errors import UnsupportedInputError
from dynaxx.layout import BlockGrid, BlockLayout
from dynaxx.layout.host import never_traced
from dynaxx.patterns.base import BandRule
from dynaxx.patterns.packed import packed_layout


@dataclass(frozen=True)
class Band(BandRule):
    """Rule lo <= query - key <= hi with None for unlimited. Positions count from the starts or from the ends."""

    lo: int | None
    hi: int | None
    from_start: bool = False

    @override
    def limits(self, grid: BlockGrid) -> tuple[int | None, int | None]:
        shift = grid.offset if self.from_start else 0  # the grid aligns positions at their ends
        return (None if self.lo is None else self.lo + shift), (None if self.hi is None else self.hi + shift)


Convert = Callable[[Any], Band]
_FULL: Convert = lambda mask: Band(None, None)
_CAUSAL: Convert = lambda mask: Band(0, None, from_start=True)
_CAUSAL_AT_END: Convert = lambda mask: Band(0, None)
_LOCAL: Convert = lambda mask: Band(0, int(mask._window_size) - 1, from_start=True)
_LOCAL_AT_END: Convert = lambda mask: Band(0, int(mask._window_size) - 1)
_SIDES: Convert = lambda mask: Band(-int(mask.window_right), int(mask.window_left))

# Masks without lengths: q and k are (batch, seqlen, heads, head_dim).
WHOLE: dict[str, Convert] = {
    "LowerTriangularMask": _CAUSAL,
    "LowerTriangularFromBottomRightMask": _CAUSAL_AT_END,
    "LowerTriangularFromBottomRightLocalAttentionMask": _LOCAL_AT_END,
    "LocalAttentionFromBottomRightMask": _SIDES,
}
# Masks with lengths: the sequences are concatenated.
BLOCKS: dict[str, Convert] = {
    "BlockDiagonalMask": _FULL,
    "BlockDiagonalCausalMask": _CAUSAL,
    "BlockDiagonalCausalFromBottomRightMask": _CAUSAL_AT_END,
    "BlockDiagonalCausalLocalAttentionMask": _LOCAL,
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": _LOCAL_AT_END,
    "BlockDiagonalPaddedKeysMask": _FULL,
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": _CAUSAL_AT_END,
    "BlockDiagonalLocalAttentionPaddedKeysMask": _SIDES,
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": _LOCAL_AT_END,
    "BlockDiagonalGappyKeysMask": _FULL,
    "BlockDiagonalCausalWithOffsetGappyKeysMask": _CAUSAL_AT_END,
}


@never_traced
@typed
def layout_of_mask(
    mask: object,
    seqlen_q: int | None = None,
    seqlen_k: int | None = None,
    *,
    block_size: int | tuple[int, int] = 128,
    device: torch.device | str = "cpu",
) -> BlockLayout:
    """Return the layout with the same visible pairs as one of xFormers' masks.

    Args:
        mask: an `attn_bias` of `xformers.ops.memory_efficient_attention`: `BlockDiagonalMask`, its causal and local
            variants, with padded or gappy keys; `LowerTriangularMask` and its variants,
            `LocalAttentionFromBottomRightMask`.
        seqlen_q: number of queries, only for masks without lengths.
        seqlen_k: number of keys, only for masks without lengths; `seqlen_q` by default.
        block_size: tokens per block, as in `Pattern.layout`.
        device: the device of the layout. Lengths are read from the mask's host lists.

    Returns:
        A `PackedLayout` for a mask with sequences, else a `BlockLayout`. With a `PackedLayout`, `sparse_attention`
        takes (tokens, heads, head_dim); pass `q[0]` of xFormers' (1, tokens, heads, head_dim).

    Raises:
        UnsupportedInputError: the mask is a tensor bias, a paged mask (use a `PagedCache`) or a subclass.
        ValueError: lengths are given for a mask that has its own, or missing for one that has none, or the sequences of
            keys overlap or are out of order.
    """
    name = type(mask).__name__
    if name in WHOLE:
        if seqlen_q is None:
            raise ValueError(f"`seqlen_q` must be given with {name}, which has no lengths")
        rule = WHOLE[name](mask)
        return rule.layout(
            seqlen_q, seqlen_q if seqlen_k is None else seqlen_k, causal=False, block_size=block_size, device=device
        )
    if name not in BLOCKS:
        reasons = [f"no layout for {name}; known: {', '.join((*WHOLE, *BLOCKS))}"]
        raise UnsupportedInputError("layout_of_mask", {"xformers": reasons})
    if seqlen_q is not None or seqlen_k is not None:
        raise ValueError(f"`seqlen_q` and `seqlen_k` must be None with {name}, which has its own lengths")
    ends_q, ends_k = _with_gaps(name, mask)
    rule = BLOCKS[name](mask)
    return packed_layout(rule, ends_q, ends_k, causal=False, block_size=block_size, device=device)


def _with_gaps(name: str, mask: Any) -> tuple[list[int], list[int]]:
    """Return cumulative lengths of queries and keys; a gap between keys is a sequence without queries."""
    starts_q = [int(each) for each in mask.q_seqinfo.seqstart_py]
    starts_k = [int(each) for each in mask.k_seqinfo.seqstart_py]
    lengths = getattr(mask.k_seqinfo, "seqlen_py", None)
    if lengths is None:  # keys without gaps
        return starts_q, starts_k
    ends_q, ends_k = [0], [0]
    for i, (start, length) in enumerate(zip(starts_k, lengths, strict=False)):
        if start < ends_k[-1]:
            raise ValueError(f"the sequences of keys of {name} must not overlap, got sequence {i} at {start}")
        if start > ends_k[-1]:
            ends_q.append(ends_q[-1])
            ends_k.append(start)
        ends_q.append(starts_q[i + 1])
        ends_k.append(start + int(length))
    if len(starts_k) > len(lengths) and starts_k[-1] > ends_k[-1]:
        ends_q.append(ends_q[-1])
        ends_k.append(starts_k[-1])
    assert all(a <= b for a, b in pairwise(ends_k)), "checked above"
    return ends_q, ends_k
