# SPDX-License-Identifier: Apache-2.0
"""The model's own attention pattern as block layouts: causal, windows, chunks, packed and padded batches."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from dynaxx.integrations.transformers.masks.lazy import LazyMask
from dynaxx.integrations.transformers.masks.rules import MaskRule
from dynaxx.integrations.transformers.masks.runs import MaskRun
from dynaxx.layout import BlockLayout
from dynaxx.layout.hide_keys import hide_keys
from dynaxx.patterns import Causal, Documents, Full, Pattern, SlidingWindow

BLOCK = {"cpu": 64, "cuda": 128}  # tokens per block of the layouts of a model's own pattern


Window = tuple[int, int]  # keys visible before and after the query's own


class OwnPart(NamedTuple):
    """Some queries of a call and their layout over some keys."""

    entry: int | None  # batch entry; None for all
    queries: slice
    keys: slice
    layout: BlockLayout | None  # None if these queries see nothing

    def covers(self, q: Tensor, k: Tensor) -> bool:
        """Return whether the part is the whole call, for q and k (batch, seqlen, heads, head_dim)."""
        whole = self.entry is None or q.shape[0] == 1
        return whole and self.queries == slice(0, q.shape[1]) and self.keys == slice(0, k.shape[1])


@torch.inference_mode(False)
@torch.no_grad()
def parts_of_mask(mask: LazyMask, device: torch.device, window: Window | None = None) -> list[OwnPart] | None:
    """Return layouts that show exactly the pairs of a mask, by entry and query, or None if no layout can.

    Args:
        mask: the mask of a call with at least as many keys as queries.
        device: the device of the layouts.
        window: (left, right) keys on each side that a query may see in addition to the mask; None means all.
    """
    batch, _, seqlen_q, seqlen_k = mask.shape
    rule, used = mask.rule, mask.offset + seqlen_q  # a static cache is longer than its content
    if window is not None:
        narrower = rule.both(MaskRule(window=window[0] + 1, after=window[1]))
        assert narrower is not None, "two windows always have a common rule"
        rule = narrower
    if used > seqlen_k or (not rule.causal and used != seqlen_k):
        return None
    queries, keys = slice(0, seqlen_q), slice(0, used)
    padding = mask.padding
    shown = None if padding is None else padding[:, :used].cpu()
    if shown is not None and bool(shown.all()):
        shown = None
    start = int(mask.request.get("kv_offset", 0))
    if rule.blocks is not None and not _are_contiguous(rule.blocks[:, start:], used, seqlen_k):
        return None
    alone = rule.documents is not None or rule.blocks is not None or (rule.chunk is not None and shown is not None)
    if not alone:
        layout = _layout(pattern_of(rule, used, start), rule, seqlen_q, used, shown, device)
        return [OwnPart(None, queries, keys, layout)]
    parts = []
    for entry in range(batch):
        pattern = pattern_of(rule, used, start, entry)
        own = None if shown is None else shown[entry : entry + 1]
        parts.append(OwnPart(entry, queries, keys, _layout(pattern, rule, seqlen_q, used, own, device)))
    return parts


def parts_of_window(window: Window, seqlen: int, device: torch.device) -> list[OwnPart]:
    """Return the layout of a window over sequences without a mask."""
    layout = SlidingWindow(window).layout(seqlen, causal=False, block_size=BLOCK[device.type], device=device)
    return [OwnPart(None, slice(0, seqlen), slice(0, seqlen), layout)]


def parts_of_runs(runs: list[list[MaskRun]], device: torch.device, window: int | None = None) -> list[OwnPart]:
    """Return the layouts of causal sequences that were read from a mask.

    Args:
        runs: the runs of each batch entry.
        device: the device of the layouts.
        window: number of keys that a query sees, its own included; None means all.
    """
    alike = all(entry == runs[0] for entry in runs)
    return [
        OwnPart(
            None if alike else number,
            slice(run.q_start, run.q_stop),
            slice(run.k_start, run.k_stop),
            _layout_of_run(run, device, window),
        )
        for number, entry in enumerate(runs[:1] if alike else runs)
        for run in entry
    ]


def causal_layout(seqlen_q: int, seqlen_k: int, device: torch.device, *, causal: bool = True) -> BlockLayout:
    """Return the layout that shows every key, up to the query's own if `causal`."""
    rule: Pattern = Causal() if causal else Full()
    return rule.layout(seqlen_q, seqlen_k, causal=causal, block_size=BLOCK[device.type], device=device)


def pattern_of(rule: MaskRule, used: int, start: int = 0, entry: int = 0) -> Pattern:
    """Return the pattern of one batch entry over `used` keys, the first of which is token `start`."""
    found: Pattern = Causal() if rule.causal else Full()
    if rule.window is not None or rule.after is not None:
        left = -1 if rule.window is None else rule.window - 1
        found = SlidingWindow((left, 0 if rule.causal else -1 if rule.after is None else rule.after))
    ends = {0, used}
    if rule.documents is not None:
        ends |= set((rule.documents[entry].diff().nonzero().flatten() + 1).tolist())
    if rule.chunk is not None:
        ends |= _starts_of_chunks(rule, start, entry, sorted(ends))
    found = found & Documents(tuple(sorted(ends))) if len(ends) > 2 else found
    if rule.blocks is None or not bool((blocks := rule.blocks[entry, start : start + used]).amax() >= 0):
        return found
    single = (blocks.diff() != 0) | (blocks[1:] < 0)  # a token without a block is a document of its own
    alike: Pattern = Documents((0, *(single.nonzero().flatten() + 1).tolist(), used))
    return found | (alike if rule.block_window is None else alike & SlidingWindow((rule.block_window - 1, -1)))


def _are_contiguous(blocks: Tensor, used: int, seqlen_k: int) -> bool:
    """Return whether each block is one run of tokens, which ends with the first `used` of `seqlen_k` keys."""
    if blocks.shape[1] < seqlen_k or bool((blocks[:, used:seqlen_k] >= 0).any()):
        return False
    starts = torch.nn.functional.pad(blocks[:, :used].diff() != 0, (1, 0), value=True) & (blocks[:, :used] >= 0)
    return all(len(row[at].unique()) == int(at.sum()) for row, at in zip(blocks[:, :used], starts, strict=True))


def _layout_of_run(run: MaskRun, device: torch.device, window: int | None) -> BlockLayout | None:
    if run.seqlen_k and run.causal and window is not None:
        block = BLOCK[device.type]
        return SlidingWindow(window).layout(run.seqlen_q, run.seqlen_k, block_size=block, device=device)
    return causal_layout(run.seqlen_q, run.seqlen_k, device, causal=run.causal) if run.seqlen_k else None


def _layout(
    pattern: Pattern, rule: MaskRule, seqlen_q: int, seqlen_k: int, shown: Tensor | None, device: torch.device
) -> BlockLayout:
    block = BLOCK[device.type]
    where = device if shown is None else torch.device("cpu")  # `hide_keys` reads the layout back
    causal = rule.causal and rule.blocks is None
    layout = pattern.layout(seqlen_q, seqlen_k, causal=causal, block_size=block, device=where)
    return layout if shown is None else hide_keys(layout, shown).to(device)


def _starts_of_chunks(rule: MaskRule, start: int, entry: int, ends: list[int]) -> set[int]:
    """Return the keys at which chunks start. In a pack, chunks count from the start of each document."""
    assert rule.chunk is not None, "the rule must have chunks"
    first = 0 if rule.chunk_start is None else int(rule.chunk_start[min(entry, len(rule.chunk_start) - 1)])
    found: set[int] = set()
    for begin, stop in pairwise(ends):
        position = begin + start
        if rule.documents is not None and rule.positions is not None:
            position = int(rule.positions[entry, begin])
        found |= set(range(begin + (first - position) % rule.chunk, stop, rule.chunk))
    return found - {0}
