# SPDX-License-Identifier: Apache-2.0
"""The loss of an indexer on a GPU: `kernels.tokens.contract.IndexLossKernels`.

The gradient in the scores is stored for a strip of queries at a time, at most `STRIP_BYTES` of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynaxx.kernels.device import gpu_of, padded, power_of_two
from dynaxx.kernels.runtime.arguments import packed_strides_of, unit_stride
from dynaxx.layout.host import moved_together, on_host
from dynaxx.trained.tokens.kernels.contract import IndexLossCall
from dynaxx.trained.tokens.kernels.gpu.plan import QueryPlaces, query_places, query_tiles
from dynaxx.trained.tokens.kernels.triton.divergence import (
    _attention_lse_kernel,
    _divergence_kernel,
    _index_dk_kernel,
    _index_dq_kernel,
    _index_lse_kernel,
)
from dynaxx.trained.tokens.kernels.triton.divergence_chosen import _chosen_divergence_kernel, _chosen_scores_kernel
from dynaxx.trained.tokens.spans import TokenSpans

__all__ = ["index_loss"]

LOG2E = 1.4426950408889634
STRIP_BYTES = 256 << 20
MAX_TILES = 65535  # most tiles in the second dimension of a grid
BLOCK_Q, BLOCK_K = 64, 64
MORE_KEYS = 2  # times BLOCK_K: a tile's keys in 16 bits where the loss is computed
WHOLE_ROW = 256  # bytes of q and k up to which a tile holds whole rows; wider ones go in steps of 64 columns
HEADS_PER_PART = 4  # whose gradients of keys one program adds up
ROWS, BLOCK_S = 16, 64  # heads and chosen keys at once
# On an H200 the best of several for head_dim 64 and 128, by up to 1.4x.
LSE, INDEX_LSE, TILES, DQ, DK, CHOSEN = ({"num_warps": 4, "num_stages": stages} for stages in (3, 2, 2, 3, 3, 2))
ONE_STAGE = {"num_stages": 1}  # in fp32, which takes much shared memory


class Places(NamedTuple):
    """The places of queries and keys in the packed sequences, on a device."""

    queries: QueryPlaces  # in tiles of `BLOCK_Q`
    key_tiles: Tensor  # (tiles of keys, 6) int32: row and number in its sequence of the first key, keys; first and
    # last + 1 tile of its sequence's queries, and the position of the first of them
    starts: tuple[int, ...]  # (tiles + 1,) first query of each tile


class Strip(NamedTuple):
    """Neighbouring tiles of queries, and their rows."""

    first_tile: int
    stop_tile: int
    first_row: int
    stop_row: int


@dataclass(frozen=True)
class Arguments:
    """The inputs of a call, as arguments of kernels."""

    attention: dict[str, Any]  # q, k and what belongs to them
    indexer: dict[str, Any]  # index q, k and weights, and what belongs to them
    where: dict[str, Any]  # tiles of queries
    places: Places
    spans: TokenSpans
    columns: int  # keys of the longest sequence, filled up to whole tiles
    needs_grad: bool
    precisions: tuple[str, str]  # precisions of the products of attention and of the indexer
    stages: tuple[dict[str, int], dict[str, int]]  # what replaces the options of kernels, of the same two


def index_loss(call: IndexLossCall) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the divergence and the chosen share of attention, both summed over queries, and gradients."""
    q = call.q
    most, step = max((d - c for c, d in pairwise(call.spans.ends_k)), default=0), MORE_KEYS * BLOCK_K
    columns = -(-most // step) * step
    new = lambda *shape: torch.zeros(shape, device=q.device, dtype=torch.float32)
    if not (q.shape[0] and columns):
        return new(), new(), [new(*x.shape) for x in call[:3]] if call.needs_grad else []
    parts = -(-call.index_q.shape[1] // HEADS_PER_PART)
    shapes = (call.index_q.shape, (parts, *call.index_k.shape), call.weights.shape)
    grads = [new(*shape) for shape in shapes] if call.needs_grad else []
    given = _arguments(call, columns)
    lse = torch.empty(q.shape[1], q.shape[0], device=q.device, dtype=torch.float32)
    _attention_lse_kernel[(len(given.places.queries.tiles), q.shape[1])](
        **given.attention,
        **given.where,
        p_lse=lse,
        BLOCK_Q=BLOCK_Q,
        BLOCK_K=BLOCK_K,
        PRECISION=given.precisions[0],
        **(LSE | given.stages[0]),
    )
    if call.block_indices is None:
        return _over_all_keys(given, lse, grads)
    return _over_chosen_keys(given, lse, call.block_indices.to(torch.int32).contiguous(), grads)


def _arguments(call: IndexLossCall, columns: int) -> Arguments:
    (q, k), (index_q, index_k) = _of_one_dtype(call.q, call.k), _of_one_dtype(call.index_q, call.index_k)
    q, k = unit_stride(q), unit_stride(k)
    attention = {
        "p_q": q,
        "p_k": k,
        "queries": q.shape[0],
        "group_size": q.shape[1] // k.shape[1],
        "scale": call.scale * LOG2E,
        "q_strides": packed_strides_of(q),
        "k_strides": packed_strides_of(k),
        "D": q.shape[2],
        "BLOCK_D": padded(q.shape[2]) if q.shape[2] * q.itemsize <= WHOLE_ROW else 64,
    }
    indexer = {
        "p_index_q": index_q.contiguous(),
        "p_index_k": index_k.contiguous(),
        "p_weights": call.weights.float().contiguous(),
        "index_heads": index_q.shape[1],
        "index_scale": call.index_scale * LOG2E,
        "DI": index_q.shape[2],
        "BLOCK_DI": padded(index_q.shape[2]),
    }
    places = _places(call.spans, q.device)
    queries = places.queries
    where = {"p_tiles": queries.tiles, "p_position": queries.position, "p_first_key": queries.first_key}
    precisions, stages = (_precision(q), _precision(index_q)), (_stages(q), _stages(index_q))
    return Arguments(attention, indexer, where, places, call.spans, columns, call.needs_grad, precisions, stages)


def _over_all_keys(call: Arguments, lse: Tensor, grads: list[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    block_k = BLOCK_K if ONE_STAGE in call.stages else MORE_KEYS * BLOCK_K
    tile: dict[str, Any] = {"BLOCK_Q": BLOCK_Q, "BLOCK_K": block_k}
    index_lse, tiles_of_keys = torch.empty_like(lse[0]), call.columns // block_k
    _index_lse_kernel[(len(call.places.queries.tiles),)](
        **call.indexer,
        **call.where,
        **tile,
        p_index_lse=index_lse,
        PRECISION=call.precisions[1],
        **(INDEX_LSE | call.stages[1]),
    )
    loss = lse.new_empty(len(call.places.queries.tiles), tiles_of_keys)
    dtype = call.indexer["p_index_q"].dtype
    for strip in _strips(call.places, call.columns * dtype.itemsize if call.needs_grad else 0):
        rows = strip.stop_row - strip.first_row if call.needs_grad else 0
        ds = torch.empty(rows, call.columns, dtype=dtype, device=lse.device)
        _divergence_kernel[(tiles_of_keys, strip.stop_tile - strip.first_tile)](
            **call.attention,
            **call.indexer,
            **call.where,
            **tile,
            p_lse=lse,
            p_index_lse=index_lse,
            p_ds=ds,
            p_loss=loss,
            first_tile=strip.first_tile,
            first_row=strip.first_row,
            columns=call.columns,
            heads=len(lse),
            STORE=call.needs_grad,
            PRECISION=call.precisions[0],
            INDEX_PRECISION=call.precisions[1],
            **(TILES | call.stages[0] | call.stages[1]),
        )
        if call.needs_grad:
            _write_gradients(call, ds, strip, grads)
    return loss.sum(), (call.places.queries.position >= 0).sum(dtype=torch.float32), _added(grads)


def _over_chosen_keys(
    call: Arguments, lse: Tensor, blocks: Tensor, grads: list[Tensor]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    slots, grain = blocks.shape[1], call.spans.block_size
    loss, mass = (torch.zeros_like(lse[0]) for _ in range(2))
    dtype, width = call.indexer["p_index_q"].dtype, slots * grain
    for strip in _strips(call.places, max(call.columns * dtype.itemsize, 8 * width)):
        rows = strip.stop_row - strip.first_row
        target, scores = (lse.new_empty(rows, width) for _ in range(2))
        ds = torch.zeros(rows if call.needs_grad else 0, call.columns, dtype=dtype, device=lse.device)
        shared: dict[str, Any] = {
            "p_target": target,
            "p_scores": scores,
            "p_blocks": blocks,
            "p_position": call.places.queries.position,
            "first_row": strip.first_row,
            "slots": slots,
            "GRAIN": grain,
        }
        if width:
            _chosen_scores_kernel[(rows, -(-width // BLOCK_S))](
                **call.attention,
                **call.indexer,
                **shared,
                p_lse=lse,
                p_first_key=call.places.queries.first_key,
                heads=len(lse),
                ROWS=ROWS,
                BLOCK_S=BLOCK_S,
                PRECISION=call.precisions[0],
                INDEX_PRECISION=call.precisions[1],
                **(CHOSEN | call.stages[0] | call.stages[1]),
            )
            _chosen_divergence_kernel[(rows,)](
                **shared,
                p_ds=ds,
                p_loss=loss,
                p_mass=mass,
                columns=call.columns,
                STORE=call.needs_grad,
                BLOCK_S=min(1024, power_of_two(width)),
            )
        if call.needs_grad:
            _write_gradients(call, ds, strip, grads)
    return loss.sum(), mass.sum(), _added(grads)


def _write_gradients(call: Arguments, ds: Tensor, strip: Strip, grads: list[Tensor]) -> None:
    """Write what a strip adds to the gradients; that of keys is one buffer per part of the heads."""
    dq, dk, dweights = grads
    heads, keys = call.indexer["index_heads"], call.indexer["p_index_k"].shape[0]
    shared: dict[str, Any] = {
        **{name: x for name, x in call.indexer.items() if name != "index_scale"},
        "p_ds": ds,
        "first_tile": strip.first_tile,
        "first_row": strip.first_row,
        "columns": call.columns,
        "index_scale": call.indexer["index_scale"] / LOG2E,
        "BLOCK_Q": BLOCK_Q,
        "BLOCK_K": BLOCK_K,
        "PRECISION": call.precisions[1],
    }
    _index_dq_kernel[(strip.stop_tile - strip.first_tile, heads)](
        **shared, **call.where, p_dq=dq, p_dweights=dweights, **(DQ | call.stages[1])
    )
    _index_dk_kernel[(len(call.places.key_tiles), len(dk))](
        **shared,
        p_tiles=call.places.queries.tiles,
        p_key_tiles=call.places.key_tiles,
        p_dk=dk,
        stop_tile=strip.stop_tile,
        keys=keys,
        heads_here=-(-heads // len(dk)),
        **(DK | call.stages[1]),
    )


def _strips(places: Places, row_bytes: int) -> list[Strip]:
    """Cut the tiles of queries into strips whose rows take at most `STRIP_BYTES`, or one tile each."""
    tiles = len(places.starts) - 1
    step = max(1, min(tiles, MAX_TILES, STRIP_BYTES // max(1, row_bytes * BLOCK_Q)))
    ends = [*range(0, tiles, step), tiles]
    return [Strip(a, b, places.starts[a], places.starts[b]) for a, b in pairwise(ends)]


@lru_cache(maxsize=64)
def _places(spans: TokenSpans, device: torch.device) -> Places:
    """Return where queries and keys are; kept, so that a call of known lengths copies nothing to the device."""
    key_tiles = moved_together([_key_tiles(spans).to(torch.int32)], device)[0]
    starts = query_tiles(spans, BLOCK_Q)[:, 0].tolist()
    return Places(query_places(spans, BLOCK_Q, device), key_tiles, (*starts, spans.ends_q[-1]))


@on_host
def _key_tiles(spans: TokenSpans) -> Tensor:
    parts, tile = [torch.zeros(0, 6, dtype=torch.int64)], 0
    for (a, b), (c, d) in zip(pairwise(spans.ends_q), pairwise(spans.ends_k), strict=True):
        first, stop = torch.arange(0, d - c, BLOCK_K), tile + -(-(b - a) // BLOCK_Q)
        same = torch.tensor([tile, stop, d - c - (b - a)], dtype=torch.int64).expand(len(first), 3)
        parts.append(torch.cat([torch.stack([c + first, first, (d - c - first).clamp(max=BLOCK_K)], 1), same], 1))
        tile = stop
    return torch.cat(parts)


def _of_one_dtype(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return (q, k) if q.dtype == k.dtype else (q.float(), k.float())


def _precision(x: Tensor) -> str:
    """Return how Triton multiplies x: fp32 as three products of tensor cores, which keep its precision."""
    return gpu_of(x.device).input_precision(True) if x.dtype == torch.float32 and x.is_cuda else "ieee"


def _stages(x: Tensor) -> dict[str, int]:
    """Return the options that fp32 replaces."""
    return ONE_STAGE if x.dtype == torch.float32 else {}


def _added(grads: list[Tensor]) -> list[Tensor]:
    """Add the parts of the gradient of keys."""
    return [grads[0], grads[1].sum(0), grads[2]] if grads else []
