# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels with ALiBi and T5's bias agree with dense fp64 attention, on a GPU or under the interpreter."""

import pytest
import torch

import dynaxx as dx
from biases import bias_of, check, numbers
from interpreter import DEVICE, INTERPRETED, run_interpreted, runs_here, starts_interpreter

pytest.importorskip("triton")
from dynaxx.kernels.schedule import split
from dynaxx.layout.derived import PerLayout


@starts_interpreter
def test_under_the_interpreter():
    run_interpreted(__file__)


def moved(bias):
    """Return a bias on the device of the kernels."""
    if isinstance(bias, dx.Alibi):
        return dx.Alibi(bias.slopes.to(DEVICE))
    return dx.T5Bias(bias.table.to(DEVICE), bias.bidirectional, bias.max_distance)


def attend(q, k, v, layout, *, position_bias, **options):
    q, k, v = (x.to(DEVICE) for x in (q, k, v))
    found = dx.sparse_attention(
        q, k, v, layout.to(DEVICE), position_bias=moved(position_bias), backend="triton", **options
    )
    return [x.cpu() for x in found]


HALF = (torch.bfloat16, torch.float16)
CASES = [  # shape, rule, kind, dtype, block size, softcap and scale
    ("encoder", "window", "alibi per entry", torch.float16, (64, 64), {}),
    ("encoder", "full", "t5 encoder", torch.float32, (32, 16), {"softcap": 3.0}),
    ("cached keys", "causal", "alibi", torch.float32, (16, 32), {"scale": -0.5}),
    ("cached keys", "causal", "t5 decoder", torch.float16, (64, 64), {"softcap": 3.0}),
    ("one key", "full", "t5 encoder", torch.float32, (16, 16), {"scale": 0.0}),
]


@runs_here
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_dense_attention(case):
    *given, block_size, options = case
    check(attend, *given, block_size=block_size, **options)


GPU_CASES = [
    *(("head_dim 128", "full", "t5 encoder", dtype, (128, 128), {}) for dtype in HALF),
    *(("head_dim 64", "causal", "alibi per entry", dtype, (64, 64), {}) for dtype in HALF),
    ("head_dim 64", "window", "t5 decoder", torch.float32, (128, 128), {}),
    ("head_dim 128", "full", "alibi", torch.bfloat16, (64, 32), {"softcap": 3.0}),
    ("fewer keys", "window", "t5 encoder", torch.bfloat16, (16, 16), {}),
]


@runs_here
@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="large, and the interpreter does not multiply bf16")
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_large_heads_and_bf16(case):
    *given, block_size, options = case
    check(attend, *given, block_size=block_size, **options)


@runs_here
def test_long_rows_and_columns_are_split(monkeypatch):
    monkeypatch.setattr(split, "longest_part", lambda *_: 3)
    monkeypatch.setattr(split, "_kept", PerLayout(by_form=False))
    layout = (dx.SlidingWindow(20) | dx.GlobalTokens(5, symmetric=True)).layout(130, block_size=32)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 130, 2, 16, generator=generator) for _ in range(3))
    found = []
    for backend in ("triton", "reference"):
        bias, leaves = bias_of("t5 decoder", 2), [x.clone().requires_grad_() for x in (q, k, v)]
        call = attend if backend == "triton" else dx.sparse_attention
        options = {} if backend == "triton" else {"backend": backend}
        out, lse = call(*leaves, layout, position_bias=bias, return_lse=True, **options)
        grads = torch.autograd.grad(out.square().sum() + lse.sum(), (*leaves, numbers(bias)))
        found.append((out.detach(), lse.detach(), *grads))
    for mine, wanted in zip(*found, strict=True):
        torch.testing.assert_close(mine, wanted, atol=2e-4, rtol=2e-4)


@runs_here
def test_gradients_of_tables_repeat_and_show_what_is_not_finite():
    q, k, v = (torch.randn(1, 70, 2, 16, device=DEVICE) for _ in range(3))
    layout = dx.SlidingWindow(40).layout(70, block_size=32, device=DEVICE)
    table = torch.randn(32, 2, device=DEVICE, requires_grad=True)

    def gradient(v):
        out = dx.sparse_attention(q, k, v, layout, position_bias=dx.T5Bias(table), backend="triton")
        return torch.autograd.grad(out.square().sum(), table)[0]

    assert torch.equal(gradient(v), gradient(v))
    if INTERPRETED:  # numpy warns of products with infinity
        return
    v[0, 30, 1] = torch.inf
    found = gradient(v)
    assert found[:, 0].isfinite().all()
    assert not found[:, 1].isfinite().all()


@pytest.mark.gpu
@runs_here
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_the_portable_kernels_are_chosen():
    q, k, v = (torch.randn(1, 256, 2, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    layout = dx.SlidingWindow(100).layout(256, device=DEVICE)
    explained = dx.explain(q, k, v, layout, position_bias=dx.Alibi(torch.ones(2, device=DEVICE)))
    assert explained.chosen == "triton"
    assert "adds no position bias" in str(explained)
