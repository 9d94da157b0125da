# SPDX-License-Identifier: Apache-2.0
"""The number of queries from which dynaxx's kernels beat the attention that transformers would choose.

The table is conservative. Below its values the model's original attention runs. Comments name the measurements.
"""

from __future__ import annotations

from typing import Literal

Kind = Literal["causal", "masked", "eager"]

# By device type: queries of a call from which the kernels serve it; None: never.
#   causal: SDPA without a mask, its fastest case
#   masked: SDPA with a mask of seqlen x seqlen: windows, chunks, packed and padded batches
#   eager: capped scores and learned sinks, which SDPA does not serve
BORDERS: dict[str, dict[Kind, int | None]] = {
    "cpu": {"causal": 256, "masked": 256, "eager": 128},
    "cuda": {"causal": None, "masked": 2048, "eager": 512},
}


def least_queries(device_type: str) -> int | None:
    """Return the lowest border of a device type, or None if the kernels serve nothing on it."""
    return min((border for border in BORDERS.get(device_type, {}).values() if border is not None), default=None)


def wins(device_type: str, kind: Kind, seqlen_q: int) -> bool:
    """Return whether a call of `seqlen_q` queries is at or beyond the border."""
    border = BORDERS.get(device_type, {}).get(kind)
    return border is not None and seqlen_q >= border


def beats_sdpa(device_type: str, seqlen_q: int) -> bool:
    """Return whether a call of `seqlen_q` queries that SDPA serves may be at or beyond a border."""
    return wins(device_type, "causal", seqlen_q) or wins(device_type, "masked", seqlen_q)
