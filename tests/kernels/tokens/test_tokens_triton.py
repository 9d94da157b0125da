# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels over chosen tokens against fp64: under Triton's interpreter on a CPU, and on a GPU."""

import pytest
import torch

import dynaxx as dx
from dynaxx.testing.tokens import random_token_case
from interpreter import DEVICE, run_interpreted, runs_here, starts_interpreter

pytest.importorskip("triton")


@starts_interpreter
def test_under_the_interpreter():
    run_interpreted(__file__)


def check(case):
    for report in case.check("triton"):
        assert report.ok, f"{report}\n{case.label}"


@runs_here
@pytest.mark.parametrize("seed", range(5))
def test_random_cases(seed):
    """fp32 and fp16, since the interpreter does not multiply bf16."""
    sizes = {"head_dims": ((8, 8), (24, 16)), "lengths": (0, 1, 7), "groups": (1, 2, 3, 5, 17), "slots": (1, 5, 20)}
    check(random_token_case(seed, dtype=torch.float16 if seed % 2 else torch.float32, device=DEVICE, **sizes))


@runs_here
def test_latent_widths():
    """576 = 512 + 64: rows in two parts."""
    sizes = {"head_dims": ((576, 512),), "lengths": (3,), "groups": (3,), "slots": (3,), "block_sizes": (1,)}
    check(random_token_case(3, device=DEVICE, **sizes))


@runs_here
def test_sinks_odd_strides_and_the_same_bits():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 12, heads, 40, device=DEVICE)[..., ::2].requires_grad_() for heads in (4, 2, 2))
    sinks = torch.randn(4, device=DEVICE)
    chosen = torch.stack([torch.randperm(12, device=DEVICE)[:6] for _ in range(12)])[None, :, None]
    run = lambda backend, *inputs: dx.selected_attention(*inputs, chosen, block_size=1, sinks=sinks, backend=backend)
    out = run("triton", q, k, v)
    torch.testing.assert_close(out.double(), run("reference", q.double(), k.double(), v.double()), atol=1e-6, rtol=1e-5)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    for one, other in zip(grads, torch.autograd.grad(run("triton", q, k, v).sum(), (q, k, v)), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(grads, torch.autograd.grad(run("reference", q, k, v).sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@runs_here
def test_numbers_out_of_range_are_not_read():
    q, k, v = (torch.randn(1, 12, 2, 8, device=DEVICE) for _ in range(3))
    from dynaxx.kernels.triton.tokens import operators
    from dynaxx.layout.tokens import TokenSpans

    spans = TokenSpans((0, 12), (0, 12))
    chosen = torch.tensor([[[1 << 30, -7, 3, 12]]], dtype=torch.int32, device=DEVICE).expand(12, 1, 4).contiguous()
    out, lse = operators.forward(q[0], k[0], v[0], operators.prepare(chosen, spans, q[0], k[0], v[0]), 0.3)
    torch.testing.assert_close(out[4:], v[0, 3].expand(8, 2, 8))
    assert (lse[:, :3] == -torch.inf).all()
    assert not out[:3].any()
