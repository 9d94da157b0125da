# SPDX-License-Identifier: Apache-2.0
"""Replays of forward and backward start the same kernels with the same arguments as calls that are not cached."""

import importlib
import sys

import pytest
import torch

triton = pytest.importorskip("triton")

from test_launcher import ONE_LAUNCHER, Driver, Utils, WithDescriptors, address, started  # noqa: E402, F401

import dynaxx as dx  # noqa: E402
from dynaxx.kernels.device import CARDS, described_as  # noqa: E402
from dynaxx.kernels.runtime import launch_cache, recorder  # noqa: E402
from interpreter import INTERPRETED  # noqa: E402

DIRECT = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)  # see `direct_launcher`
PATTERNS = {"window": dx.SlidingWindow(300), "split rows and columns": dx.SlidingWindow(300) | dx.GlobalTokens(8)}
TOKENS = 2048
BIG = 1 << 32  # integers above are addresses
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(INTERPRETED, reason="compiles"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="imitates a GPU"),
]


def uncached(call, inputs, tensors, *settings, made=0, split=None, **others):
    return call(inputs, *tensors, *settings, *(() if split is None else (split,)))


def numbers(x):
    """Yield the numbers in an argument: addresses, sizes, and what an encoded descriptor holds."""
    if isinstance(x, (tuple, list)):
        for each in x:
            yield from numbers(each)
    elif isinstance(x, (int, float)):
        yield x


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    "backend", ["triton", pytest.param("hopper", marks=pytest.mark.skipif(not DIRECT, reason="3.6 and later"))]
)
@described_as(CARDS["H200"])  # so that tiles come by TMA, on CPU tensors
def test_replays_start_what_calls_start(backend, pattern, started, monkeypatch):  # noqa: F811
    forward, backward = (
        importlib.import_module(f"dynaxx.kernels.attention.{backend}.{name}") for name in ("forward", "backward")
    )
    if DIRECT:
        monkeypatch.setattr(Driver, "launcher_cls", WithDescriptors)
        if ONE_LAUNCHER:
            monkeypatch.setattr(Utils, "launch", staticmethod(WithDescriptors.record), raising=False)
        fill = "fill_tma_descriptor_tiled" if ONE_LAUNCHER else "fill_tma_descriptor"
        monkeypatch.setattr(Utils, fill, lambda self, *given: given, raising=False)
    layout = PATTERNS[pattern].layout(TOKENS, block_size=64)
    cached = launch_cache.record_or_replay
    loaded = [module for name, module in sys.modules.items() if name.startswith("dynaxx.kernels")]
    users = [each for each in loaded if getattr(each, "record_or_replay", None) is cached and each is not launch_cache]
    for turn in range(4):
        q, do, out = (torch.zeros(1, TOKENS, 4, 64, dtype=torch.bfloat16) for _ in range(3))
        k, v, lse = *(torch.zeros(1, TOKENS, 2, 64, dtype=torch.bfloat16) for _ in range(2)), torch.zeros(1, 4, TOKENS)

        def both():
            held = forward.attention_forward(q, k, v, layout, 0.1)  # noqa: B023
            return held, backward.attention_backward(do, None, q, k, v, out, lse, layout, 0.1)  # noqa: B023

        started.clear()
        first = both()
        found = [[*numbers(address(each))] for each in started]
        with monkeypatch.context() as patch:
            for module in users:
                patch.setattr(module, "record_or_replay", uncached)
            started.clear()
            second = both()
        expected = [[*numbers(address(each))] for each in started]
        if turn == 0:
            continue  # compiles, and splits long rows
        ours = {x.data_ptr() for x in (q, k, v, do, out, lse, *filter(lambda x: x is not None, layout.kernel_inputs))}
        renamed = {}  # memory that each call allocated
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            for x, y in zip(a, b, strict=True):
                allocated = max(x, y) > BIG and x not in ours and y not in ours
                assert renamed.setdefault(x, y) == y if allocated else x == y
        del first, second
    known = launch_cache._by_layout.of(layout).values()
    assert recorder.NOT_REPLAYABLE not in known
    assert sum(each is not recorder.CALLED_ONCE for each in known) >= 2  # forward, backward
