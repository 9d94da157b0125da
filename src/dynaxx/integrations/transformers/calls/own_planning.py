# SPDX-License-Identifier: Apache-2.0
"""Decide whether a call runs the model's own pattern on dynaxx's kernels, and with which layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dynaxx.integrations.runtime.routing import DenseReason
from dynaxx.integrations.transformers.calls.arguments import AttentionCall, ScoreOptions, tensors_reason
from dynaxx.integrations.transformers.calls.border import Kind, beats_sdpa, causal_kind, least_queries, wins
from dynaxx.integrations.transformers.calls.own_pattern import OwnPart, parts_of_mask, parts_of_runs, parts_of_window
from dynaxx.integrations.transformers.masks.lazy import LazyMask, has_own_pattern
from dynaxx.integrations.transformers.masks.runs import MaskRun, read_window

if TYPE_CHECKING:
    from dynaxx.integrations.transformers.forward_context import ForwardContext


def own_parts(current: ForwardContext, call: AttentionCall, scores: ScoreOptions) -> Sequence[OwnPart] | DenseReason:
    """Return the layouts of the model's own pattern, or why the model's original attention must compute it."""
    seqlen_q, device, mask = call.seqlen_q, call.q.device, call.mask
    least, asked = least_queries(device.type), _asked_window(current, call)
    if not current.deployed.own_pattern:
        return DenseReason.NO_RULE
    too_short = least is None or seqlen_q < least or not (scores.need_eager or beats_sdpa(device.type, seqlen_q))
    if asked is None and too_short:
        return DenseReason.SHORT
    unserved = scores.unserved or tensors_reason(call)
    if unserved not in (None, DenseReason.NOT_CAUSAL):
        return unserved
    key = ("own_pattern", None if mask is None else id(mask), seqlen_q, call.seqlen_k, scores.need_eager, scores.window)
    return current.own_parts(key, mask, lambda: _make_parts(current, call, scores, unserved is None))


def _make_parts(
    current: ForwardContext, call: AttentionCall, scores: ScoreOptions, causal: bool
) -> Sequence[OwnPart] | DenseReason:
    batch, seqlen_q, seqlen_k, device, mask = len(call.q), call.seqlen_q, call.seqlen_k, call.q.device, call.mask
    asked = _asked_window(current, call)
    if asked is not None:
        if mask is None:
            return parts_of_window(asked, seqlen_q, device)
        return (isinstance(mask, LazyMask) and parts_of_mask(mask, device, asked)) or DenseReason.MASK_KIND
    plain = mask is not None and not (isinstance(mask, LazyMask) and not mask.plain_is_needed)
    if isinstance(mask, LazyMask) and mask.rule.causal and not plain and not call.causal_without_mask:
        return DenseReason.NOT_CAUSAL  # transformers drops this causal mask, and SDPA attends both ways (PaliGemma)
    kind: Kind = "masked" if plain else causal_kind(call.q, call.k)
    if not wins(device.type, "eager" if scores.need_eager else kind, seqlen_q):
        return DenseReason.SHORT
    if isinstance(mask, LazyMask):
        return parts_of_mask(mask, device) or DenseReason.MASK_KIND
    if mask is None:
        if scores.window is not None and scores.window < seqlen_k:  # the window is not in the mask
            return DenseReason.MASK_KIND
        stop = min(seqlen_q, seqlen_k) if causal else seqlen_k
        return parts_of_runs([[MaskRun(0, seqlen_q, 0, stop, causal)]] * batch, device)
    if scores.window is not None and not current.steps and mask.dtype == torch.bool:  # as in a compiled model
        windowed = read_window(mask[:, 0], scores.window)
        if windowed is not None:
            return parts_of_runs(windowed * (batch // len(windowed)), device, scores.window)
    runs = current.runs(mask, batch)
    if runs is None:
        return DenseReason.MASK_KIND
    # Continuous batching defines the sequences, and its masks hide keys outside the window.
    return parts_of_runs(runs, device, scores.window if current.steps else None)


def _asked_window(current: ForwardContext, call: AttentionCall) -> tuple[int, int] | None:
    """Return the window that the caller asked for, if it hides any key. It never changes a layer's own pattern."""
    window, seqlen = current.deployed.window, call.seqlen_q
    if window is None or seqlen != call.seqlen_k or seqlen <= min(window) + 1 or has_own_pattern(call.mask):
        return None
    return window
