# SPDX-License-Identifier: Apache-2.0
"""Read the rule of a mask from transformers' mask function instead of from the mask.

transformers describes a mask by a function of (batch, head, query, key) that combines a few building blocks: causal,
sliding window, chunks, packed documents. `read_rule` recognizes these by their code objects. A function with any other
part has no rule, and its mask is computed and read as a tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("dynaxx")

MaskFunction = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class MaskRule:
    """The keys that a query sees, without padding. Positions count from the first token of the cache.

    Attributes:
        causal: hide keys after the query.
        window: show keys with query - key < window; None means no limit.
        after: show keys with key - query <= after; None means no limit.
        chunk: show keys of the query's chunk of this many tokens; None means no chunks.
        chunk_start: (batch,) position of the first chunk.
        documents: (batch, seqlen) the document of each packed token; None for one document.
        positions: (batch, seqlen) positions within the documents.
        blocks: (batch, seqlen_k or more) the block of each token, such as an image, -1 for none. Tokens of one block
            see each other, whatever the other fields hide,
        block_window: if query - key < block_window; None means no limit.
    """

    causal: bool = False
    window: int | None = None
    after: int | None = None
    chunk: int | None = None
    chunk_start: Tensor | None = None
    documents: Tensor | None = None
    positions: Tensor | None = None
    blocks: Tensor | None = None
    block_window: int | None = None

    def both(self, other: MaskRule) -> MaskRule | None:
        """Return the rule for the pairs that both rules show, or None if no rule expresses it."""
        if any(getattr(self, name) is not None and getattr(other, name) is not None for name in ("chunk", "documents")):
            return None
        if self.blocks is not None or other.blocks is not None:
            return self._with_window(other) if other.blocks is None else other._with_window(self)
        one = self if self.chunk is not None else other
        packed = self if self.documents is not None else other
        return MaskRule(
            causal=self.causal or other.causal,
            window=_least(self.window, other.window),
            after=_least(self.after, other.after),
            chunk=one.chunk,
            chunk_start=one.chunk_start,
            documents=packed.documents,
            positions=other.positions if self.positions is None else self.positions,
        )

    def _with_window(self, other: MaskRule) -> MaskRule | None:
        """Return this rule with blocks in the window of another rule; None if that hides keys in another way."""
        others = (other.after, other.chunk, other.documents, other.positions, other.blocks)
        if other.causal or any(each is not None for each in others):
            return None
        window, block_window = _least(self.window, other.window), _least(self.block_window, other.window)
        return replace(self, window=window, block_window=block_window)


def _least(one: int | None, other: int | None) -> int | None:
    return min((limit for limit in (one, other) if limit is not None), default=None)


def read_rule(function: MaskFunction) -> MaskRule | None:
    """Return the rule of a mask function of transformers, or None if it has unknown parts."""
    _, reader = _building_blocks().get(id(getattr(function, "__code__", None)), (None, None))
    return None if reader is None else reader(_closure(function))


def _closure(function: MaskFunction) -> dict[str, Any]:
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def _read_all(free: dict[str, Any]) -> MaskRule | None:
    found: MaskRule | None = MaskRule()
    for part in free["mask_functions"]:
        rule = read_rule(part)
        found = None if rule is None or found is None else found.both(rule)
    return found


def _read_any(free: dict[str, Any]) -> MaskRule | None:
    from transformers.masking_utils import blockwise_overlay

    rule, *overlays = free["mask_functions"]
    base, known = read_rule(rule), blockwise_overlay(_IDS).__code__
    if base is None or base.documents is not None or base.positions is not None or base.blocks is not None:
        return None
    if [getattr(each, "__code__", None) for each in overlays] != [known]:
        return None
    return replace(base, blocks=_closure(overlays[0])["block_sequence_ids"])


def _read_remapped(free: dict[str, Any]) -> MaskRule | None:
    rule = read_rule(free["mask_function"])
    return (
        None
        if rule is None or rule.documents is not None or rule.blocks is not None
        else replace(rule, positions=free["position_ids"])
    )


def _read_window(free: dict[str, Any]) -> MaskRule | None:
    window = free["sliding_window"]
    return MaskRule(window=window) if isinstance(window, int) and window > 0 else None


def _read_both_sides(free: dict[str, Any]) -> MaskRule | None:
    window = free["sliding_window"]
    return MaskRule(window=window + 1, after=window) if isinstance(window, int) and window >= 0 else None


def _read_chunk(free: dict[str, Any]) -> MaskRule | None:
    return MaskRule(chunk=free["chunk_size"], chunk_start=free["left_padding"])


Reader = Callable[[dict[str, Any]], MaskRule | None]


@cache
def _building_blocks() -> dict[int, tuple[CodeType, Reader]]:
    """Return each building block of transformers with its reader, by the id of its code, which takes long to hash.

    Building blocks that the installed transformers lacks, or that show other pairs than in the tested versions, are
    excluded; their masks are read as tensors.
    """
    from transformers import masking_utils as made

    found: dict[int, tuple[CodeType, Reader]] = {}
    for name, (make, reader, shown) in _EXAMPLES.items():
        try:
            function = make(made)
            acts = _shows(function, shown)
        except AttributeError:  # this version has no such block, so no mask has it
            continue
        except Exception as error:
            logger.warning("transformers' %s cannot be read, so its masks are computed: %s", name, error)
            continue
        if acts:
            found[id(function.__code__)] = function.__code__, reader
        else:
            logger.warning("transformers' %s differs from tested versions, so its masks are computed", name)
    return found


_Q, _K = torch.arange(9, device="cpu")[:, None] + 3, torch.arange(12, device="cpu")[None]  # positions of a small grid
_IDS = torch.tensor([[0] * 5 + [1] * 7], dtype=torch.int64, device="cpu")
_START = torch.tensor([2], dtype=torch.int64, device="cpu")
_EXAMPLES: dict[str, tuple[Callable[[Any], MaskFunction], Reader, Tensor]] = {
    "causal_mask_function": (lambda made: made.causal_mask_function, lambda free: MaskRule(causal=True), _K <= _Q),
    "bidirectional_mask_function": (
        lambda made: made.bidirectional_mask_function,
        lambda free: MaskRule(),
        (_Q >= 0) & (_K >= 0),
    ),
    "and_masks": (
        lambda made: made.and_masks(made.causal_mask_function, made.sliding_window_overlay(4)),
        _read_all,
        (_K <= _Q) & (_Q - _K < 4),
    ),
    "or_masks": (
        lambda made: made.or_masks(made.causal_mask_function, made.blockwise_overlay(_IDS - 1)),
        _read_any,
        (_K <= _Q) | ((_Q >= 5) & (_K >= 5)),
    ),
    "sliding_window_overlay": (lambda made: made.sliding_window_overlay(4), _read_window, _Q - _K < 4),
    "sliding_window_bidirectional_overlay": (
        lambda made: made.sliding_window_bidirectional_overlay(3),
        _read_both_sides,
        (_Q - _K).abs() <= 3,
    ),
    "chunked_overlay": (
        lambda made: made.chunked_overlay(4, _START),
        _read_chunk,
        (_K - 2) // 4 == (_Q - 2) // 4,
    ),
    "packed_sequence_mask_function": (
        lambda made: made.packed_sequence_mask_function(_IDS),
        lambda free: MaskRule(documents=free["packed_sequence_mask"]),
        _IDS[0][_Q] == _IDS[0][_K],
    ),
    "remap_positions_for_packed_sequence": (
        lambda made: made.remap_positions_for_packed_sequence(made.causal_mask_function, _IDS.cumsum(1)),
        _read_remapped,
        _IDS.cumsum(1)[0][_K] <= _IDS.cumsum(1)[0][_Q],
    ),
}


def _shows(function: MaskFunction, want: Tensor) -> bool:
    """Return whether a mask function shows exactly these pairs of the small grid."""
    zero = torch.zeros((), dtype=torch.long, device="cpu")
    return bool((torch.as_tensor(function(zero, zero, _Q, _K), device="cpu").expand(9, 12) == want.expand(9, 12)).all())
