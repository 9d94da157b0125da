# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels of a policy before the first request.

Triton compiles a kernel for each combination of constants, dtypes, and sizes that are 1 or a multiple of 16. Lengths do
not matter, so a few calls on random tensors cover all combinations that requests can cause.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynaxx.core.build import processors
from dynaxx.integrations.runtime.counts import Counts
from dynaxx.integrations.runtime.deployed import Deployed
from dynaxx.integrations.runtime.in_place import attend_in_place, serves_in_place
from dynaxx.integrations.runtime.paged import FP8, Pages, Part, Sequences, Softmax
from dynaxx.integrations.runtime.paged_decode import every_page
from dynaxx.integrations.runtime.paged_layer import PagedLayer, Step
from dynaxx.integrations.runtime.routing import MAX_QUERIES
from dynaxx.integrations.runtime.summary_updates import FEWEST, JointUpdates, WaitingLayer, joined, update, write_chunk
from dynaxx.layout.paging import PagedCache, SequenceKeys
from dynaxx.ops.decode import sparse_decode, summarize_pages
from dynaxx.policy import LayerPlan
from dynaxx.policy.resolve import DecodePlan
from dynaxx.telemetry import Recorder

logger = logging.getLogger("dynaxx")
MAX_PROCESSES = 8  # processes that compile kernels side by side
SHORT_KEYS = 40  # keys per sequence in the decoding steps of the warm-up


class LayerShape(NamedTuple):
    """The properties of a layer, besides its rule, for which kernels are compiled."""

    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype  # dtype of queries
    device: torch.device
    softmax: Softmax


class Decoding(NamedTuple):
    """Further properties for which decoding kernels are compiled."""

    page_size: int
    page_count: int  # pages of the cache; only divisibility by 16 matters
    max_pages: int  # columns of the page table
    max_seqs: int  # largest number of sequences in a step
    fp8: bool


def powers_between(least: int, most: int) -> list[int]:
    """Return the powers of two in [least, most], and both ends."""
    powers = [1 << n for n in range(least.bit_length(), most.bit_length()) if 1 << n <= most]
    return sorted({min(least, most), *powers, most})


def prefill_shapes(least_q: int, sparse_from: int, chunk: int, longest: int) -> list[tuple[int, int]]:
    """Return (queries, keys) of prompts and chunks: doubling sizes, and sizes that are not multiples of 16."""
    shapes = set()
    for keys in powers_between(max(sparse_from, least_q), longest):
        for queries in powers_between(least_q, min(chunk, keys)):
            for q in (queries, queries - 1):
                for k in (keys, keys - 1):
                    if least_q <= q <= k and k >= sparse_from:
                        shapes.add((q, k))
    return sorted(shapes, reverse=True)  # the largest first, so that later ones reuse its memory


def run_prefill(plan: LayerPlan, shape: LayerShape, shapes: list[tuple[int, int]], *, in_place: bool = False) -> None:
    """Select and attend once for each (queries, keys), as a layer of the engine does.

    Args:
        plan: the layer's plan; its rules must not depend on token ids.
        shape: the layer's shape.
        shapes: the result of `prefill_shapes`.
        in_place: whether the engine's pages are whole numbers of blocks, which kernels read where they are.
    """
    if not shapes:
        return
    most_q, most_k = max(q for q, _ in shapes), max(k for _, k in shapes)
    draw = torch.Generator(shape.device).manual_seed(0)
    random = lambda *size: torch.empty(size, dtype=shape.dtype, device=shape.device).normal_(generator=draw)
    queries = random(1, most_q, shape.q_heads, shape.head_dim)
    ordered = lambda keys: random(shape.kv_heads, keys, 2 * shape.head_dim).transpose(0, 1)[None].chunk(2, dim=-1)
    placed = _placed(plan, shape, queries, most_k, *ordered(plan.block_size[1])) if in_place else None
    k, v = ordered(most_k) if placed is None else (placed.k, placed.v)
    out, kv_block, softmax = torch.empty_like(queries), plan.block_size[1], shape.softmax

    def run() -> None:
        for seqlen_q, seqlen_k in shapes:
            q, written = queries[:, :seqlen_q], out[:, :seqlen_q]
            keys, layout = SequenceKeys(k[:, :seqlen_k], v[:, :seqlen_k], seqlen_k), None
            if placed is not None and placed.places is not None:
                keys = SequenceKeys(k, v, seqlen_k, placed.places[: -(-seqlen_k // kv_block)])
                layout = plan.layout_in_place(q, keys, scale=softmax.scale)
            layout = plan.layout(q, keys.k, scale=softmax.scale) if layout is None else layout
            attend_in_place(q, keys, layout, written, **softmax.arguments)

    if plan.is_static:  # layouts of patterns are kept, with lists that a kernel computes; and their kernels are few
        run()
    else:
        _run_compiled(run, "prefill kernels", shape.device)


def run_write(shape: LayerShape, page_size: int) -> None:
    """Write the keys and values of a chunk, as a layer of the engine does before it attends."""
    heads = shape.q_heads + 2 * shape.kv_heads  # q, k and v of a token lie side by side
    both = torch.zeros(FEWEST, heads, shape.head_dim, dtype=shape.dtype, device=shape.device)
    _, k, v = both.split([shape.q_heads, shape.kv_heads, shape.kv_heads], dim=1)
    pages = Pages(both.new_zeros(2, shape.kv_heads, page_size, 2 * shape.head_dim))
    write_chunk(pages, k, v, torch.zeros(FEWEST, dtype=torch.int64, device=shape.device))


def run_chunks(layer: int, deployed: Deployed, shape: LayerShape, pages: Pages, shapes: list[tuple[int, int]]) -> None:
    """Run the first and the last chunk of a long prompt, as steps of the engine do.

    This loads what the first prompt would wait for besides its kernels: CUDA loads each of torch's kernels at its first
    launch, and the first measured call of telemetry takes pinned memory. Nothing is counted.

    Args:
        layer: index of a layer with a prefill rule.
        deployed: the policy, without a guard.
        shape: the layer's shape.
        pages: a small cache of the engine's kind; the first page is overwritten.
        shapes: the result of `prefill_shapes`.
    """
    if not shapes:
        return
    most_q, most_k = shapes[0]
    first = min(keys for queries, keys in shapes if queries == most_q)
    paged, updates = PagedLayer(layer, shape.softmax, Counts(Recorder())), JointUpdates(layer)
    q = torch.zeros(most_q, shape.q_heads, shape.head_dim, dtype=shape.dtype, device=shape.device)
    out, integers = torch.empty_like(q), dict[str, Any](dtype=torch.int32, device=shape.device)
    table = torch.zeros(1, -(-most_k // pages.page_size), **integers)
    for keys in (first, most_k):
        sequences = Sequences(table, torch.tensor([keys], **integers), [0, most_q], [keys])
        step = Step(sequences, deployed)
        step.updates = updates
        paged.sparse(q, pages, step, out)


def zero_pages(shape: LayerShape, page_size: int, count: int, *, fp8: bool) -> Pages:
    """Return a cache of `count` pages that holds zeros, in vLLM's form."""
    memory = (count, shape.kv_heads, page_size, 2 * shape.head_dim)
    if not fp8:
        return Pages(torch.zeros(memory, dtype=shape.dtype, device=shape.device))
    one = torch.ones((), device=shape.device, dtype=torch.float32)
    return Pages(torch.zeros(memory, dtype=FP8, device=shape.device), one, one)


def _placed(plan: LayerPlan, shape: LayerShape, q: Tensor, seqlen_k: int, k: Tensor, v: Tensor) -> SequenceKeys | None:
    """Return keys whose blocks all lie in one place, k and v; None if the plan needs keys in order."""
    places = torch.zeros(-(-seqlen_k // plan.block_size[1]), dtype=torch.int32, device=shape.device)
    keys = SequenceKeys(k, v, seqlen_k, places)
    if not serves_in_place(q, keys, plan.block_size, shape.softmax.softcap):
        return None
    return None if plan.layout_in_place(q, keys, scale=shape.softmax.scale) is None else keys


def run_decode(plan: DecodePlan, shape: LayerShape, decoding: Decoding) -> None:
    """Run decoding steps of every padded shape, over a small cache of the same kind; each has kernels of its own."""
    shapes = decode_shapes(decoding.max_seqs)

    def run() -> None:
        for each in shapes:
            _run_decoding_step(plan, shape, decoding, each)

    _run_compiled(run, "decoding kernels", shape.device)


def _run_compiled(run: Callable[[], None], what: str, device: torch.device) -> None:
    """Call a function that launches kernels. On a GPU, processes compile them side by side before."""
    if device.type == "cuda":
        from dynaxx.kernels.runtime.compile_ahead import compile_ahead  # needs Triton
        from dynaxx.kernels.runtime.launch_list import prepare_lists

        prepare_lists()
        try:
            compile_ahead(run, min(MAX_PROCESSES, processors()))
        except Exception as error:  # they are compiled one by one then
            logger.warning("%s were not compiled side by side: %s", what, error, exc_info=error)
    run()


def _run_decoding_step(plan: DecodePlan, shape: LayerShape, decoding: Decoding, size: tuple[int, int]) -> None:
    """Run a step of `size`, (sequences, queries per sequence)."""
    batch, queries = size
    pages = 16 if decoding.page_count % 16 == 0 else 17
    cached = zero_pages(shape, decoding.page_size, pages, fp8=decoding.fp8)
    integers: dict[str, Any] = {"dtype": torch.int32, "device": shape.device}
    table = torch.zeros(batch, decoding.max_pages, **integers)
    used = torch.full((batch,), min(SHORT_KEYS, decoding.page_size), **integers)
    q = torch.zeros(batch, queries, shape.q_heads, shape.head_dim, dtype=shape.dtype, device=shape.device)
    chooses = not plan.budget.reads_everything
    if queries == 1 or not chooses:
        sparse_decode(q, cached.cache(used, table), **shape.softmax.arguments)
    if chooses:
        smaller = cached.divided(plan.page_size)
        summaries = summarize_pages(every_page(smaller), bound=plan.budget.bound).summaries
        part = Part(used, Sequences(table, used, [], []).over(smaller).page_table, used)
        chosen: PagedCache = part.cache(smaller, summaries)
        summarize_pages(chosen, new_tokens=queries)
        if summaries is not None:
            layers = [WaitingLayer(smaller, summaries)]
            update(layers, joined(layers, part), part, queries)
        sparse_decode(q, chosen, plan.budget, **shape.softmax.arguments)


def decode_shapes(most: int) -> list[tuple[int, int]]:
    """Return (sequences, queries per sequence) of decoding steps.

    They cover all padded batches of one query, and the last chunks of prompts. A last chunk may be short enough to run
    as a decoding step; a step has one or two of equal length.
    """
    return [(batch, 1) for batch in padded_batches(most)] + [
        (batch, queries) for queries in range(2, MAX_QUERIES) for batch in padded_batches(min(most, 2))
    ]


def padded_batches(most: int) -> list[int]:
    """Return the batch sizes that decoding steps are padded to: powers of two up to the first that holds `most`."""
    return [1 << n for n in range((most - 1).bit_length() + 1)]


@contextmanager
def compiled_kernels() -> Iterator[list[str]]:
    """Collect the names of the kernels that Triton compiles, or loads from its cache on disk, within the block."""
    names: list[str] = []
    try:
        from triton import knobs
    except ImportError:
        yield names
        return
    before = knobs.runtime.jit_post_compile_hook

    def hook(**event: Any) -> Any:
        names.append(str(getattr(event.get("fn"), "name", "")))
        return None if before is None else before(**event)

    knobs.runtime.jit_post_compile_hook = hook
    try:
        yield names
    finally:
        knobs.runtime.jit_post_compile_hook = before
