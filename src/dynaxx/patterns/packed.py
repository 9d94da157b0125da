# SPDX-License-Identifier: Apache-2.0
"""Build one layout for a packed batch from one pattern."""

from __future__ import annotations

import numpy as np
import torch

from dynaxx.arguments import typed
from dynaxx.layout import BlockGrid, BlockLayout, as_block_size
from dynaxx.layout.cache import LayoutCache
from dynaxx.layout.host import lasting
from dynaxx.layout.packed import CuSeqlens, PackedLayout, host_lengths, pack_layouts, with_lengths
from dynaxx.patterns.base import Pattern
from dynaxx.patterns.build import build_layout
from dynaxx.patterns.documents import Documents
from dynaxx.patterns.packed_terms import layout_of_terms


@typed
@lasting
def packed_layout(
    rule: Pattern,
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens | None = None,
    *,
    causal: bool = True,
    block_size: int | tuple[int, int] = 128,
    device: torch.device | str = "cpu",
) -> PackedLayout:
    """Build the layout of a pattern over packed sequences, which do not see each other.

    Positions count from the start of each sequence. Each sequence gets the layout that it would have alone, with its
    queries aligned to its last keys.

    Args:
        rule: a pattern; for a selector, which needs q and k, see `select_packed_blocks`.
        cu_seqlens_q: (num_seqs + 1,) cumulative numbers of queries, starting with 0; a sequence may be empty.
        cu_seqlens_k: (num_seqs + 1,) cumulative numbers of keys; `cu_seqlens_q` by default.
        causal: hide keys after the query.
        block_size: tokens per block, or (q_block, kv_block), as in `Pattern.layout`.
        device: the device of the layout, which is built on the host. Keep the lengths on the host as well: lengths on a
            GPU are read back, which synchronizes.

    Returns:
        A layout for `sparse_attention` with q, k, v of (tokens, heads, head_dim). It is cached by value.

    Raises:
        TypeError: `rule` is not a pattern.
        ValueError: the lengths do not start at 0, decrease, or describe different numbers of sequences.
    """
    if not isinstance(rule, Pattern):
        raise TypeError(f"`rule` must be a pattern, got {rule!r}; a selector needs q and k: use select_packed_blocks")
    ends_q = host_lengths("cu_seqlens_q", cu_seqlens_q)
    ends_k = ends_q if cu_seqlens_k is None else host_lengths("cu_seqlens_k", cu_seqlens_k)
    return _cached(rule, ends_q, ends_k, as_block_size(block_size), causal, torch.device(device))


def _of_all_sequences(
    rule: Pattern, ends_q: tuple[int, ...], ends_k: tuple[int, ...], block_size: tuple[int, int], causal: bool
) -> BlockLayout | None:
    """Return the layout of a rule for which all sequences can be laid out at once, else None."""
    if rule.by_distance and ends_q == ends_k:  # distances do not depend on where a sequence starts
        return build_layout(Documents(ends_k) & rule, BlockGrid(ends_q[-1], ends_k[-1], block_size, causal))
    return layout_of_terms(rule, np.array(ends_q), np.array(ends_k), block_size, causal)


@LayoutCache
def _cached(
    rule: Pattern,
    ends_q: tuple[int, ...],
    ends_k: tuple[int, ...],
    block_size: tuple[int, int],
    causal: bool,
    device: torch.device,
) -> PackedLayout:
    if device.type != "cpu":
        return _cached(rule, ends_q, ends_k, block_size, causal, torch.device("cpu")).to(device)
    if len(ends_q) != len(ends_k):
        raise ValueError(
            "`cu_seqlens_q` and `cu_seqlens_k` must describe the same number of sequences, "
            f"got {len(ends_q) - 1} and {len(ends_k) - 1}"
        )
    if min(ends_q[-1], ends_k[-1]):
        layout = _of_all_sequences(rule, ends_q, ends_k, block_size, causal)
        if layout is not None:
            return with_lengths(layout, ends_q, ends_k)
    built: dict[tuple[int, int], BlockLayout | None] = {}
    layouts = []
    for s in range(len(ends_q) - 1):
        lengths = (ends_q[s + 1] - ends_q[s], ends_k[s + 1] - ends_k[s])
        if lengths not in built:
            grid = BlockGrid(*lengths, block_size, causal)
            built[lengths] = build_layout(rule, grid) if min(lengths) else None
        layouts.append(built[lengths])
    return pack_layouts(layouts, ends_q, ends_k, block_size=block_size)
