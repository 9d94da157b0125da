# SPDX-License-Identifier: Apache-2.0
"""The GPU's own tanh is as accurate as the softcap of the Hopper kernels needs; PTX promises less."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dynaxx.kernels.compat import OPTIONS
from dynaxx.kernels.primitives.hopper.softcap import capped
from interpreter import on_hopper

BLOCK = 1024


@gluon.jit
def capped_kernel(p_x, p_t, rate, BLOCK: gl.constexpr):
    at = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, gl.BlockedLayout([4], [32], [4], [0]))
    gl.store(p_t + at, capped(gl.load(p_x + at), rate))


def tanh(x):
    out = torch.empty_like(x)
    capped_kernel[(x.numel() // BLOCK,)](x, out, 1.0, BLOCK=BLOCK, num_warps=4, **OPTIONS)
    return out


@pytest.mark.gpu
@on_hopper
def test_every_float_is_right_to_16_bits():
    """Cover 2 ** -20, below which tanh(x) equals x in fp32, to 32, far beyond which tanh is 1."""
    mantissas = torch.arange(1 << 23, dtype=torch.int32, device="cuda")
    for exponent in range(-20, 5):
        x = (mantissas | (exponent + 127) << 23).view(torch.float32)
        found, exact = tanh(x).double(), x.double().tanh()
        assert (found / exact - 1).abs().max() < 2**-16, exponent
        assert torch.equal(tanh(-x).double(), -found)


@pytest.mark.gpu
@on_hopper
def test_the_ends():
    x = torch.tensor([0.0, 1e-30, 40.0, torch.inf, -torch.inf, torch.nan], device="cuda").repeat(BLOCK)
    torch.testing.assert_close(tanh(x)[:5].cpu(), torch.tensor([0.0, 1e-30, 1.0, 1.0, -1.0]), rtol=2**-16, atol=0.0)
    assert tanh(x)[5].isnan()
