# SPDX-License-Identifier: Apache-2.0
"""Kernels are compiled ahead in several processes, without a GPU here: for an H100, into a cache of the test's own."""

import os

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402

from dynaxx.kernels.compat import OPTIONS  # noqa: E402
from dynaxx.kernels.device import interpreted  # noqa: E402
from dynaxx.kernels.runtime import compile_ahead as ahead  # noqa: E402
from dynaxx.kernels.runtime.launcher import kernel_launcher  # noqa: E402

pytestmark = pytest.mark.skipif(interpreted(), reason="compiles")


class Hopper:
    """A driver that answers Triton's questions during compilation."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "_active", Hopper())
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        yield tmp_path


def add_kernel():
    """Return a kernel that no other test has compiled."""

    @kernel_launcher
    @triton.jit
    def _add_kernel(p_x, p_out, n, ADDED: tl.constexpr):
        o_x = tl.arange(0, 64)
        tl.store(p_out + o_x, tl.load(p_x + o_x, mask=o_x < n) + ADDED, mask=o_x < n)

    return _add_kernel


def kernels_in(folder):
    return len(list(folder.glob("*/_add_kernel.cubin")))


@pytest.mark.parametrize("processes", [1, 3])
def test_every_kind_of_launch_is_compiled_once_and_nothing_runs(cache, processes):
    add, out = add_kernel(), torch.full((64,), 7.0)
    found = []

    def launch():
        made = torch.empty(64)
        for added in (1, 2, 3, 1):
            add[(1,)](out, out, 64, ADDED=added)
        found.append(made)

    assert ahead.compile_ahead(launch, processes) == 3
    assert kernels_in(cache) == 3
    assert (out == 7).all()
    assert (found[0] == 0).all()  # whatever reads results reads valid numbers
    assert ahead.compile_ahead(launch, processes) == 0


def test_kernels_that_no_fork_compiled_are_compiled_here(cache, monkeypatch):
    add, out = add_kernel(), torch.zeros(64)
    monkeypatch.setattr(ahead, "_fork", lambda compiles: os.posix_spawnp("sleep", ["sleep", "60"], os.environ))
    monkeypatch.setattr(ahead, "MAX_SECONDS", 0.1)
    monkeypatch.setattr(ahead, "MAX_SECONDS_EACH", 0.0)
    assert ahead.compile_ahead(lambda: [add[(1,)](out, out, 64, ADDED=added) for added in (4, 5)], 2) == 2
    assert kernels_in(cache) == 2


def test_a_kernel_that_does_not_compile_raises_at_its_launch(cache):
    @kernel_launcher
    @triton.jit
    def _wrong_kernel(p_x):
        tl.static_assert(False, "wrong on purpose")

    x = torch.zeros(64)
    assert ahead.compile_ahead(lambda: _wrong_kernel[(1,)](x), 2) == 1
    with pytest.raises(Exception, match="wrong on purpose"):  # a launch reads the metadata, where Triton 3.8 raises
        _ = _wrong_kernel.kernel.warmup(x, grid=(1,), **OPTIONS).metadata


def test_an_error_of_the_call_is_raised_and_its_kernels_are_compiled(cache):
    add, out = add_kernel(), torch.zeros(64)

    def launch():
        add[(1,)](out, out, 64, ADDED=6)
        raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        ahead.compile_ahead(launch, 2)
    assert kernels_in(cache) == 1
