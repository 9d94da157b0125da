# SPDX-License-Identifier: Apache-2.0
"""Find the causal sequences in a boolean mask: runs of queries, each with a range of keys.

One boolean mask can express left and right padding, packed documents, a chunk of a long prompt, and a cache longer than
its content. Each of these consists of a few runs of rows. This module reads them from the mask itself, so that the
sparse result covers exactly the pairs that the mask shows, whatever created it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

ROWS_AT_ONCE = 1024
MIN_RUNS, TOKENS_PER_RUN = 16, 8  # a mask with more runs than both limits has no runs


class MaskRun(NamedTuple):
    """Consecutive queries that see keys `k_start : k_stop`; if causal, query `q_stop - 1 - i` misses the last `i`."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool

    @property
    def seqlen_q(self) -> int:
        """Return the number of queries."""
        return self.q_stop - self.q_start

    @property
    def seqlen_k(self) -> int:
        """Return the number of keys."""
        return self.k_stop - self.k_start


def causal_runs(
    seqlen_q: int, offset: int, padding: Tensor | None, documents: Tensor | None, batch: int
) -> list[list[MaskRun]] | None:
    """Return the runs of a causal mask from its parts, equal to those of `read_mask`, or None if padding has holes.

    Args:
        seqlen_q: number of queries.
        offset: column of the first query's own key.
        padding: (batch, seqlen_k) bool, False for keys that no query sees.
        documents: (batch, seqlen_q) document numbers; queries see keys of their document, and `offset` must be 0.
        batch: batch size.
    """
    if documents is not None:
        bounds = [[0, *(row.diff().nonzero().flatten() + 1).tolist(), seqlen_q] for row in documents.cpu()]
        entries = [[MaskRun(a, b, a, b, True) for a, b in pairwise(entry)] for entry in bounds]
        return entries if padding is None else None
    if padding is None:
        return [[MaskRun(0, seqlen_q, 0, offset + seqlen_q, True)]] * batch
    own = padding.cpu()
    if bool(own[:, : offset + seqlen_q].all()):
        return [[MaskRun(0, seqlen_q, 0, offset + seqlen_q, True)]] * batch
    start, stop, contiguous = _spans(own)
    if not bool(contiguous):
        return None
    spans = zip(start.tolist(), stop.tolist(), strict=True)
    return [_padded(seqlen_q, offset, first, last) for first, last in spans]


def _padded(seqlen_q: int, offset: int, first: int, last: int) -> list[MaskRun]:
    """Return the runs of one entry whose real keys are `first : last`."""
    if first < 0 or first >= offset + seqlen_q:
        return [MaskRun(0, seqlen_q, 0, 0, False)]
    begin, end = max(0, first - offset), min(seqlen_q, max(0, last - offset))
    runs = [
        MaskRun(0, begin, 0, 0, False),
        MaskRun(begin, end, first, offset + end, True),
        MaskRun(end, seqlen_q, first, last, False),
    ]
    return [run for run in runs if run.seqlen_q > 0]


def read_mask(mask: Tensor) -> list[list[MaskRun]] | None:
    """Return the runs of each batch entry, which cover its queries in order, or None if the mask has another form.

    Args:
        mask: (batch, seqlen_q, seqlen_k) bool, True = visible. Queries that see nothing form a run without keys.
    """
    return _by_entry(_read_entry, mask)


def read_window(mask: Tensor, window: int) -> list[list[MaskRun]] | None:
    """Return the runs of each batch entry of a causal mask with a window, or None if the mask has another form.

    Args:
        mask: (batch, seqlen_q, seqlen_k) bool, True = visible.
        window: number of keys that a query sees, its own included.

    Returns:
        For each entry a run without keys for queries that see nothing, if there are any, and a causal run. The run
        begins at the first real key, and the window hides more keys.
    """
    return _by_entry(partial(_read_window, window=window), mask)


def _by_entry(read: Callable[[Tensor], list[MaskRun] | None], mask: Tensor) -> list[list[MaskRun]] | None:
    """Read each batch entry of a mask; an expanded one is read once. None if an entry has another form."""
    distinct = 1 if mask.stride(0) == 0 else mask.shape[0]
    entries = [read(entry) for entry in mask[:distinct]]
    return None if None in entries else entries * (mask.shape[0] // max(1, distinct))  # type: ignore[return-value]


def _read_window(mask: Tensor, window: int) -> list[MaskRun] | None:
    ends = _contiguous_rows(mask)
    if ends is None:
        return None
    (start, stop), seqlen_q = ends, mask.shape[0]
    first = int((start < 0).sum())
    if first == seqlen_q:
        return [MaskRun(0, seqlen_q, 0, 0, False)]
    k_start, k_stop = int(start[first]), int(stop[-1])
    stops = torch.arange(k_stop - seqlen_q + 1, k_stop + 1, device=mask.device)
    nothing = torch.arange(seqlen_q, device=mask.device) < first
    same_stops = (stop == stops.masked_fill(nothing, 0)).all()
    same_starts = (start == (stops - window).clamp(min=k_start).masked_fill(nothing, -1)).all()
    if not bool(same_stops & same_starts):
        return None
    return [MaskRun(0, first, 0, 0, False)] * (first > 0) + [MaskRun(first, seqlen_q, k_start, k_stop, True)]


def _read_entry(mask: Tensor) -> list[MaskRun] | None:
    ends = _contiguous_rows(mask)
    if ends is None:
        return None
    (start, stop), seqlen_q = ends, mask.shape[0]
    step = stop[1:] - stop[:-1]
    same = start[1:] == start[:-1]
    kind = torch.where(same & (step == 1), 1, torch.where(same & (step == 0), 2, 0))  # 1 grows, 2 repeats, 0 neither
    turns = (kind[1:] != kind[:-1]) | (kind[1:] == 0)
    changes = [1, *(turns.nonzero().flatten() + 2).tolist()] if seqlen_q > 1 else []
    if len(changes) > max(MIN_RUNS, seqlen_q // TOKENS_PER_RUN):
        return None
    kinds = kind[torch.tensor(changes, dtype=torch.int64, device=mask.device) - 1].tolist() if changes else []
    bounds = [0]
    for row, row_kind in zip(changes, kinds, strict=True):
        if row_kind == 0 or bounds[-1] != row - 1:  # the second row of a run determines its kind
            bounds.append(row)
    bounds.append(seqlen_q)
    bound = torch.tensor(bounds, dtype=torch.int64, device=mask.device)
    first, last = bound[:-1], bound[1:] - 1
    rows = torch.stack([start[first], stop[first], stop[last]], -1).tolist()
    return [
        MaskRun(q_start, q_stop, max(0, k_start), k_stop, causal=k_stop > first_stop or q_stop - q_start == 1)
        for q_start, q_stop, (k_start, first_stop, k_stop) in zip(bounds[:-1], bounds[1:], rows, strict=True)
    ]


def _contiguous_rows(mask: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the first visible key (or -1) and the end of each row, or None if a row has gaps or the mask is empty."""
    if 0 in mask.shape:
        return None
    spans = [_spans(rows) for rows in mask.split(ROWS_AT_ONCE)]
    if not bool(torch.stack([contiguous for _, _, contiguous in spans]).all()):  # waits for the device once
        return None
    return torch.cat([start for start, _, _ in spans]), torch.cat([stop for _, stop, _ in spans])


def _spans(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first visible key (or -1) and the end of each row, and whether all keys between are visible."""
    width = mask.shape[1]
    start = mask.view(torch.uint8).argmax(-1)
    stop = width - mask.flip(-1).view(torch.uint8).argmax(-1)
    nothing = ~mask.gather(1, start[:, None])[:, 0]
    rises = mask[:, 1:] & ~mask[:, :-1]
    if width > 1:  # the only rise may be at the first visible key
        rises.scatter_(1, (start - 1).clamp(min=0)[:, None], False)
    return start.masked_fill(nothing, -1), stop.masked_fill(nothing, 0), ~rises.any()
