# SPDX-License-Identifier: Apache-2.0
"""Sinks in the softmax of each backend: random problems stay within derived budgets, and edge cases work."""

from functools import partial

import pytest
import torch

import dynaxx as dx
from dynaxx.core.library import active_library
from dynaxx.kernels.attention import reference as reference
from dynaxx.kernels.attention.cpu import gather
from dynaxx.kernels.sinks import add_sinks, include_sinks
from dynaxx.testing import Expected, random_problem

BACKENDS = ("reference", "cpu")


def problems_with_sinks(count, dtype):
    """Return the first random problems that have sinks."""
    found, seed = [], 0
    while len(found) < count:
        problem = random_problem(seed, dtype=dtype)
        found += [(seed, problem)] if "sinks" in problem.inputs else []
        seed += 1
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_problems(dtype):
    for seed, problem in problems_with_sinks(12, dtype):
        expected = Expected(problem, seed)
        for backend in BACKENDS:
            for report in expected.reports(partial(problem.attend, backend=backend)):
                assert report.ok, f"{report}, {backend}, seed {seed}"


def case(sink, dtype=torch.float32):
    """Return q, k, v, a layout under which the first queries see nothing, and two sinks."""
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, heads, 16, generator=gen).to(dtype) for n, heads in ((60, 2), (40, 1), (40, 1)))
    layout = dx.SlidingWindow(9).layout(60, 40, block_size=32)
    return q, k, v, layout, torch.tensor([sink, 0.5], dtype=dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sink", [-torch.inf, -300.0, 0.0, 300.0])
def test_sinks_of_any_size(sink, backend):
    """A sink of -inf changes nothing; one far above all scores leaves out at 0; gradients stay finite."""
    q, k, v, layout, sinks = case(sink)
    given = [x.requires_grad_() for x in (q, k, v, sinks)]
    out, lse = dx.sparse_attention(q, k, v, layout, sinks=sinks, return_lse=True, backend=backend)
    assert out[0, :20].eq(0).all(), "these queries see no key"
    assert lse[0, 0, :20].eq(sink).all()
    seen = lse[0, 0].isfinite()
    grads = torch.autograd.grad(out.sum() + lse[:, :, seen].sum(), given)
    assert all(x.isfinite().all() for x in grads)
    if sink == -torch.inf:
        plain, plain_lse = dx.sparse_attention(q, k, v, layout, return_lse=True, backend=backend)
        assert torch.equal(out[:, :, 0], plain[:, :, 0])
        assert torch.equal(lse[:, 0], plain_lse[:, 0])
        assert grads[3][0] == 0
    if sink == 300.0:
        assert out[:, :, 0].abs().max() < 1e-30
        torch.testing.assert_close(lse[:, 0], torch.full_like(lse[:, 0], sink))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_sinks_alone(backend):
    q, k, v, layout, sinks = case(0.3)
    out = dx.sparse_attention(q, k, v, layout, sinks=sinks.requires_grad_(), backend=backend)
    (grad,) = torch.autograd.grad(out.square().sum(), sinks)
    expected = dx.sparse_attention(
        *(x.double() for x in (q, k, v)), layout, sinks=(wide := sinks.detach().double().requires_grad_())
    )
    torch.testing.assert_close(
        grad.double(), torch.autograd.grad(expected.square().sum(), wide)[0], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_included_in_place_are_those_added(dtype):
    gen = torch.Generator().manual_seed(0)
    out, lse = torch.randn(2, 30, 3, 16, generator=gen).to(dtype), torch.randn(2, 3, 30, generator=gen)
    lse[0, 1, :7], out[0, :7, 1] = -torch.inf, 0
    for sink in (-torch.inf, 0.0, 90.0):
        sinks = torch.tensor([sink, sink, 1.0], dtype=dtype)
        want = add_sinks(out, lse, sinks)
        for mine, theirs in zip(include_sinks(out.clone(), lse, sinks), want, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_gathers_and_the_core_agree_with_the_definition():
    q, k, v, layout, sinks = case(0.3)
    want = reference.attention_forward(q, k, v, layout, 0.25, 2.0, sinks)
    found = [gather.attention_forward(q, k, v, layout, 0.25, 2.0, sinks)]
    if active_library() is not None:
        from dynaxx.kernels.attention.cpu.forward import attention_forward

        found.append(attention_forward(q, k, v, layout, 0.25, 2.0, sinks))
    for out, lse in found:
        torch.testing.assert_close(out, want[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse, want[1], rtol=1e-5, atol=1e-6)
