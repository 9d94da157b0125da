# SPDX-License-Identifier: Apache-2.0
"""`sparse_attention` under `torch.library`: opcheck, compilers, fake tensors, meta."""

import pytest
import torch
import torch.fx.experimental._config
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import dynaxx as dx
from dynaxx.ops import library
from dynaxx.testing import make_qkv

PATTERN = dx.SlidingWindow(20) | dx.Sink(2)


def loss(q, k, v, layout, backend="auto"):
    out, lse = dx.sparse_attention(q * 1.5, k, v, layout, return_lse=True, backend=backend)
    return out.square().sum() + lse.sum()


@pytest.mark.parametrize(
    ("backend", "dtype", "softcap"),
    [
        ("cpu", torch.float32, None),
        ("cpu", torch.bfloat16, 3.0),
        ("reference", torch.float64, None),
        ("reference", torch.float32, 2.0),
    ],
)
def test_opcheck(backend, dtype, softcap):
    q, k, v = make_qkv(2, 35, 50, 4, 2, 8, 12, dtype=dtype)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    layout = library.layout_tensors(PATTERN.layout(35, 50, block_size=(16, 32)), q)
    settings = (16, 32, 0.25, softcap, backend)
    for needs_grad in (False, True):
        inputs = [x.clone().requires_grad_(needs_grad) for x in (q, k, v)]
        torch.library.opcheck(
            library.attention_forward, (*inputs, layout, *settings, needs_grad, None, False, library.NO_PATTERN)
        )
    out, lse = library.attention_forward(q, k, v, layout, *settings, True, None, False, library.NO_PATTERN)
    inputs = (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse)
    torch.library.opcheck(library.attention_backward, (*inputs, layout, *settings, None, False, library.NO_PATTERN))


def compiled(function, **options):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True, **options), counter


@pytest.mark.parametrize("backend", ["auto", "reference"])
@torch.fx.experimental._config.patch(use_duck_shape=False)  # else equal sizes count as one size
def test_one_compilation_serves_several_lengths(backend):
    run, counter = compiled(loss, dynamic=True)
    for seqlen in (70, 129, 200, 257):
        inputs = [x.requires_grad_() for x in make_qkv(1, seqlen, seqlen, 4, 2, 16)]
        layout = PATTERN.layout(seqlen, block_size=32)
        got, want = run(*inputs, layout, backend), loss(*inputs, layout, backend)
        torch.testing.assert_close(got, want)
        for a, b in zip(torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs), strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1


def test_a_compiled_call_prepares_a_layout_once_and_forgets_it():
    run, _ = compiled(loss)
    q, k, v = make_qkv(1, 64, 64, 2, 1, 16)
    layout = dx.BlockLayout.from_dense(torch.ones(64, 64, dtype=torch.bool).tril(), block_size=32)
    before = len(library._layouts)
    for _ in range(3):
        run(q, k, v, layout)
    assert len(library._layouts) == before + 1
    torch._dynamo.reset()
    del layout, run
    assert len(library._layouts) == before


def test_a_compiled_call_knows_what_the_host_knows(monkeypatch):
    """Host copies of a device layout's tensors and row order are kept until its tensors are written to."""
    q = make_qkv(1, 200, 200, 2, 1, 16)[0].to("meta")
    here = (dx.SlidingWindow(20) | dx.GlobalTokens((3, 150), symmetric=True)).layout(200, block_size=16)
    there = here.to("meta")
    built = library._layout_of(library.layout_tensors(there, q), 200, 200, (16, 16))
    assert built.host is here
    assert built.kv_order is there.kv_order is not None
    there.kv_indices.zero_()
    built = library._layout_of(library.layout_tensors(there, q), 200, 200, (16, 16))
    assert built.host is None
    run, _ = compiled(loss)
    seen = []
    monkeypatch.setattr(library, "restore", lambda layout, kv_indptr: seen.append(kv_indptr))
    run(*make_qkv(1, 200, 200, 2, 1, 16), here)
    assert [x is here.kv_indptr for x in seen] == [True]


def test_a_layout_written_to_is_read_again():
    q, k, v = make_qkv(1, 64, 64, 2, 1, 16)
    layout = dx.LocalBlocks(1).layout(64, block_size=32, causal=False).to_dense()
    layout = dx.BlockLayout.from_dense(layout, block_size=32)
    tensors = library.layout_tensors(layout, q)
    before, _ = library.attention_forward(
        q, k, v, tensors, 32, 32, 0.25, None, "auto", False, None, False, library.NO_PATTERN
    )
    layout.kv_indices.copy_(layout.kv_indices.flip(0))
    after, _ = library.attention_forward(
        q, k, v, tensors, 32, 32, 0.25, None, "auto", False, None, False, library.NO_PATTERN
    )
    want = dx.sparse_attention(q, k, v, dx.BlockLayout.from_dense(~PATTERN_DENSE, block_size=32), scale=0.25)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, want)


PATTERN_DENSE = torch.block_diag(torch.ones(32, 32), torch.ones(32, 32)).bool()


def test_fake_and_meta_tensors_have_the_real_shapes():
    q, k, v = make_qkv(2, 35, 50, 4, 2, 8, 12, dtype=torch.bfloat16)
    layout = PATTERN.layout(35, 50, block_size=16)
    want = dx.sparse_attention(q, k, v, layout, return_lse=True)
    mode = FakeTensorMode()
    with mode:
        got = dx.sparse_attention(*(mode.from_tensor(x) for x in (q, k, v)), layout, return_lse=True)
    meta = dx.sparse_attention(*(x.to("meta") for x in (q, k, v)), layout.to("meta"), return_lse=True)
    for result in (got, meta):
        assert [(x.shape, x.dtype, x.stride()) for x in result] == [(x.shape, x.dtype, x.stride()) for x in want]


def test_a_packed_call_compiles():
    run, counter = compiled(loss)
    layout = dx.packed_layout(PATTERN, (0, 30, 30, 77), block_size=32)
    inputs = [x[0].requires_grad_() for x in make_qkv(1, 77, 77, 4, 2, 16)]
    got, want = run(*inputs, layout), loss(*inputs, layout)
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs), strict=True):
        torch.testing.assert_close(a, b)
    assert counter.frame_count == 1


def test_softcap_and_sinks_compile():
    def capped(q, k, v, layout, sinks):
        out, lse = dx.sparse_attention(q * 1.5, k, v, layout, softcap=3.0, sinks=sinks, return_lse=True)
        return out.square().sum() + lse.sum()

    run, counter = compiled(capped)
    layout = dx.packed_layout(PATTERN, (0, 30, 30, 77), block_size=32)
    inputs = [*(x[0].requires_grad_() for x in make_qkv(1, 77, 77, 4, 2, 16)), torch.randn(4, requires_grad=True)]
    got, want = run(*inputs[:3], layout, inputs[3]), capped(*inputs[:3], layout, inputs[3])
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs), strict=True):
        torch.testing.assert_close(a, b)
    assert counter.frame_count == 1


def test_a_wrong_layout_is_refused_under_a_compiler():
    q, k, v = make_qkv(1, 64, 64, 4, 2, 16)
    layout = PATTERN.layout(64, block_size=16)
    bad = dx.BlockLayout(64, 64, layout.block_size, layout.kv_indptr, layout.kv_num_partial, layout.kv_indices + 9,
                         layout.kv_masks, layout.masks)  # fmt: skip
    run, _ = compiled(loss)
    with pytest.raises(ValueError, match=r"`kv_indices` must be in \[0"):
        run(q, k, v, bad)


def test_a_module_exports():
    q, k, v = make_qkv(1, 64, 64, 4, 2, 16)
    layout = PATTERN.layout(64, block_size=32)

    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return dx.sparse_attention(q, k, v, layout)

    exported = torch.export.export(Attention(), (q, k, v))
    targets = [node.target for node in exported.graph.nodes]
    assert torch.ops.dynaxx.attention_forward.default in targets
    torch.testing.assert_close(exported.module()(q, k, v), dx.sparse_attention(q, k, v, layout))


def test_a_dispatch_mode_sees_the_op():
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    q, k, v = (x.requires_grad_() for x in make_qkv(1, 64, 64, 4, 2, 16))
    layout = PATTERN.layout(64, block_size=32)
    with Watch():
        got = torch.autograd.grad(loss(q, k, v, layout), (q, k, v))
    assert {torch.ops.dynaxx.attention_forward.default, torch.ops.dynaxx.attention_backward.default} <= set(seen)
    for a, b in zip(got, torch.autograd.grad(loss(q, k, v, layout), (q, k, v)), strict=True):
        torch.testing.assert_close(a, b)


def test_a_call_that_passed_its_checks_does_not_vouch_for_other_calls():
    layout = dx.Causal().layout(64, block_size=16)
    q, k, v = (torch.randn(1, 64, 2, 8) for _ in range(3))
    first = dx.sparse_attention(q, k, v, layout)
    assert torch.equal(dx.sparse_attention(q, k, v, layout), first)
    with pytest.raises(ValueError, match="must agree with k"):
        dx.sparse_attention(q, k, v[:, :63], layout)
    with pytest.raises(TypeError, match="q's dtype"):
        dx.sparse_attention(q, k, v.double(), layout)
    with pytest.raises(ValueError, match="`softcap`"):
        dx.sparse_attention(q, k, v, layout, softcap=0)
    with pytest.raises(ValueError, match="`backend`"):
        dx.sparse_attention(q, k, v, layout, backend="mine")
    with pytest.raises(dx.UnsupportedInputError):
        dx.sparse_attention(q, k, v, layout, backend="hopper")
    q.requires_grad_()
    assert dx.sparse_attention(q, k, v, layout).requires_grad
    with torch.no_grad():
        assert not dx.sparse_attention(q, k, v, layout).requires_grad
    torch.testing.assert_close(dx.sparse_attention(q.double(), k.double(), v.double(), layout).float(), first)
