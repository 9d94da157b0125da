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
from triton.backends.nvidia import driver as nvidia  # noqa: E402
from triton.compiler import CompiledKernel  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

import dynaxx as dx  # noqa: E402
from dynaxx.kernels.compat import OPTIONS  # noqa: E402
from dynaxx.kernels.runtime import launcher, recorder  # noqa: E402
from dynaxx.kernels.runtime.launch_cache import record_or_replay  # noqa: E402


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


class WithDescriptors:
    """Imitate a launcher that encodes descriptors in Python, in the form of the installed Triton."""

    def __init__(self, src, metadata):
        from triton.backends.nvidia.driver import wrap_handle_tensordesc

        self.launch = wrap_handle_tensordesc(self.record, src.signature, metadata.tensordesc_meta)
        self.global_scratch_size = self.profile_scratch_size = 0
        self.launch_cooperative_grid = self.launch_pdl = False
        if ONE_LAUNCHER:
            self.arg_annotations, self.kernel_signature = ["annotations"], b"signature"

    @staticmethod
    def record(*arguments):
        STARTED.append((*arguments[:-1], *arguments[-1]) if ONE_LAUNCHER else arguments)

    def __call__(self, grid_x, grid_y, grid_z, stream, function, packed, *arguments):
        hooks, values = arguments[:3], [address(x) for x in arguments[3:]]
        before = (grid_x, grid_y, grid_z, stream, function, False, False)
        if ONE_LAUNCHER:
            self.launch(*before, packed, *hooks, None, None, self.arg_annotations, self.kernel_signature, values)
        else:
            self.launch(*before, None, None, packed, *hooks, *values)


ONE_LAUNCHER = not hasattr(nvidia, "make_launcher")  # since 3.7, one launcher in C starts all kernels
HOOKS = slice(8, 11) if ONE_LAUNCHER else slice(10, 13)
FIRST = 15 if ONE_LAUNCHER else 13  # position of the first argument of the kernel


@pytest.fixture
def described(monkeypatch):
    """Let launchers encode descriptors, as ("map", address, ...)."""
    fill = "fill_tma_descriptor_tiled" if ONE_LAUNCHER else "fill_tma_descriptor"
    monkeypatch.setattr(Driver, "launcher_cls", WithDescriptors)
    monkeypatch.setattr(Utils, fill, lambda self, *arguments: ("map", *arguments), raising=False)
    if ONE_LAUNCHER:
        monkeypatch.setattr(Utils, "launch", staticmethod(WithDescriptors.record), raising=False)


def test_repeats_launch_the_tensors_of_the_layout(started):
    """Cached launches read NamedTuples of a layout's tensors from the layout at hand."""
    kernel = launcher.kernel_launcher(_kernel_of_values)

    def start(layout, out):
        kernel[(1,)](Tables(layout.kv_indptr, layout.kv_masks), Strides(1, 2), out, BLOCK=4)

    layout = dx.SlidingWindow(16).layout(64, block_size=16)
    for _ in range(3):
        record_or_replay(start, layout, (torch.empty(64, dtype=torch.int32),))
    layout.kv_masks.set_(layout.kv_masks.clone())
    record_or_replay(start, layout, (torch.empty(64, dtype=torch.int32),))
    expected = (layout.kv_indptr.data_ptr(), layout.kv_masks.data_ptr())
    assert started[-1][-1][0] == expected
    assert started[0][-1][0][0] == expected[0]
    assert started[0][-1][0][1] != expected[1]


def test_repeats_launch_what_triton_launches(started, described, monkeypatch):
    kernel = launcher.kernel_launcher(_kernel)

    def start(layout, x, out, _, count):
        described = TensorDescriptor(x, [1, 64], [64, 1], [1, 64])
        named = {"count": count, "stride": 1, "scale": 0.5, "BIASED": True, "BLOCK": 64}
        kernel[(3, 2)](described, out, layout.kv_indptr, **named)

    layout = dx.SlidingWindow(16).layout(64, block_size=16)
    batches = [(torch.randn(1, 64), torch.empty(64)) for _ in range(3)]
    monkeypatch.setattr(recorder, "MAX_ADDRESSES", 2)
    for x, out in batches * 3:
        record_or_replay(start, layout, (x, out), True, 64)
    again = started.copy()
    started.clear()
    for x, out in batches * 3:
        start(layout, x, out, True, 64)
    of_kernel = lambda calls: [arguments[: HOOKS.start] + arguments[HOOKS.stop :] for arguments in calls]
    assert of_kernel(again) == of_kernel(started)
    assert len({str(arguments[FIRST]) for arguments in again}) == 3  # the encoded addresses
    assert len(again) == 9


def test_strides_are_not_taken_for_tensors_of_a_layout(started):
    """Small integers are shared objects, so strides may be the very integers of the layout, such as its lengths."""
    kernel = launcher.kernel_launcher(_kernel_of_values)

    def start(layout, out):
        tables = Tables(layout.kv_indptr, layout.kv_masks)
        kernel[(1,)](tables, Strides(layout.seqlen_q, layout.block_size[0]), out, BLOCK=4)

    layout = dx.SlidingWindow(16).layout(64, block_size=16)
    for _ in range(4):
        record_or_replay(start, layout, (torch.empty(64, dtype=torch.int32),))
    assert [values[1] for *_, values in started] == [(64, 16)] * 4
