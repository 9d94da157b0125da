# SPDX-License-Identifier: Apache-2.0
"""The backward of the Hopper kernels is one recording of all its launches, with the lists of split lines as inputs."""

import os

import pytest
import torch

triton = pytest.importorskip("triton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="what is compiled for the driver that writes down would stay"),
]

from driver_standin import CALLS, standin  # noqa: E402, F401
from test_launcher import started  # noqa: E402, F401

import dynaxx as dx  # noqa: E402
from dynaxx.kernels.attention.hopper import backward  # noqa: E402


@pytest.mark.parametrize(
    ("pattern", "block", "launches"),
    [
        pytest.param(dx.SlidingWindow(100), 128, 3, id="one pass"),
        pytest.param(dx.SlidingWindow(100), 64, 3, id="two passes"),
        pytest.param(dx.SlidingWindow(100) | dx.GlobalTokens(8), 64, 5, id="split columns"),
    ],
)
def test_a_backward_is_one_recording(standin, kept, pattern, block, launches):  # noqa: F811
    """Nothing runs, so no value is read."""
    tokens, heads = 64 * block, 4
    layout = pattern.layout(tokens, block_size=block, device="cpu")
    calls, replays = [], []
    for seed in range(4):
        q, k, out, do = (torch.full((1, tokens, n, 128), seed, dtype=torch.bfloat16) for n in (heads, 2, heads, heads))
        CALLS.clear()
        standin.launched.clear()
        found = backward.attention_backward(do, None, q, k, k.clone(), out, torch.zeros(1, heads, tokens), layout, 0.1)
        calls.append([each[:3] for each in CALLS])
        replays.append([tuple(each.sizes[:3]) for each in standin.launched])
        assert [x.shape for x in found] == [q.shape, k.shape, k.shape]
    first, second, *others = calls
    assert len(second) == launches
    assert first[-launches:] == second  # after the kernel that lists the parts, which are kept
    assert others == [[], []]
    assert replays == [[], [], second, second]
