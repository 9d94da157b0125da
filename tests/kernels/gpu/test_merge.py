# SPDX-License-Identifier: Apache-2.0
"""Merging two results in place equals `merge_states`, under Triton's interpreter and on a GPU."""

import pytest
import torch

import dynaxx as dx
from interpreter import DEVICE, run_interpreted, runs_here, starts_interpreter

pytest.importorskip("triton")


@starts_interpreter
def test_under_the_interpreter():
    run_interpreted(__file__)


@runs_here
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("seqlen", "dim"), [(1, 16), (70, 24), (64, 128)])
def test_two_results_become_one(dtype, seqlen, dim):
    from dynaxx.kernels.gpu.merge import merge_into

    generator = torch.Generator().manual_seed(seqlen)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    whole = draw(2, seqlen, 5, dim).to(DEVICE, dtype)
    outs = [whole[:, :, 1:4], draw(2, seqlen, 3, dim).to(DEVICE, dtype)]
    lses = [(4 * draw(2, 3, seqlen)).to(DEVICE) for _ in range(2)]
    lses[0][0, 0, 0] = lses[1][0, 0, 0] = lses[0][1, 2, -1] = lses[1][1, 1, 0] = -torch.inf
    for out, lse in zip(outs, lses, strict=True):
        out.transpose(1, 2)[lse == -torch.inf] = 0
    before = whole.clone()
    wanted = dx.merge_states([(outs[0].float(), lses[0]), (outs[1].float(), lses[1])])
    merge_into(outs[0], lses[0], outs[1], lses[1], dx.Causal().layout(seqlen, device=DEVICE))
    torch.testing.assert_close(outs[0], wanted.out.to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    torch.testing.assert_close(lses[0], wanted.lse, rtol=1e-5, atol=1e-5)
    assert torch.equal(whole[:, :, [0, 4]], before[:, :, [0, 4]])
