# SPDX-License-Identifier: Apache-2.0
"""Find the length from which decoding by pages is faster than dense decoding, eagerly and as a captured graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from dynaxx.lab.machine import watch_others
from dynaxx.lab.models import longest_prompt
from dynaxx.lab.tune.crossover import REPEATS, LengthTiming, Turns, within
from dynaxx.layout.paging import PagedCache
from dynaxx.ops.decode import sparse_decode, summarize_pages
from dynaxx.selection.pages import PageBudget

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
GPU_LENGTHS = (*LENGTHS, 65536, 131072)
ROW = 16  # layers timed in a row on a GPU, as in a step
CPU_ROW = 3  # the same on a CPU, where a layer's time does not depend on the one before
NO_PLANS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]  # without cuDNN, which builds a plan per length
CACHES_READ = 2  # total size of the caches over that of the GPU's L2 cache


class _Layer(NamedTuple):
    q: Tensor  # (1, q_heads, 1, head_dim)
    k: Tensor  # (1, kv_heads, seqlen, head_dim)
    v: Tensor
    cache: PagedCache  # the same keys and values


@torch.no_grad()
def time_steps(
    model: Any,
    facts: Any,
    budgets: Sequence[PageBudget],
    page_size: int,
    captured: bool = False,
    lengths: Sequence[int] | None = None,
) -> list[LengthTiming]:
    """Time one decoding step's attention in all layers, dense (the faster of two forms of SDPA) and by their budgets.

    The function times a row of layers whose budgets are evenly spaced among all. On a GPU nothing synchronises between
    them, and together they read more than the L2 cache holds.

    Args:
        model: a causal language model of transformers.
        facts: the model's shape (`ModelFacts`).
        budgets: pages that each layer reads in a sparse step, with the same bound.
        page_size: tokens per page.
        captured: run the layers as one CUDA graph, without launches from Python. On a GPU only.
        lengths: cache lengths in tokens.
    """
    parameter = next(model.parameters())
    on_gpu = parameter.device.type == "cuda"
    lengths = lengths or within(GPU_LENGTHS if on_gpu else LENGTHS, longest_prompt(model))
    layers, bound = len(budgets), budgets[0].bound
    row = min(layers, ROW if on_gpu else CPU_ROW)
    some = [budgets[i * layers // row] for i in range(row)]
    found = []
    for seqlen in lengths:
        copies = [_layer(parameter, facts, bound, page_size, seqlen)]
        copies += [_layer(parameter, facts, bound, page_size, seqlen) for _ in range(_copies(copies[0], row) - 1)]
        steps = [_dense] * row, [_dense_as_rows] * row, [_by(budget) for budget in some]
        runs = [_in_a_row(each, copies) for each in steps]
        if captured:
            runs = [_captured(run) for run in runs]
        slowed, turns = watch_others(), Turns(runs, parameter.device)
        turns.take(REPEATS)
        *dense, sparse = turns.least()
        found.append(LengthTiming(seqlen, min(dense) / row * layers, sparse / row * layers, busy=slowed()))
    return found


def table(eager: Sequence[LengthTiming], captured: Sequence[LengthTiming]) -> list[str]:
    """Return a table of a step's attention in all layers, in milliseconds by length."""
    if not eager:
        return []
    lines = ["     keys   dense ms  sparse ms" + ("   captured: dense  sparse" if captured else "")]
    for i, timing in enumerate(eager):
        line = f"  {timing.seqlen:>7,} {timing.dense_seconds * 1e3:10.2f} {timing.sparse_seconds * 1e3:10.2f}"
        if captured:
            line += f" {captured[i].dense_seconds * 1e3:17.2f} {captured[i].sparse_seconds * 1e3:7.2f}"
        lines.append(line)
    return lines


def _layer(like: Tensor, facts: Any, bound: float, page_size: int, seqlen: int) -> _Layer:
    make = lambda heads, n: torch.randn(1, heads, n, facts.head_dim, dtype=like.dtype, device=like.device)
    q, k, v = make(facts.q_heads, 1), make(facts.kv_heads, seqlen), make(facts.kv_heads, seqlen)
    cache = PagedCache.contiguous(k.transpose(1, 2), v.transpose(1, 2), page_size=page_size)
    return _Layer(q, k, v, summarize_pages(cache, bound=bound))


def _copies(layer: _Layer, row: int) -> int:
    """Return the number of caches that a row reads in turn."""
    if layer.q.device.type != "cuda":
        return 1
    held = torch.cuda.get_device_properties(layer.q.device).L2_cache_size
    return min(row, max(1, -(-CACHES_READ * held // (2 * layer.k.nbytes))))


def _dense(layer: _Layer) -> Tensor:
    return scaled_dot_product_attention(layer.q, layer.k, layer.v, enable_gqa=True)


def _dense_as_rows(layer: _Layer) -> Tensor:
    """Attend densely with the heads of a group as rows of one head, since they see the same keys."""
    kv_heads, head_dim = layer.k.shape[1], layer.k.shape[3]
    return scaled_dot_product_attention(layer.q.view(1, kv_heads, -1, head_dim), layer.k, layer.v)


def _by(budget: PageBudget) -> Callable[[_Layer], Tensor]:
    return lambda layer: sparse_decode(layer.q.transpose(1, 2), summarize_pages(layer.cache, new_tokens=1), budget)


def _in_a_row(steps: Sequence[Callable[[_Layer], Tensor]], layers: Sequence[_Layer]) -> Callable[[], object]:
    ordered = list(zip(steps, cycle(layers), strict=False))
    return lambda: [step(layer) for step, layer in ordered]


def _captured(run: Callable[[], object]) -> Callable[[], object]:
    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
