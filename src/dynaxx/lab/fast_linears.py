# SPDX-License-Identifier: Apache-2.0
"""Run the linear layers of a model on the faster of torch's two libraries while quality is measured on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dynaxx.integrations.onednn import use_onednn

MIN_PARAMETERS = 10_000_000  # smaller models gain little, and their layers are too small to time well


@contextmanager
def fast_linears(model: Any) -> Iterator[None]:
    """Run fp32 linear layers on oneDNN within the block where it is faster on this CPU, see `use_onednn`.

    Results differ from torch's default by rounding. Never use it where times of the model are measured.
    """
    small = sum(parameter.numel() for parameter in model.parameters()) < MIN_PARAMETERS
    if small or model.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        yield
        return
    with use_onednn(model):
        yield
