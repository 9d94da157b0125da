# SPDX-License-Identifier: Apache-2.0
"""Random problems covering what users may ask of the library, with visible pairs taken from the rules' definitions.

All tensors of a problem are (batch, seqlen, heads, head_dim): packed sequences and requests of mixed length follow one
another in a batch of one. Legend: N queries, M keys, H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.kernels.attention.contract import AttentionProblem
from dynaxx.kernels.bias import bias_of_pairs, table_of
from dynaxx.layout import BlockLayout
from dynaxx.layout.packed import pack_layouts
from dynaxx.ops import merge_states, sparse_attention
from dynaxx.ops.buckets import Bucket, attend_in_buckets
from dynaxx.ops.position_bias import bias_by_distance
from dynaxx.patterns import Documents
from dynaxx.selection import select_blocks
from dynaxx.selection.packed import select_packed_blocks
from dynaxx.testing.drawing import Draw
from dynaxx.testing.oracle import AttendAll, oracle_attention


@dataclass(frozen=True)
class Problem:
    """A random problem that can be given to any backend."""

    inputs: dict[str, Tensor]  # q, k, v, and sinks if there are any
    attend: AttendAll  # (*inputs, backend=) -> (out, lse or None), on the inputs' device
    exact: AttendAll  # the oracle over the visible pairs
    eager: AttendAll | None  # the same math done eagerly, if it is more than one attention call
    visible: Tensor  # bool, broadcastable to (batch, q_heads, N, M)
    scale: float | None
    asks: AttentionProblem
    traits: dict[str, list[str]]  # what the problem covers: {"pattern": ["Sink", "Causal"], ...}
    label: str
    bias: Tensor | None = None  # added to the scores, (batch, q_heads, N, M)


@typed
def random_problem(seed: int, device: torch.device | str = "cpu", **fixed: Any) -> Problem:
    """Draw a random problem; equal seeds give equal problems on every device.

    Args:
        seed: seed of the generator.
        device: device of the tensors.
        **fixed: fields of `Draw` to set instead of drawing them, such as settings that a kernel is compiled for.

    Raises:
        AssertionError: a layout shows other pairs than its rule.
    """
    draw = Draw.of(seed, torch.device(device), **fixed)
    kinds: dict[Callable[[Draw], Problem], int] = {_batch: 10, _packed: 7, _merged: 2, _buckets: 2}
    (make,) = draw.rng.choices(list(kinds), list(kinds.values()))
    draw.note("call", make.__name__.removeprefix("_"))
    return make(draw)


def _batch(draw: Draw) -> Problem:
    """Draw a batch with one layout from any source."""
    batch, seqlen_q, seqlen_k = draw.lengths()
    inputs = draw.tensors(batch, seqlen_q, seqlen_k)
    layout, visible = _any_layout(draw, inputs["q"], inputs["k"])
    options = draw.score_options(inputs)
    given: dict[str, Any] = {**options, "position_bias": draw.bias(batch), "return_lse": True}
    table = table_of(bias_by_distance(given["position_bias"], inputs["q"], inputs["k"], layout), seqlen_q, seqlen_k)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *, backend: str) -> tuple[Tensor, Tensor]:
        return sparse_attention(q, k, v, layout.to(q.device), sinks=sinks, **given, backend=backend)

    return _problem(draw, inputs, visible, attend, options, bias=bias_of_pairs(table, seqlen_q))


def _any_layout(draw: Draw, q: Tensor, k: Tensor) -> tuple[BlockLayout, Tensor]:
    """Draw a layout for a batch, and the pairs that it must show."""
    makers = {"rule": 12, "rule per head": 4, "dense mask": 2, "block indices": 2, "BlockMask": 1}
    (source,) = draw.rng.choices(list(makers), list(makers.values()))
    draw.note("layout", source)
    heads, shape = q.shape[2], (q.shape[1], k.shape[1])
    if source == "rule":
        rule = draw.rule(shape[1])
        layout, visible = select_blocks(q, k, rule, **draw.blocks), draw.visible(rule, q, k)
    elif source == "rule per head":
        rules = [draw.pattern(shape[1]) for _ in range(heads)]
        layout = BlockLayout.stack_heads([rule.layout(*shape, **draw.blocks, device=q.device) for rule in rules])
        visible = torch.cat([draw.visible(rule, q, k) for rule in rules], dim=1)
    elif source == "dense mask":
        visible = draw.dense_mask(q.shape[0], heads, *shape)
        layout = BlockLayout.from_dense(visible, block_size=draw.block_size)
    elif source == "block indices":
        indices, visible = draw.block_indices(q.shape[0], heads, *shape)
        layout = BlockLayout.from_block_indices(indices, *shape, **draw.blocks)
    else:
        from dynaxx.layout import from_block_mask, to_block_mask

        rule = draw.pattern(shape[1])
        visible = draw.visible(rule, q, k)
        layout = rule.layout(*shape, **draw.blocks, device=q.device)
        layout = from_block_mask(to_block_mask(layout)) if min(shape) else layout
    draw.check(layout, visible)
    return layout, visible


def _packed(draw: Draw) -> Problem:
    """Draw ragged sequences on one axis, with one rule for all or one rule each."""
    ends_q, ends_k = draw.ragged()
    inputs = draw.tensors(1, ends_q[-1], ends_k[-1])
    q, k = inputs["q"], inputs["k"]
    pieces = [(slice(*ends_q[s : s + 2]), slice(*ends_k[s : s + 2])) for s in range(len(ends_q) - 1)]
    from_data = draw.rng.random() < 0.8 * draw.from_data
    if draw.rng.random() < 0.6:
        draw.note("layout", "packed, one rule")
        rules = [draw.rule(max(e.stop - e.start for _, e in pieces), from_data, without=Documents)] * len(pieces)
        layout = select_packed_blocks(q[0], k[0], rules[0], ends_q, ends_k, **draw.blocks)
    else:
        draw.note("layout", "packed, rule per sequence")
        rules = [draw.rule(e.stop - e.start, from_data) for _, e in pieces]
        alone = [
            select_blocks(q[:, rows], k[:, cols], rule, **draw.blocks)
            for rule, (rows, cols) in zip(rules, pieces, strict=True)
        ]
        layout = pack_layouts(alone, ends_q, ends_k, block_size=draw.block_size)
    visible = draw.block_diagonal(rules, pieces, q, k)
    draw.check(layout, visible)
    options = draw.score_options(inputs)
    ends: dict[str, Any] = {
        "cu_seqlens_q": torch.tensor(ends_q, dtype=torch.int64, device="cpu"),
        "cu_seqlens_k": ends_k,
    }
    ends = ends if draw.rng.random() < 0.7 else {}

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *, backend: str) -> tuple[Tensor, Tensor]:
        out, lse = sparse_attention(
            q[0], k[0], v[0], layout.to(q.device), **ends, sinks=sinks, **options, return_lse=True, backend=backend
        )
        return out[None], lse[None]

    return _problem(draw, inputs, visible, attend, options)


def _merged(draw: Draw) -> Problem:
    """Draw attention over disjoint sets of pairs, merged by lse."""
    batch, seqlen_q, seqlen_k = draw.lengths()
    inputs = draw.tensors(batch, seqlen_q, seqlen_k)
    layout, visible = _any_layout(draw, inputs["q"], inputs["k"])
    parts = draw.rng.randint(1, 3)
    of = torch.randint(
        parts, (seqlen_q if draw.rng.random() < 0.5 else 1, seqlen_k), generator=draw.generator, device="cpu"
    )
    masks = [visible & (of == part).to(draw.device) for part in range(parts)]
    layouts = [layout] if parts == 1 else [BlockLayout.from_dense(m, block_size=draw.block_size) for m in masks]
    options = draw.score_options({})

    def attend(q: Tensor, k: Tensor, v: Tensor, *, backend: str) -> tuple[Tensor, Tensor]:
        shared: dict[str, Any] = {**options, "return_lse": True, "backend": backend}
        return merge_states([sparse_attention(q, k, v, layout.to(q.device), **shared) for layout in layouts])

    def eager(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return merge_states([oracle_attention(q, k, v, mask, **options) for mask in masks])

    return _problem(draw, inputs, visible, attend, options, eager)


def _buckets(draw: Draw) -> Problem:
    """Draw requests of mixed length, each with the rule of its bucket."""
    ends_q, ends_k = draw.ragged()
    inputs = draw.tensors(1, ends_q[-1], ends_k[-1])
    pieces = [(slice(*ends_q[s : s + 2]), slice(*ends_k[s : s + 2])) for s in range(len(ends_q) - 1)]
    limits = [*sorted(draw.rng.sample((1, 20, 50, 70), draw.rng.randint(0, 2))), None]
    buckets = [Bucket(limit, draw.rule(1, without=Documents)) for limit in limits]
    holds = lambda bucket, keys: bucket.max_seqlen is None or keys <= bucket.max_seqlen
    rules = [next(b.rule for b in buckets if holds(b, cols.stop - cols.start)) for _, cols in pieces]
    options = draw.score_options(inputs)
    visible = draw.block_diagonal(rules, pieces, inputs["q"], inputs["k"], options["scale"])

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *, backend: str) -> tuple[Tensor, None]:
        requests = [(q[0, rows], k[0, cols], v[0, cols]) for rows, cols in pieces]
        outs = attend_in_buckets(requests, buckets, **draw.blocks, sinks=sinks, **options, backend=backend)
        return torch.cat(outs)[None], None

    return _problem(draw, inputs, visible, attend, options, with_lse=False)


def _problem(
    draw: Draw,
    inputs: dict[str, Tensor],
    visible: Tensor,
    attend: AttendAll,
    options: dict[str, Any],
    eager: AttendAll | None = None,
    with_lse: bool = True,
    bias: Tensor | None = None,
) -> Problem:
    q, k, v = inputs["q"], inputs["k"], inputs["v"]

    def exact(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        out, lse = oracle_attention(q, k, v, visible, sinks=sinks, bias=bias, **options)
        return out, lse if with_lse else None

    asks = AttentionProblem(
        device=q.device,
        dtype=q.dtype,
        batch=q.shape[0],
        seqlen_q=q.shape[1],
        seqlen_k=k.shape[1],
        q_heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        block_size=draw.block_size,
        needs_grad=True,
        softcap=options["softcap"],
        biased=bias is not None,
    )
    label = f"{draw.describe()}; {asks}; scale {options['scale']}"
    return Problem(inputs, attend, exact, eager, visible, options["scale"], asks, draw.traits, label, bias)
