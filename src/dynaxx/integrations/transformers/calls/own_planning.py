# SPDX-License-Identifier: Apache-2.0
"""Decide whether a call runs the model's own pattern on dynaxx's kernels, and with which layouts."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dynaxx.integrations.runtime.routing import DenseReason
from dynaxx.integrations.transformers.calls.own_pattern import parts_of_mask, parts_of_runs, parts_of_window
from dynaxx.integrations.transformers.calls.signature import Signature
from dynaxx.integrations.transformers.forward_context import ForwardContext, OwnParts
from dynaxx.integrations.transformers.masks.lazy import LazyMask
from dynaxx.integrations.transformers.masks.runs import MaskRun, read_window

Kind = Literal["grouped", "wide", "causal", "masked", "eager"]

# By device type: queries of a call from which the kernels serve it; None: never.
#   grouped: SDPA without a mask, its fastest case, for q heads that share keys, of head_dim 128 at most
#   wide: the same above head_dim 256, where SDPA has no flash kernel
#   causal: the same for other heads; a table with no other entry has one border for all three
#   masked: SDPA with a mask of seqlen x seqlen: windows, chunks, packed and padded batches
#   eager: capped scores and learned sinks, which SDPA does not serve
BORDERS: dict[str, dict[Kind, int | None]] = {
    "cpu": {"causal": 256, "masked": 256, "eager": 128},
    # benchmarks/models/causal.py on an H200, as times SDPA's speed at 16k and 32k: 32 q / 8 kv heads of 128 have 1.16
    # and 1.28, 9 / 3 of 64 have 1.13 and 1.23, 32 / 32 of 128 have 1.09 and 1.23, 16 / 8 of 256 have 1.00 and 1.14, and
    # 16 / 2 of 512 have 5.8 at 2k. At 8k, small models wait for the host, which takes longer than for SDPA.
    "cuda": {"grouped": 16384, "wide": 2048, "causal": 32768, "masked": 2048, "eager": 512},
}
GROUPED_HEAD_DIM, FLASH_HEAD_DIM = 128, 256
UNSCORED: tuple[Kind, ...] = ("grouped", "wide", "causal", "masked")  # what SDPA computes


def border(device_type: str, *kinds: Kind) -> int:
    """Return the queries from which the kernels serve calls of one of these kinds; a large number if they never do."""
    table = BORDERS.get(device_type, {})
    found = [table.get(kind, table.get("causal")) for kind in kinds]
    return min([each for each in found if each is not None], default=1 << 62)  # torch.compile traces no generator here


def causal_kind(q: torch.Size, k: torch.Size) -> Kind:
    """Return the kind of a full causal call, from the shape of q (batch, q_heads, seqlen_q, head_dim) and that of k."""
    if q[3] > FLASH_HEAD_DIM:
        return "wide"
    return "grouped" if q[1] > k[1] and q[3] <= GROUPED_HEAD_DIM else "causal"


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
    asked = form.dense.window_for(mask, seqlen_q, seqlen_k)
    if asked is None and seqlen_q < border(device.type, *UNSCORED, *(("eager",) if scores.need_eager else ())):
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
    if seqlen_q < border(device.type, "eager" if scores.need_eager else kind):
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
