# SPDX-License-Identifier: Apache-2.0
"""The kernel launcher starts the same kernels as Triton, with the same arguments; a fake driver records them."""

import os
from typing import NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import CompiledKernel  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from dynaxx.kernels.compat import OPTIONS  # noqa: E402
from dynaxx.kernels.runtime import launcher  # noqa: E402


@triton.jit(do_not_specialize=["count"])
def _kernel(x_desc, p_out, p_bias, count, stride, scale, BIASED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = x_desc.load([0, 0]).reshape(BLOCK).to(tl.float32) * scale
    if BIASED:
        value += tl.load(p_bias + at * stride)
    tl.store(p_out + at, value, mask=at < count)


class Strides(NamedTuple):
    row: int
    column: int


class Tables(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@triton.jit
def _kernel_of_values(tables, strides, p_out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(tables.first + at * strides.row) + tl.load(tables.second + at * strides.column)
    tl.store(p_out + at, value)


STARTED = []


def address(x):
    """Return the address of a tensor, also inside a tuple; return anything else unchanged."""
    if isinstance(x, tuple):
        return tuple(address(each) for each in x)
    return x.data_ptr() if isinstance(x, torch.Tensor) else x


class Launcher:
    """Replaces the compiled launcher."""

    def __init__(self, src, metadata):
        self.name = (metadata.name, metadata.num_warps, str(src.signature), str(src.constants), str(src.attrs))

    def __call__(self, *arguments):
        grid, stream, function, packed, *rest = arguments[:3], *arguments[3:]
        values = [address(x) for x in rest[3:]]  # after metadata and hooks
        STARTED.append((self.name, grid, stream, function, packed, values))


LOADED = []  # also kernels of tests before, which Triton keeps and loads again


class Utils:
    def get_device_properties(self, device):
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, *arguments):
        return 1, 2, 100, 0, 1024


class Driver:
    utils, launcher_cls = Utils(), Launcher
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 7)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    is_active = staticmethod(lambda: True)


@pytest.fixture
def started(monkeypatch):
    init = CompiledKernel.__init__

    def remember(self, *arguments):
        init(self, *arguments)
        LOADED.append(self)

    monkeypatch.setattr(CompiledKernel, "__init__", remember)
    monkeypatch.setattr(driver, "_active", Driver())
    STARTED.clear()
    yield STARTED
    for kernel in LOADED:
        kernel.module = None  # there is nothing to unload


def calls():
    """Vary what differs from call to call, and what Triton specializes kernels on."""
    x, out, bias = torch.randn(1, 64), torch.empty(80), torch.randn(2000)
    described = lambda x, size: TensorDescriptor(x, [1, size], [size, 1], [1, size])
    yield (described(x, 64), out, bias, 64, 1, 0.5), {"BIASED": True, "BLOCK": 64}
    yield (described(x.clone(), 64), out[4:], bias, 63, 1, 0.25), {"BIASED": True, "BLOCK": 64}
    yield (
        (described(x, 64), out[1:], bias, 63, 1, 0.25),
        {"BIASED": True, "BLOCK": 64},
    )  # not aligned to 16 bytes
    yield (described(x, 64), out, bias, 64, 16, 0.5), {"BIASED": True, "BLOCK": 64}
    yield (described(x, 64), out, bias, 64, 17, 0.5), {"BIASED": True, "BLOCK": 64}
    yield (described(x, 64), out, bias, 64, 18, 0.5), {"BIASED": True, "BLOCK": 64}
    yield (described(x, 64), out, bias, 2**31, 18, 0.5), {"BIASED": True, "BLOCK": 64}
    yield (described(x, 64), out, bias, 64, 2**40, 0.5), {"BIASED": True, "BLOCK": 64}
    yield (described(x, 64), out.half(), bias, 64, 1, 0.5), {"BIASED": True, "BLOCK": 64}
    yield (described(x.half(), 64), out, bias, 64, 1, 0.5), {"BIASED": True, "BLOCK": 64}
    yield (described(x, 32), out, bias, 64, 1, 0.5), {"BIASED": True, "BLOCK": 32}
    yield (described(x, 64), out, None, 64, 1, 0.5), {"BIASED": False, "BLOCK": 64}
    yield (described(x, 64), out, bias, 64, 1, 0.5), {"BLOCK": 64, "BIASED": True, "num_warps": 8}
    yield (
        (described(x, 64), out, bias),
        {"scale": 0.5, "stride": 1, "count": 64, "BIASED": True, "BLOCK": 64},
    )


def calls_of_values():
    """Vary the tensors and integers of NamedTuples."""
    x, y = torch.randn(2000), torch.randn(2000)
    for strides in ((1, 1), (1, 2), (3, 16), (4, 32), (16, 3), (5, 2**40)):
        yield (Tables(x, y), Strides(*strides), y), {"BLOCK": 64}
    yield (Tables(y, x), Strides(1, 1), y), {"BLOCK": 64}
    yield (Tables(y, x.half()), Strides(1, 1), y), {"BLOCK": 64}
    yield (Tables(y[1:], x), Strides(1, 1), y), {"BLOCK": 64}  # not aligned to 16 bytes
    yield (Tables(y[1:], x[1:]), Strides(1, 1), y), {"BLOCK": 64}
    yield (Tables(y[1:], x[1:]),), {"p_out": y[1:], "strides": Strides(1, 1), "BLOCK": 32}


@pytest.mark.parametrize(("jitted", "calls"), [(_kernel, calls), (_kernel_of_values, calls_of_values)])
def test_starts_what_triton_starts(started, jitted, calls):
    given = list(calls())
    for arguments, named in given:
        jitted[(3, 2)](*arguments, **named, **OPTIONS)
    expected = started.copy()
    kernel = launcher.kernel_launcher(jitted)
    for _ in range(3):
        started.clear()
        for arguments, named in given:
            kernel[(3, 2)](*arguments, **named)
        assert started == expected
    assert len({name for name, *_ in expected}) > 7  # the calls are in fact different


def test_known_launches_do_not_ask_triton(started, monkeypatch):
    kernel = launcher.kernel_launcher(_kernel)
    arguments, named = next(calls())
    kernel[(1,)](*arguments, **named)
    monkeypatch.setattr(type(_kernel), "run", lambda *args, **named: pytest.fail("asked Triton"))
    kernel[(1,)](*arguments, **named)
    assert len(started) == 2


def test_versions_that_fail_their_trial_go_through_triton(started, monkeypatch):
    monkeypatch.setattr(launcher, "launches_directly", lambda: False)
    kernel = launcher.kernel_launcher(_kernel)
    asked = []
    run = type(_kernel).run
    monkeypatch.setattr(type(_kernel), "run", lambda self, *args, **named: asked.append(run(self, *args, **named)))
    arguments, named = next(calls())
    for _ in range(2):
        kernel[(1,)](*arguments, **named)
    assert len(asked) == len(started) == 2
