# SPDX-License-Identifier: Apache-2.0
"""Choice of the backend for a call of `sparse_attention`."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from dynaxx.kernels.attention.contract import AttentionProblem
from dynaxx.kernels.attention.hopper.config import portable_backward_is_faster
from dynaxx.kernels.device import processors
from dynaxx.kernels.registry import ATTENTION
from dynaxx.layout import BlockLayout
from dynaxx.layout.derived import PerLayout
from dynaxx.ops.checks import check_inputs, check_layout, check_values

MORE_WORK = 1.1
MAX_CHOICES = 64  # cached choices per layout
BACKENDS = tuple(ATTENTION.backends)  # in the order of preference of "auto"


def backend_for(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    softcap: float | None,
    backend: str,
    bias: Tensor | None = None,
    needs_grad: bool | None = None,
) -> tuple[str, bool]:
    """Check the inputs of a call; return its backend, and whether it needs gradients.

    The choice is cached with the layout, so a later call with the same shapes, dtypes and devices costs one lookup.
    `needs_grad` says what autograd hides within a function of its own.

    Raises:
        ValueError, TypeError, UnsupportedInputError: like `check_inputs` and `ATTENTION.resolve`.
    """
    if needs_grad is None:
        needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    bias_grad = has_gradient(bias)
    needs_grad |= bias_grad
    tensors = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device)
    check_layout(layout)
    derived = layout.derived
    if derived.versions_now() != derived.versions:
        derived.clear()
    known = _chosen.of(layout)
    key = (*tensors, q.layout, k.layout, v.layout, softcap, backend, needs_grad, bias is not None, bias_grad)
    name = known.get(key)
    if name is not None and layout.form is not None:
        check_values(layout)
    if name is None:
        problem = check_inputs(q, k, v, layout, softcap=softcap, needs_grad=needs_grad)
        name = ATTENTION.resolve(with_bias(problem, bias), backend)
        if len(known) < MAX_CHOICES:
            known[key] = name
    return name, needs_grad


_chosen = PerLayout()


def in_larger_blocks(layout: BlockLayout) -> BlockLayout:
    """Return the layout of the same pairs in blocks of 128, in which the hopper kernels are faster, or `layout` itself.

    Rules by distance know their pairs in blocks of any size. A layout in which more than `MORE_WORK` times as many
    pairs are visited is not taken, and none is made while a CUDA graph is captured.
    """
    larger = layout.derived.larger
    if callable(larger):
        if layout.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return layout
        larger = larger()
        worth = larger.nnz * prod(larger.block_size) <= MORE_WORK * layout.nnz * prod(layout.block_size)
        layout.derived.larger = larger = larger if worth else None
    return layout if larger is None else larger


def backward_backend(name: str, q: Tensor, k: Tensor, layout: BlockLayout, softcap: float | None) -> str:
    """Return the backend of the gradients: of the forward's, or "triton" where it is measured to be faster."""
    if name != "hopper" or softcap is not None:
        return name
    rows, group_size = layout.q_blocks * q.shape[0] * q.shape[2], q.shape[2] // max(1, k.shape[2])
    faster = portable_backward_is_faster(group_size, layout.block_size[0], q.shape[3], rows, processors(q.device))
    return "triton" if faster else name


def has_gradient(x: Tensor | None) -> bool:
    """Return whether autograd asks for the gradient of an optional tensor."""
    return x is not None and x.requires_grad and torch.is_grad_enabled()


def with_bias(problem: AttentionProblem, bias: Tensor | None, bias_grad: bool | None = None) -> AttentionProblem:
    """Return the problem with a bias by distance, if there is one."""
    if bias is None:
        return problem
    asked = has_gradient(bias) if bias_grad is None else bias_grad
    return replace(problem, biased=True, bias_grad=asked, needs_grad=problem.needs_grad or asked)


def score_options(
    softcap: float | None, sinks: Tensor | None = None, bias: Tensor | None = None, dbias: Tensor | None = None
) -> dict[str, Any]:
    """Return the optional arguments of a backend's functions; empty when unset."""
    options = {"softcap": softcap, "sinks": sinks, "bias": bias, "dbias": dbias}
    return {name: x for name, x in options.items() if x is not None}
