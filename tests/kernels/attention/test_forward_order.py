# SPDX-License-Identifier: Apache-2.0
"""The model that orders the rows of the Hopper forward: its choices where timings on an H200 differ most."""

import numpy as np
import pytest
import torch

import dynaxx as dx
from dynaxx.kernels.attention.hopper.forward_order import Schedule, lines_together, row_lengths, time_of

PROCESSORS = 132
EVERY = [1, 2, 4, 8, 16, 32]


def schedule(lengths, lines, kv_bytes, q_block=128, lines_of_kv_head=1):
    return Schedule(np.float32(lengths).tobytes(), lines, lines_of_kv_head, kv_bytes, q_block, PROCESSORS, 1)


@pytest.mark.parametrize(
    ("rows", "density", "measured"),
    [
        pytest.param(64, 0.2, [0.482, 0.628, 0.713, 0.601, 0.543, 0.555], id="20 % of 8k"),
        pytest.param(64, 1.0, [1.589, 2.162, 2.413, 1.953, 1.721, 1.645], id="every pair of 8k"),
        pytest.param(32, 0.4, [0.246, 0.315, 0.348, 0.347, 0.287, 0.267], id="40 % of 4k"),
    ],
)
def test_times_follow_the_model(rows, density, measured):
    """Milliseconds of 32 heads of 256 in blocks of 128, with 1 to 32 heads together."""
    causal = schedule([1 + density * below for below in range(rows, 0, -1)], 32, rows * 128 * 256 * 4)
    modelled = [time_of(causal, together) for together in EVERY]
    assert lines_together(causal) == EVERY[np.argmin(measured)]
    assert np.corrcoef(modelled, measured)[0, 1] > 0.85


def test_lines_together_divide_the_lines():
    for lines in (1, 7, 12, 28, 96):
        assert lines % lines_together(schedule([3.0] * 40, lines, 1 << 20)) == 0


def test_lengths_of_rows():
    read = lambda layout: np.frombuffer(row_lengths(layout), np.float32).tolist()
    window = dx.SlidingWindow(100).layout(640, block_size=64, device="cpu")
    assert read(window) == [3.0] * 8 + [2.0, 1.0]
    assert read(dx.Causal().layout(256, block_size=64, device="cpu")) == [4.0, 3.0, 2.0, 1.0]
    chosen = dx.BlockLayout.from_block_indices(torch.tensor([[[[0], [1], [0]]]]), 192, block_size=64)
    assert read(chosen) == [1.0, 1.0, 1.0]
