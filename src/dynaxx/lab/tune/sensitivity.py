# SPDX-License-Identifier: Apache-2.0
"""Measure the loss of each head at each budget with one forward and one backward pass.

Dropping keys changes a head's output by delta. To second order this raises the model's loss by 1/2 delta' F delta,
where F is the Fisher information of the next-token distribution with respect to that output. The gradient g of the
log-likelihood of tokens drawn from the model samples F, so the cost of a head is 1/2 sum over tokens of (g . delta)^2,
in nats. To first order the costs of heads add up, so a budget can be distributed among them (`costs`).

Shapes: N tokens, H / G q and kv heads, D / E head_dim of q, k and of v.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor

from dynaxx.lab.perplexity import ROWS, logits_of, routed
from dynaxx.layout import BlockLayout
from dynaxx.ops import sparse_attention
from dynaxx.selection import Hybrid, select_blocks

PROBE = "dynaxx_sensitivity"  # name in transformers' AttentionInterface
DENSE = "dense"  # key of candidates that keep every block, which cost nothing by definition


class HeadCosts(NamedTuple):
    """The costs of one layer, for each candidate and q head."""

    layer: int
    loss: Tensor  # (candidates, H) fp64, nats per token


class _Ended(Exception):
    """No further layer is to be measured, so the backward pass ends."""


Visitor = Callable[[int, Tensor, Tensor, Tensor, Tensor, Tensor, float], None]
_visitors: list[Visitor] = []  # the measurement in progress


def measure_head_costs(
    model: Any,
    ids: Tensor,
    candidates: Sequence[Hybrid],
    *,
    block_size: int | tuple[int, int],
    seed: int = 0,
    last: int | None = None,
    every: int = 1,
    layers: Collection[int] | None = None,
    done: Callable[[HeadCosts], object] = lambda costs: None,
    layer_work: Callable[[], AbstractContextManager[object]] = nullcontext,
    go_on: Callable[[], bool] = lambda: True,
) -> list[HeadCosts]:
    """Measure every candidate on every head of every layer that sees its whole context.

    Args:
        model: a causal language model of transformers, in eval mode.
        ids: (1, N) one text.
        candidates: hybrids with one budget for all heads.
        block_size: tokens per block, or (q_block, kv_block).
        seed: seed for the sampled tokens of the gradient.
        last: number of tokens at the end whose predictions count, for example a task's answer; all by default.
        every: measure the queries of one block in so many, from the first one on.
        layers: layers to measure; all by default.
        done: a function that is called with the costs of each finished layer.
        layer_work: returns the context in which a layer is measured.
        go_on: a function that is called before each layer except the first; if it returns False, no further layer is
            measured.

    Returns:
        The costs of the measured layers, in ascending order. Layers with a sliding window are skipped.
    """
    found: list[HeadCosts] = []

    def visit(layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, scale: float) -> None:
        if layers is not None and layer not in layers:
            return
        if found and not go_on():
            raise _Ended
        with layer_work():
            found.append(measured(layer, q, k, v, out, grad, scale))
        done(found[-1])
        if layers is not None and len(found) == len(layers):
            raise _Ended

    def measured(layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, scale: float) -> HeadCosts:
        loss, known = [], {DENSE: torch.zeros(q.shape[2], dtype=torch.float64, device=q.device)}
        for candidate in candidates:
            key = _scorer_free(candidate)
            if key not in known:
                layout = select_blocks(q, k, candidate, block_size=block_size, scale=scale)
                delta = sparse_attention(q, k, v, one_row_in(every, layout), scale=scale) - out
                measured = torch.arange(out.shape[1], device=out.device) // layout.block_size[0] % every == 0
                known[key] = ((delta * grad).sum(-1)[:, measured].double() ** 2).mean((0, 1)) / 2
            loss.append(known[key])
        return HeadCosts(layer, torch.stack(loss).cpu())

    with probing(model, visit), suppress(_Ended):
        hidden = hidden_states(model, ids[:, :-1])
        hidden.backward(fisher_gradient(model, hidden.detach(), seed, last))
    return sorted(found, key=lambda costs: costs.layer)


def _scorer_free(candidate: Hybrid) -> str:
    """Return a key of a candidate's blocks, the same for every scorer if the budget is nothing or everything."""
    selector = candidate.selector
    budget = getattr(selector, selector.budget_field)
    if isinstance(budget, float) and budget == selector.everything:
        return DENSE
    if isinstance(budget, float) and budget == selector.nothing:
        return repr(candidate.pattern)
    return repr(candidate)


def one_row_in(every: int, layout: BlockLayout) -> BlockLayout:
    """Return a layout in which only one row of blocks in so many visits any, which takes that share of the time."""
    if every == 1:
        return layout
    rows, blocks, mask_ids = layout.entries()
    kept = rows % layout.q_blocks % every == 0
    shared = {"layout_batch": layout.layout_batch, "layout_heads": layout.layout_heads}
    return BlockLayout.from_entries(layout.grid(), rows[kept], blocks[kept], mask_ids[kept], layout.masks, **shared)


def hidden_states(model: Any, ids: Tensor) -> Tensor:
    """Return the final hidden states (1, N, hidden_size) with a graph for the backward pass.

    On a GPU each decoder layer stores its input alone and runs again in the backward pass, if the model supports it.
    The graph of all layers would take several times the memory of the weights.
    """
    ids = ids.to(model.device)
    if _memory_is_scarce(ids):
        with _checkpointed(model):
            hidden: Tensor = model.base_model(ids, use_cache=False)[0]
        if hidden.requires_grad:  # not if the model passes hidden states to its layers by keyword
            return hidden
    hidden = model.base_model(ids, use_cache=False)[0]
    return hidden


def _memory_is_scarce(ids: Tensor) -> bool:
    return ids.is_cuda


@contextmanager
def _checkpointed(model: Any) -> Iterator[None]:
    """Run decoder layers as checkpoints within the block.

    transformers checkpoints layers in training mode. Only the layers themselves are in that mode here, so modules
    inside them, such as dropout, are not.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer) and not each.training]
    stored = lambda run, *given: torch.utils.checkpoint.checkpoint(run, *given, use_reentrant=True)
    settings = {"gradient_checkpointing": True, "training": True, "_gradient_checkpointing_func": stored}
    before = [{name: vars(layer)[name] for name in settings if name in vars(layer)} for layer in layers]
    started = lambda embedding, given, out: out.requires_grad_()
    hook = model.get_input_embeddings().register_forward_hook(started)  # a checkpoint needs an input with a gradient
    try:
        for layer in layers:
            vars(layer).update(settings)
        yield
    finally:
        hook.remove()
        for layer, own in zip(layers, before, strict=True):
            for name in settings:
                vars(layer).pop(name, None)
            vars(layer).update(own)


def fisher_gradient(model: Any, hidden: Tensor, seed: int, last: int | None = None) -> Tensor:
    """Return the gradient of the log-likelihoods of sampled tokens with respect to `hidden`, by chunks of logits.

    Args:
        model: a causal language model of transformers.
        hidden: (1, N, hidden_size) final hidden states.
        seed: seed for the sampled tokens.
        last: number of positions at the end that count; all by default.
    """
    generator = torch.Generator(hidden.device).manual_seed(seed)
    gradient = torch.zeros_like(hidden)
    first = 0 if last is None else max(0, hidden.shape[1] - last)
    for start in range(first, hidden.shape[1], ROWS):
        with torch.enable_grad():
            some = hidden[:, start : start + ROWS].requires_grad_()
            logits = logits_of(model, some)[0]
            drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
            likelihood = -torch.nn.functional.cross_entropy(logits, drawn, reduction="sum")
        gradient[:, start : start + ROWS] = torch.autograd.grad(likelihood, some)[0]
    return gradient


@contextmanager
def probing(model: Any, visit: Visitor) -> Iterator[None]:
    """Route attention through `_probe` with a visitor, and exclude parameters from the backward pass."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    _visitors.append(visit)
    try:
        for parameter in learning:
            parameter.requires_grad_(False)
        with routed(model, PROBE, _probe), torch.enable_grad():
            yield
    finally:
        _visitors.pop()
        for parameter in learning:
            parameter.requires_grad_(True)


def _probe(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend densely, (1, H, N, D) -> (1, N, H, E), and call the visitor once the layer's gradient is known."""
    scale = query.shape[-1] ** -0.5 if kwargs.get("scaling") is None else float(kwargs["scaling"])
    # On a GPU, SDPA's only kernel for grouped heads in fp32 or under a mask stores N x N probabilities.
    stored = query.is_cuda and (query.dtype == torch.float32 or attention_mask is not None)
    group = query.shape[1] // key.shape[1] if stored else 1
    keys, values = (x.repeat_interleave(group, 1) if group > 1 else x for x in (key, value))
    out = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=attention_mask, is_causal=attention_mask is None, scale=scale, enable_gqa=True
    ).transpose(1, 2)
    if not out.requires_grad and torch.is_grad_enabled():
        out.requires_grad_()  # the first layer, before which nothing is differentiated
    if kwargs.get("sliding_window") is None and torch.is_grad_enabled():  # it is not in a checkpoint's first pass
        q, k, v = (x.detach().transpose(1, 2) for x in (query, key, value))
        kept, visit, layer = out.detach(), _visitors[-1], module.layer_idx
        out.register_hook(lambda grad: _show(visit, layer, q, k, v, kept, grad, scale))
    return out, None


@torch.no_grad()
def _show(visit: Visitor, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, scale: float) -> None:
    visit(layer, q, k, v, out, grad, scale)
