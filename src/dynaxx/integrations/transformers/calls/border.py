# SPDX-License-Identifier: Apache-2.0
"""The number of queries from which dynaxx's kernels beat the attention that transformers would choose.

The table is conservative. Below its values the model's original attention runs. Comments name the measurements.
"""

from __future__ import annotations

from typing import Literal

import torch

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


def least_queries(device_type: str) -> int | None:
    """Return the lowest border of a device type, or None if the kernels serve nothing on it."""
    return min((border for border in BORDERS.get(device_type, {}).values() if border is not None), default=None)


def wins(device_type: str, kind: Kind, seqlen_q: int) -> bool:
    """Return whether a call of `seqlen_q` queries is at or beyond the border."""
    table = BORDERS.get(device_type, {})
    border = table.get(kind, table.get("causal"))
    return border is not None and seqlen_q >= border


def beats_sdpa(device_type: str, seqlen_q: int) -> bool:
    """Return whether a call of `seqlen_q` queries that SDPA serves may be at or beyond a border."""
    return seqlen_q >= lowest_border(device_type)


def lowest_border(device_type: str) -> int:
    """Return the number of queries from which `beats_sdpa` may be true; a large one if it never is."""
    table = BORDERS.get(device_type, {})
    found = [border for border in (table.get(kind, table.get("causal")) for kind in UNSCORED) if border is not None]
    return min(found, default=1 << 62)


def causal_kind(q: torch.Size, k: torch.Size) -> Kind:
    """Return the kind of a full causal call, from the shape of q (batch, q_heads, seqlen_q, head_dim) and that of k."""
    if q[3] > FLASH_HEAD_DIM:
        return "wide"
    return "grouped" if q[1] > k[1] and q[3] <= GROUPED_HEAD_DIM else "causal"
