# SPDX-License-Identifier: Apache-2.0
"""Decide whether a call runs the model's own pattern on dynaxx's kernels, and with which layouts."""

from __future__ import annotations

from torch import Tensor

from dynaxx.integrations.runtime.routing import DenseReason
from dynaxx.integrations.transformers.calls.border import Kind, beats_sdpa, causal_kind, least_queries, wins
from dynaxx.integrations.transformers.calls.own_pattern import parts_of_mask, parts_of_runs, parts_of_window
from dynaxx.integrations.transformers.calls.signature import Signature
from dynaxx.integrations.transformers.forward_context import ForwardContext, OwnParts
from dynaxx.integrations.transformers.masks.lazy import LazyMask
from dynaxx.integrations.transformers.masks.runs import MaskRun, read_window


def own_parts(current: ForwardContext, form: Signature, mask: Tensor | None) -> OwnParts:
    """Return the layouts of the model's own pattern, or why the model's original attention must compute it.

    Args:
        current: the context of the pass, which keeps the layouts for equal calls.
        form: the signature of the call.
        mask: its mask.
    """
    if not current.deployed.own_pattern:
        return DenseReason.NO_RULE
    form = form.of_pattern()
    found = current.parts.get(form)
    if found is None:
        found = current.parts[form] = _make_parts(current, form, mask)
    return found


def _make_parts(current: ForwardContext, form: Signature, mask: Tensor | None) -> OwnParts:
    seqlen_q, seqlen_k, device, scores = form.seqlen_q, form.seqlen_k, form.device, form.scores
    least, asked = least_queries(device.type), form.dense.window_for(mask, seqlen_q, seqlen_k)
    too_short = least is None or seqlen_q < least or not (scores.need_eager or beats_sdpa(device.type, seqlen_q))
    if asked is None and too_short:
        return DenseReason.SHORT
    mask = current.visible(mask)
    unserved = scores.unserved or form.tensors_reason(mask)
    if unserved not in (None, DenseReason.NOT_CAUSAL):
        return unserved
    if asked is not None:
        if mask is None:
            return DenseReason.NOT_CAUSAL if form.causal else parts_of_window(asked, seqlen_q, device)
        return (isinstance(mask, LazyMask) and parts_of_mask(mask, device, asked)) or DenseReason.MASK_KIND
    plain = mask is not None and not (isinstance(mask, LazyMask) and not mask.plain_is_needed)
    if unserved is not None and mask is not None:
        return unserved
    kind: Kind = "masked" if plain else causal_kind(form.q, form.k)
    if not wins(device.type, "eager" if scores.need_eager else kind, seqlen_q):
        return DenseReason.SHORT
    if isinstance(mask, LazyMask):
        return parts_of_mask(mask, device) or DenseReason.MASK_KIND
    if mask is None:
        if scores.window is not None and scores.window < seqlen_k:  # the window is not in the mask
            return DenseReason.MASK_KIND
        causal = unserved is None
        stop = min(seqlen_q, seqlen_k) if causal else seqlen_k
        return parts_of_runs([[MaskRun(0, seqlen_q, 0, stop, causal)]] * form.batch, device)
    if scores.window is not None and not current.steps:  # as in a compiled model
        windowed = read_window(mask[:, 0], scores.window)
        if windowed is not None:
            return parts_of_runs(windowed * (form.batch // len(windowed)), device, scores.window)
    runs = current.runs(mask, form.batch)
    if runs is None:
        return DenseReason.MASK_KIND
    # Continuous batching defines the sequences, and its masks hide keys outside the window.
    return parts_of_runs(runs, device, scores.window if current.steps else None)
