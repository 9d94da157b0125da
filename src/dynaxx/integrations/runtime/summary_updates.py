# SPDX-License-Identifier: Apache-2.0
"""Updates of page summaries that the layers of a step leave to its last layer.

Every layer of a step updates the same pages of its own cache. If no layer reads its summaries in this step, the last
layer updates those of all in one launch, so that the others spend no time on the host.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from torch import Tensor

from dynaxx.integrations.runtime.paged import Pages, Part, Sequences
from dynaxx.kernels.device import interpreted
from dynaxx.kernels.registry import DECODE, SELECTION
from dynaxx.kernels.selection.contract import SelectionProblem
from dynaxx.layout.paging import PageSummaries
from dynaxx.ops.decode import summarize_pages
from dynaxx.ops.decode_checks import decode_problem

MAX_SETS = 16  # sets of waiting layers whose places are kept


class WaitingLayer(NamedTuple):
    """A layer whose summaries lack the keys of the current step."""

    pages: Pages
    summaries: PageSummaries


class JointLayers(NamedTuple):
    """Layers that one launch updates."""

    members: list[int]  # their numbers among the waiting layers
    offsets: Tensor | None  # see `layer_offsets`; None: one layer after the other


class JointUpdates:
    """The updates of layers that share a page table, and the places of their caches.

    Args:
        last: index of the layer that runs last.
    """

    def __init__(self, last: int) -> None:
        self.last = last
        self._joint: dict[tuple[int, ...], tuple[list[PageSummaries], list[JointLayers]]] = {}

    def run(self, waiting: Sequence[WaitingLayer], sequences: Sequences) -> None:
        """Update the summaries of all layers that wait."""
        parts = sequences.with_new_keys
        if not parts:  # a step of padding only
            return
        key = tuple([id(layer.summaries) for layer in waiting])
        found = self._joint.get(key)
        if found is None:
            if len(self._joint) >= MAX_SETS:
                self._joint.clear()
            joint = joined(waiting, parts[0][0])
            found = self._joint[key] = [layer.summaries for layer in waiting], joint  # keeps the objects of the key
        for part, new_tokens in parts:
            update(waiting, found[1], part, new_tokens)


def joined(waiting: Sequence[WaitingLayer], part: Part) -> list[JointLayers]:
    """Return the layers in groups that one launch updates."""
    caches = [part.cache(*layer) for layer in waiting]
    groups: dict[Hashable, list[int]] = {}
    for at, cache in enumerate(caches):
        groups.setdefault(cache.form, []).append(at)
    if DECODE.resolve(decode_problem(caches[0], None)) != "triton":
        return [JointLayers(members, None) for members in groups.values()]
    from dynaxx.kernels.decode.triton.pages import layer_offsets  # needs Triton

    return [JointLayers(members, layer_offsets([caches[at] for at in members])) for members in groups.values()]


def update(waiting: Sequence[WaitingLayer], joint: Sequence[JointLayers], part: Part, new_tokens: int) -> None:
    """Update the summaries of layers with the last keys of some sequences; `joint` is the result of `joined`."""
    for members, offsets in joint:
        if offsets is None:
            for at in members:
                summarize_pages(part.cache(*waiting[at]), new_tokens=new_tokens)
        else:
            from dynaxx.kernels.decode.triton.launch import summarize_layers  # needs Triton

            summarize_layers(part.cache(*waiting[members[0]]), offsets, new_tokens)


FEWEST = 1024  # tokens; for fewer, an engine's kernel, which has a program per token, is as fast


def write_chunk(pages: Pages, k: Tensor, v: Tensor, slots: Tensor) -> bool:
    """Store many tokens in their pages on a GPU. Return False, without doing anything, if the engine must store them.

    Args:
        pages: the cache; fp8 caches are left to the engine.
        k: (>= tokens, kv_heads, head_dim); tokens past the last slot are padding.
        v: (>= tokens, kv_heads, head_dim).
        slots: (tokens,) int64, page * page_size + place in the page; negative values are padding.
    """
    if len(slots) < FEWEST or not pages.read_in_place or not k.dtype == v.dtype == pages.memory.dtype:
        return False
    on_gpu = not SELECTION.reasons("triton", SelectionProblem(k.device)) if k.is_cuda else interpreted()
    if not on_gpu or k.stride(2) != 1 or v.stride(2) != 1:
        return False
    from dynaxx.kernels.decode.triton.write import write_pages  # needs Triton

    write_pages(k, v, slots, *pages.tokens_first())
    return True
