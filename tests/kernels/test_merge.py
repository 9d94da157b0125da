# SPDX-License-Identifier: Apache-2.0
"""Merging two results in place equals `merge_states`, under Triton's interpreter and on a GPU; sinks do on a GPU."""

import pytest
import torch

import dynaxx as dx
from dynaxx.kernels.sinks import include_sinks as sinks_by_torch
from interpreter import DEVICE, on_gpu, run_interpreted, runs_here, starts_interpreter

pytest.importorskip("triton")


@pytest.mark.slow
@starts_interpreter
def test_under_the_interpreter():
    run_interpreted(__file__)


@runs_here
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("seqlen", "dim"), [(1, 16), (70, 24), (64, 128)])
def test_two_results_become_one(dtype, seqlen, dim):
    from dynaxx.kernels.primitives.merge import merge_into

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


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("what", ["merge", "sinks"])
def test_no_warp_overwrites_what_another_has_not_read(what):
    """Without a barrier, 2 % to 10 % of the rows were wrong in as many programs."""
    from dynaxx.kernels.primitives.merge import merge_into
    from dynaxx.kernels.primitives.sinks import include_sinks

    seqlen, heads = 65536, 8
    layout = dx.SlidingWindow(128).layout(seqlen, block_size=128, device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator, device=DEVICE)
    out, lse = draw(1, seqlen, heads, 128).bfloat16(), draw(1, heads, seqlen)
    if what == "sinks":
        sinks = draw(heads)
        wanted, _ = sinks_by_torch(out.clone(), lse.clone(), sinks)
        got, _ = include_sinks(out, lse, sinks, layout)
    else:
        other, other_lse = draw(1, seqlen, heads, 128).bfloat16(), draw(1, heads, seqlen)
        wanted = dx.merge_states([(out, lse), (other, other_lse)]).out
        merge_into(out, lse, other, other_lse, layout)
        got = out
    torch.testing.assert_close(got.float(), wanted.float(), rtol=2e-2, atol=2e-2)
