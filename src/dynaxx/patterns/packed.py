# SPDX-License-Identifier: Apache-2.0
"""One layout for a packed batch from one rule."""

from __future__ import annotations

import torch

from dynaxx.arguments import typed
from dynaxx.layout import BlockGrid, BlockLayout, as_block_size
from dynaxx.layout.cache import LayoutCache
from dynaxx.layout.host import on_host
from dynaxx.layout.packed import CuSeqlens, PackedLayout, host_lengths, pack_layouts
from dynaxx.patterns.base import Pattern
from dynaxx.patterns.build import build_layout


@typed
@on_host
def packed_layout(
    rule: Pattern,
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens | None = None,
    *,
    causal: bool = True,
    block_size: int | tuple[int, int] = 128,
    device: torch.device | str = "cpu",
) -> PackedLayout:
    """Build the layout of a rule over packed sequences, each by itself.

    Positions count from the start of each sequence: a window, sinks, global tokens, random blocks and the last queries
    are the same as in a batch of that sequence alone, and its queries are aligned to its last keys.

    Args:
        rule: a pattern; for a selector, which needs q and k, see `select_packed_blocks`.
        cu_seqlens_q: (num_seqs + 1,) cumulative numbers of queries, from 0; a sequence may be empty.
        cu_seqlens_k: of keys; `cu_seqlens_q` by default.
        causal, block_size: as `Pattern.layout`.
        device: of the layout; built on the host. Lengths on a GPU are read back, so keep them on the host.

    Returns:
        A layout for `sparse_attention` with q, k, v of (tokens, heads, head_dim). Cached by value.

    Raises:
        TypeError: a rule that is not a pattern.
        ValueError: lengths that do not start at 0, fall, or are of different numbers of sequences.
    """
    if not isinstance(rule, Pattern):
        raise TypeError(f"`rule` must be a pattern, got {rule!r}; a selector needs q and k: use select_packed_blocks")
    ends_q = host_lengths("cu_seqlens_q", cu_seqlens_q)
    ends_k = ends_q if cu_seqlens_k is None else host_lengths("cu_seqlens_k", cu_seqlens_k)
    return _cached(rule, ends_q, ends_k, as_block_size(block_size), causal, torch.device(device))


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
            "`cu_seqlens_q` and `cu_seqlens_k` must be of as many sequences, "
            f"got {len(ends_q) - 1} and {len(ends_k) - 1}"
        )
    built: dict[tuple[int, int], BlockLayout | None] = {}
    layouts = []
    with torch.inference_mode(False):  # what is cached must serve training, too
        for s in range(len(ends_q) - 1):
            lengths = (ends_q[s + 1] - ends_q[s], ends_k[s + 1] - ends_k[s])
            if lengths not in built:
                grid = BlockGrid(*lengths, block_size, causal)
                built[lengths] = build_layout(rule, grid) if min(lengths) else None
            layouts.append(built[lengths])
        return pack_layouts(layouts, ends_q, ends_k, block_size=block_size)
