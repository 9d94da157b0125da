# SPDX-License-Identifier: Apache-2.0
"""Unusual inputs are computed correctly or refused with a message; never a wrong result."""

import pickle

import pytest
import torch

import dynaxx as dx
from dynaxx.testing import make_qkv

LAYOUT = dx.SlidingWindow(16).layout(64, block_size=16)


def inputs():
    return make_qkv(1, 64, 64, 4, 2, 32)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_views_of_the_negative(backend):
    """Tensors with a pending sign, such as the imaginary part of a conjugate, are read with their sign."""
    q, k, v = inputs()
    negative = lambda x: torch.complex(x, x).conj().imag
    assert negative(q).is_neg()
    attend = lambda *x: dx.sparse_attention(*x, LAYOUT, backend=backend)
    assert torch.equal(attend(negative(q), negative(k), negative(v)), attend(-q, -k, -v))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    do = torch.randn(1, 64, 4, 32)
    got = torch.autograd.grad(attend(*leaves), leaves, negative(do))
    want = torch.autograd.grad(attend(*leaves), leaves, -do)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_second_derivatives_are_refused_and_not_left_out(needs_grad):
    leaves = [x.requires_grad_() for x in inputs()]
    out = dx.sparse_attention(*leaves, LAYOUT, backend="cpu")
    do = torch.randn_like(out, requires_grad=needs_grad)
    plain = torch.autograd.grad(out, leaves, do, retain_graph=True)
    grads = torch.autograd.grad(out, leaves, do, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(grads, plain, strict=True))
    with pytest.raises(
        NotImplementedError, match="no second derivatives; use `sparse_attention` with backend='reference'"
    ):
        grads[0].square().sum().backward()


def test_the_reference_has_second_derivatives():
    q, k, v = (x.double().requires_grad_() for x in make_qkv(1, 6, 6, 1, 1, 3))
    layout = dx.SlidingWindow(4).layout(6, block_size=16)
    attend = lambda *x: dx.sparse_attention(*x, layout, backend="reference")
    assert torch.autograd.gradgradcheck(attend, (q, k, v))


def test_a_compiled_call_refuses_them_too():
    leaves = [x.requires_grad_() for x in inputs()]
    out = torch.compile(lambda *x: dx.sparse_attention(*x, LAYOUT, backend="cpu"), backend="eager")(*leaves)
    grads = torch.autograd.grad(out.sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        grads[0].square().sum().backward()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda q, k, v: ([1], k, v), TypeError, "`q` must be a tensor, got list"),
        (lambda q, k, v: (q.numpy(), k, v), TypeError, "`q` must be a tensor, got ndarray"),
        (lambda q, k, v: (q.to_sparse(), k, v), ValueError, "`q` must be a strided tensor, got .*torch.sparse_coo"),
        (lambda q, k, v: (q[..., :0], k[..., :0], v), ValueError, "head_dim must be >= 1, got 0 and 32"),
        (lambda q, k, v: (q.int(), k.int(), v.int()), TypeError, "`q` must be one of"),
        (lambda q, k, v: (q[0], k[0], v[0]), ValueError, "`q` must be .batch, seqlen, heads, head_dim."),
    ],
)
def test_invalid_inputs_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        dx.sparse_attention(*change(*inputs()), dx.SlidingWindow(16).layout(64, block_size=16))


def test_sinks_that_are_none():
    with pytest.raises(TypeError, match="`sinks` must be a tensor"):
        dx.sparse_attention(*inputs(), LAYOUT, sinks=1.0)


def test_a_window_that_is_none():
    with pytest.raises(TypeError, match="must be an integer or"):
        dx.SlidingWindow(3.5)


@pytest.mark.parametrize("head_dim", [1, 2, 3])
def test_products_of_whole_numbers_for_any_head_dim(head_dim):
    from dynaxx.selection.scorers.int8 import _products

    draw = lambda rows: torch.randint(-127, 128, (2, 3, rows, head_dim), dtype=torch.int8)
    q, k = draw(20), draw(70)
    assert torch.equal(_products(q, k), q.int() @ k.int().mT)


def test_an_error_can_leave_a_worker_process():
    """A pool whose worker raises an error that cannot be unpickled breaks or hangs."""
    with pytest.raises(dx.UnsupportedInputError) as caught:
        dx.sparse_attention(*inputs(), LAYOUT, backend="triton")
    copied = pickle.loads(pickle.dumps(caught.value))
    assert str(copied) == str(caught.value)
    assert (copied.problem, copied.reasons) == (caught.value.problem, caught.value.reasons)


def test_a_cache_is_shown_by_its_sizes():
    k = torch.randn(2, 50, 2, 16)
    cache = dx.summarize_pages(dx.PagedCache.contiguous(k, k[..., :8], page_size=16))
    assert repr(cache) == (
        "PagedCache(batch=2, kv_heads=2, head_dim=16, head_dim_v=8, page_size=16, max_pages=4, contiguous, "
        "dtype=torch.float32, device=cpu, summaries)"
    )
