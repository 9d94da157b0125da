# SPDX-License-Identifier: Apache-2.0
"""Unusual inputs are computed correctly or refused with a message; never a wrong result."""

import pickle

import pytest
import torch

import dynaxx as dx
from dynaxx import trained
from dynaxx.integrations.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from dynaxx.layout.paging import PagedCache
from dynaxx.testing import make_qkv

LAYOUT = dx.SlidingWindow(16).layout(64, block_size=16)


def inputs():
    return make_qkv(1, 64, 64, 4, 2, 32)


SIZES = trained.NsaSizes(16, 16, 16, 2, 1, 1, 16)
BLOCKS = (torch.arange(64, dtype=torch.int32) // 16)[None, :, None, None].expand(1, 64, 2, 1)
CALLS = {
    "attention": lambda q, k, v: dx.sparse_attention(q, k, v, LAYOUT, sinks=q[0, 0, :, 0], backend="cpu"),
    "the reference": lambda q, k, v: dx.sparse_attention(q, k, v, LAYOUT, backend="reference"),
    "slopes": lambda q, k, v: dx.sparse_attention(q, k, v, LAYOUT, position_bias=dx.Alibi(q[0, 0, :, 0])),
    "packed": lambda q, k, v: flash_attn_varlen_func(q[0], k[0], v[0], [0, 5, 64], [0, 5, 64], 59, 59),
    "blocks": lambda q, k, v: trained.selected_attention(q, k, v, BLOCKS, block_size=16),
    "tokens": lambda q, k, v: trained.selected_attention(q, k, v, BLOCKS * 16, block_size=1, sinks=q[0, 0, :, 0]),
    "nsa": lambda q, k, v: trained.native_sparse_attention(q, k, v, (k[:, ::16], v[:, ::16]), q[..., :3], SIZES),
    "decoding": lambda q, k, v: dx.sparse_decode(q[:, -1:], PagedCache.contiguous(k, v), sinks=q[0, 0, :, 0]),
    "pages": lambda q, k, v: dx.sparse_decode(
        q[:, -1:], dx.summarize_pages(PagedCache.contiguous(k, v, page_size=16)), dx.PageBudget(2)
    ),
    "decoding of tokens": lambda q, k, v: trained.selected_decode(
        q[:, -1:], PagedCache.contiguous(k, v), BLOCKS[:, -1:], block_size=16
    ),
    "a cache that grows": lambda q, k, v: flash_attn_with_kvcache(
        q[:, -1:], k.clone(), v.clone(), k[:, :1], v[:, :1], cache_seqlens=9
    ),
    "an indexer": lambda q, k, v: trained.index_tokens(q, k[:, :, 0], q[..., 0], trained.TopKTokens(4)),
    "a choice": lambda q, k, v: dx.select_blocks(q, k, dx.TopK(1, dx.MinMax()), block_size=16).kv_indices,
}


def negative(x):
    """Return -x as a view with a pending sign, such as the imaginary part of a conjugate."""
    return torch.complex(x, x).conj().imag


@pytest.mark.parametrize("call", CALLS)
def test_views_of_the_negative(call):
    given = inputs()
    assert all(negative(x).is_neg() for x in given)
    assert torch.equal(CALLS[call](*map(negative, given)), CALLS[call](*(-x for x in given)))
    leaves = [x.requires_grad_() for x in given]
    out = CALLS[call](*leaves)
    if out.requires_grad:
        do = torch.randn(out.shape)
        got = torch.autograd.grad(out, leaves, negative(do), retain_graph=True)
        want = torch.autograd.grad(out, leaves, -do)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("every", [1, 2])
def test_no_queries(every):
    """An empty tensor keeps its odd strides in `contiguous`."""
    q, k, v = (x.repeat_interleave(2, -1)[..., ::2] if every == 2 else x for x in inputs())
    q, layout = q[:, :0].requires_grad_(), dx.SlidingWindow(16).layout(0, 64, block_size=16)
    for backend in ("cpu", "reference"):
        out = dx.sparse_attention(q, k, v, layout, backend=backend)
        assert out.shape == q.shape
        assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape


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
    layout = dx.SlidingWindow(16).layout(64, block_size=16)
    dx.sparse_attention(*inputs(), layout)  # the choice of a backend is kept with the layout
    with pytest.raises(error, match=message):
        dx.sparse_attention(*change(*inputs()), layout)


def test_sinks_that_are_none():
    with pytest.raises(TypeError, match="`sinks` must be a tensor"):
        dx.sparse_attention(*inputs(), LAYOUT, sinks=1.0)


def test_a_window_that_is_none():
    with pytest.raises(TypeError, match="must be an integer or"):
        dx.SlidingWindow(3.5)


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
