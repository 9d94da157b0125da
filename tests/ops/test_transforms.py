# SPDX-License-Identifier: Apache-2.0
"""torch.func and tracers: grad, vjp and vmap work as with SDPA; everything else is refused with a message."""

import copy
import warnings
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

import dynaxx as dx
from dynaxx.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
from dynaxx.layout import ElementMasks, from_block_mask
from dynaxx.layout.hide_keys import hide_keys
from dynaxx.ops import column_sums
from dynaxx.patterns.base import _cached_layout
from dynaxx.patterns.packed import _cached

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap over SDPA warns, not our code
SEQLEN = 40
ROWS = torch.randn(1, SEQLEN, 4, 16)
CAUSAL = dx.Causal().layout(SEQLEN, block_size=16)


def see_pairs(b, h, q, k):
    return (q >= k) & (q * k % 3 > 0)


def ours(q, k, v):
    return dx.sparse_attention(q, k, v, CAUSAL)


def sdpa(q, k, v):
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(-3, -2)


def loss(attend):
    return lambda q, k, v: attend(q, k, v).square().sum()


def inputs(*lead, batch=2):
    torch.manual_seed(0)
    return [torch.randn(*lead, batch, SEQLEN, heads, 16) for heads in (4, 2, 2)]


def close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)


def test_grad():
    close(grad(loss(ours), (0, 1, 2))(*inputs()), grad(loss(sdpa), (0, 1, 2))(*inputs()))


def test_vjp():
    (out, pull), (wanted, wanted_pull) = vjp(ours, *inputs()), vjp(sdpa, *inputs())
    close(out, wanted)
    close(pull(torch.ones_like(out)), wanted_pull(torch.ones_like(out)))


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, 0), (2, 1, None)])
def test_vmap(in_dims):
    given = [x if d is None else torch.stack([x, x.flip(1), x / 2], d)
             for x, d in zip(inputs(), in_dims, strict=True)]  # fmt: skip
    close(vmap(ours, in_dims)(*given), vmap(sdpa, in_dims)(*given))
    each = vmap(grad(loss(ours), (0, 1, 2)), in_dims)(*given)
    close(each, vmap(grad(loss(sdpa), (0, 1, 2)), in_dims)(*given))
    whole = lambda attend: lambda *given: vmap(attend, in_dims)(*given).square().sum()
    close(grad(whole(ours), (0, 1, 2))(*given), grad(whole(sdpa), (0, 1, 2))(*given))


def test_vmap_of_vmap_and_both_outputs():
    q, k, v = inputs(2, 3)
    close(vmap(vmap(ours))(q, k, v), vmap(vmap(sdpa))(q, k, v))
    lse = vmap(lambda q, k, v: dx.sparse_attention(q, k, v, CAUSAL, return_lse=True).lse)(q[0], k[0], v[0])
    assert lse.shape == (3, 2, 4, SEQLEN)
    only_lse = lambda q: dx.sparse_attention(q, k[0, 0], v[0, 0], CAUSAL, return_lse=True).lse.sum()
    plain = q[0, 0].clone().requires_grad_()
    only_lse(plain).backward()
    close(grad(only_lse)(q[0, 0]), plain.grad)


def test_vmap_over_a_layout_of_the_batch():
    q, k, v = inputs(3)
    layout = dx.select_blocks(q[0], k[0], dx.TopK(2), block_size=16)
    assert layout.layout_batch == 2
    found = vmap(lambda *each: dx.sparse_attention(*each, layout))(q, k, v)
    close(found, torch.stack([dx.sparse_attention(*each, layout) for each in zip(q, k, v, strict=True)]))


def test_jacrev():
    layout = dx.Causal().layout(6, block_size=16)
    q, k, v = (torch.randn(1, 6, 1, 4) for _ in range(3))
    found = jacrev(lambda q: dx.sparse_attention(q, k, v, layout))(q)
    close(found, torch.autograd.functional.jacobian(lambda q: sdpa(q, k, v), q))


@pytest.mark.parametrize(
    "ask",
    [
        lambda q, f: jvp(f, (q,), (q,)),
        lambda q, f: jacfwd(f)(q),
        lambda q, f: hessian(lambda q: f(q).sum())(q),
        lambda q, f: grad(lambda q: grad(lambda q: f(q).square().sum())(q).sum())(q),
    ],
)
def test_other_derivatives_are_refused_in_words(ask):
    q, k, v = inputs()
    with pytest.raises(NotImplementedError, match=r"dynaxx have no (forward-mode|second) derivatives"):
        ask(q, lambda q: ours(q, k, v))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_no_tangent_is_dropped(which):
    given = inputs()
    with forward_ad.dual_level():
        given[which] = forward_ad.make_dual(given[which], torch.ones_like(given[which]))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            ours(*given)
        with torch.no_grad(), pytest.raises(NotImplementedError, match="forward-mode"):
            ours(*given)
        found = dx.sparse_attention(*given, CAUSAL, backend="reference")
        assert forward_ad.unpack_dual(found).tangent is not None
        assert ours(*inputs()).isfinite().all()  # without a tangent, nothing is refused


@pytest.mark.parametrize("trace", [torch.jit.trace])
def test_a_traced_call_computes(trace):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = trace(ours, tuple(inputs()), check_trace=False)
    q, k, v = (x + 1 for x in inputs())
    close(traced(q, k, v), sdpa(q, k, v))


@pytest.mark.parametrize("scale", [None, 0.3])
def test_a_traced_scale_is_not_rounded(scale):
    given = [x.double() for x in inputs()]
    run = lambda q, k, v: dx.sparse_attention(q, k, v, CAUSAL, scale=scale)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(run, tuple(given), check_trace=False)
    torch.testing.assert_close(traced(*given), run(*given), atol=1e-13, rtol=1e-13)


def test_operations_without_rules_refuse_transforms():
    q, k, v = inputs(3)
    with pytest.raises(NotImplementedError, match="`select_blocks` has no rules for torch"):
        vmap(lambda q, k: dx.select_blocks(q, k, dx.TopK(2)).nnz)(q, k)
    blocks = torch.zeros(2, SEQLEN, 2, 1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=r"selected attention has no rules for torch.*a batch for vmap"):
        vmap(lambda q, k, v: dx.trained.selected_attention(q, k, v, blocks))(q, k, v)
    used = torch.full((2,), SEQLEN, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=r"`sparse_decode` has no rules .* mapped dimension as the batch"):
        vmap(lambda q: dx.sparse_decode(q[:, :1], dx.PagedCache(k[0], v[0], used, page_size=16)))(q)


def by_tensors(indptr, num_partial, indices, mask_ids, bits, bands):
    return dx.BlockLayout(
        SEQLEN, SEQLEN, (16, 16), indptr, num_partial, indices, mask_ids, ElementMasks(bits, bands, 16)
    )


MADE = {
    "a pattern": lambda: (dx.SlidingWindow(9) | dx.Sink(3)).layout(SEQLEN, block_size=16),
    "documents": lambda: dx.Documents((0, 11, SEQLEN)).layout(SEQLEN, block_size=16),
    "a mask": lambda: dx.BlockLayout.from_dense(torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).tril(), block_size=16),
    "indices": lambda: dx.BlockLayout.from_block_indices(torch.zeros(1, 1, 3, 1).long(), SEQLEN, block_size=16),
    "heads": lambda: dx.BlockLayout.stack_heads([CAUSAL] * 4),
    "packed": lambda: dx.packed_layout(dx.Causal(), (0, 11, SEQLEN), block_size=16),
    "a block mask": lambda: from_block_mask(create_block_mask(see_pairs, None, None, SEQLEN, SEQLEN, device="cpu")),
    "a copy": lambda: copy.deepcopy((dx.SlidingWindow(9) | dx.Sink(3)).layout(SEQLEN, block_size=16)),
    "hidden keys": lambda: hide_keys(CAUSAL, torch.arange(SEQLEN)[None] > 20),
    "entries": lambda: dx.BlockLayout.from_entries(CAUSAL.grid(), *CAUSAL.entries(), copy.copy(CAUSAL.masks)),
    "selected": lambda: dx.select_blocks(ROWS, ROWS, dx.TopK(2), block_size=16).head_slice([3, 2, 0, 1]),
    "tensors": lambda: by_tensors(*(x.clone() for x in CAUSAL.tensors)),
}
TRANSFORMS = {
    "grad": lambda f: grad(f),
    "vjp": lambda f: lambda q, k, v: vjp(f, q, k, v)[1](torch.ones(()))[0],
    "vmap": lambda f: lambda *given: vmap(f)(*(x[None] for x in given))[0],
    "vmap of grad": lambda f: lambda *given: vmap(grad(f))(*(x[None] for x in given))[0],
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("made", MADE)
def test_layouts_may_be_made_within_a_transform(made, transform):
    """The first call makes the layout; what it keeps serves calls outside."""
    _cached_layout.clear()
    _cached.clear()
    make, given, kept = MADE[made], inputs(batch=1), []

    def run(q, k, v):
        layout = make()
        kept.append(layout)
        assert 0 < layout.density() <= 1
        return dx.sparse_attention(q, k, v, layout).square().sum()

    found = TRANSFORMS[transform](run)(*given)
    (layout,) = kept
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in (*layout.tensors, layout.kv_num_blocks))
    fixed = lambda q, k, v: dx.sparse_attention(q, k, v, layout).square().sum()
    close(found, TRANSFORMS[transform](fixed)(*given))
    leaf = given[0].requires_grad_()
    fixed(leaf, *given[1:]).backward()
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("made", MADE)
def test_a_layout_made_in_inference_mode_is_no_inference_tensor(made):
    with torch.inference_mode():
        layout = MADE[made]()
    assert not any(x.is_inference() for x in layout.tensors)


def test_a_layout_made_in_inference_mode_serves_a_compiled_training_step():
    """A compiler saves the layout for the backward pass."""
    with torch.inference_mode():
        layout = dx.BlockLayout.from_dense(CAUSAL.to_dense(), block_size=16)
    given = [x.requires_grad_() for x in inputs()]
    torch._dynamo.reset()
    compiled = torch.compile(loss(lambda *x: dx.sparse_attention(*x, layout)), backend="aot_eager")
    close(torch.autograd.grad(compiled(*given), given), torch.autograd.grad(loss(ours)(*given), given))


def test_masks_of_a_compiled_function_depend_on_no_mode():
    bands = torch.compile(lambda seen: ElementMasks.from_dense(seen).bands.sum(), backend="eager")
    seen = torch.ones(3, 16, 16, dtype=torch.bool).tril()
    with torch.inference_mode():
        found = bands(seen)
    assert found == bands(seen) == ElementMasks.from_dense(seen).bands.sum()


def test_a_layout_of_mapped_tensors_is_refused():
    blocks = torch.zeros(2, 1, 1, 3, 1, dtype=torch.int32)
    ends = torch.tensor([[0, 50, SEQLEN], [0, 20, SEQLEN]])
    x = torch.randn(SEQLEN, 2, 16)
    for make, given in [
        (lambda x: dx.BlockLayout.from_block_indices(x, SEQLEN, block_size=16).kv_indices, blocks),
        (lambda x: dx.packed_layout(dx.Causal(), x).kv_indices, ends),
        (lambda cu: flash_attn_varlen_func(x, x, x, cu, cu, SEQLEN, SEQLEN), ends.int()),
    ]:
        for outer in (lambda f: f, lambda f: lambda x: grad(lambda y: f(x).sum() * y)(torch.ones(()))):
            with pytest.raises((NotImplementedError, RuntimeError), match=r"torch.func|vmap"):
                vmap(outer(make))(given)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_compiled_transforms_compute_or_are_refused_in_words(transform):
    run = TRANSFORMS[transform](loss(ours))
    given = inputs()
    torch._dynamo.reset()
    close(torch.compile(run, backend="aot_eager")(*given), run(*given))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"within torch.func .* cannot be compiled into one graph; use fullgraph"):
        torch.compile(run, backend="aot_eager", fullgraph=True)(*given)


def test_operations_are_counted():
    q, k, v = inputs()
    q.requires_grad_()
    pairs = CAUSAL.nnz * 16 * 16 * 2 * 4
    with FlopCounterMode(display=False) as counter:
        out = ours(q, k, v)
        assert counter.get_total_flops() == 2 * pairs * (16 + 16)
        out.sum().backward()
    assert counter.get_total_flops() == 2 * pairs * (2 + 5) * 16
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        ours(*(torch.randn(x.shape) for x in (q, k, v)))
    assert counter.get_total_flops() == 2 * pairs * (16 + 16)


def test_operations_of_kernels_without_ops_are_counted():
    """The CPU core counts what it reads; the reference counts its own products."""
    q, k, v = inputs(batch=1)
    cache = dx.summarize_pages(dx.PagedCache.contiguous(k, v, page_size=16))
    step, tokens = q[:, -1:], torch.tensor([0, 3, -1], dtype=torch.int32).expand(1, SEQLEN, 2, 3)
    sizes = dx.trained.NsaSizes(16, 16, 16, 2, 1, 1, 16)
    pair = 2 * 4 * (16 + 16)  # of a query with all q heads
    for run, wanted in (
        (lambda: dx.sparse_decode(step, cache), SEQLEN * pair),
        (lambda: dx.sparse_decode(step, cache, window_size=(6, 0)), 7 * pair),
        (lambda: dx.sparse_decode(step, cache, dx.PageBudget(1)), 2 * 16 * pair + 2 * 3 * 16 * 4),
        (lambda: dx.sparse_decode(step, cache, tokens[:, 0, :, :1]), 16 * pair),
        (lambda: dx.trained.selected_attention(q, k, v, tokens[..., :1], block_size=16), SEQLEN * 16 * pair),
        (lambda: dx.trained.selected_attention(q, k, v, tokens, block_size=1), SEQLEN * 2 * pair),
        (lambda: dx.trained.selected_decode(step, cache, tokens[:, :1], block_size=1), 2 * pair),
        (lambda: dx.trained.index_tokens(q, k[:, :, 0], q[..., 0], dx.trained.TopKTokens(2)), 820 * 2 * 4 * 16),
    ):
        with FlopCounterMode(display=False) as counter:
            run()
        assert counter.get_total_flops() == wanted
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with FlopCounterMode(display=False) as counter:
        out = dx.trained.selected_attention(*leaves, tokens, block_size=1)
        once = counter.get_total_flops()
        out.sum().backward()
    assert counter.get_total_flops() == once * 7 // 2
    compressed = dx.trained.compress(k, sizes).detach(), dx.trained.compress(v, sizes).detach()
    gates = torch.ones(1, SEQLEN, 4, 3)
    with FlopCounterMode(display=False) as counter:
        dx.trained.native_sparse_attention(*leaves, compressed, gates, sizes)
    assert counter.get_flop_counts()["Global"][torch.ops.dynaxx.counted_flops] > 0


def test_a_traced_call_may_make_its_layout():
    """What the core writes is part of the recorded layout."""
    _cached_layout.clear()
    rule = dx.SlidingWindow((5, 3))
    run = lambda q, k, v: dx.sparse_attention(q, k, v, rule.layout(SEQLEN, block_size=16, causal=False))
    given = inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(run, tuple(given), check_trace=False)
    noise = torch.full((10_000,), 7, dtype=torch.int32)  # memory that the tracer might read
    del noise
    close(traced(*given), run(*given))


RECORDED = {
    "selected attention": lambda q, k, v: dx.trained.selected_attention(q, k, v, BLOCKS, block_size=16),
    "sparse_decode": lambda q, k, v: dx.sparse_decode(q[:, -1:], dx.PagedCache.contiguous(k, v, page_size=16)),
    "index_tokens": lambda q, k, v: dx.trained.index_tokens(q, k[:, :, 0], q[..., 0], dx.trained.TopKTokens(2)),
    "select_blocks": lambda q, k, v: dx.select_blocks(q, k, dx.TopK(1), block_size=16).kv_indices,
    "recall": lambda q, k, v: dx.recall(q, k, CAUSAL).per_head,
    "hide_keys": lambda q, k, v: dx.sparse_attention(q, k, v, hide_keys(CAUSAL, k[:, :, 0, 0] > 0)),
    "from_dense": lambda q, k, v: dx.sparse_attention(
        q, k, v, dx.BlockLayout.from_dense(q[0, :, 0, :1] > k[0, :, 0, 0], block_size=16)
    ),
    "from_block_mask": lambda q, k, v: dx.sparse_attention(q, k, v, from_block_mask(BLOCK_MASK)),
}
BLOCKS = torch.zeros(1, SEQLEN, 2, 1, dtype=torch.int32)
BLOCK_MASK = create_block_mask(see_pairs, None, None, SEQLEN, SEQLEN, device="cpu")


@pytest.mark.parametrize("recorder", ["jit.trace", "export"])
@pytest.mark.parametrize("call", RECORDED)
def test_operations_that_depend_on_values_refuse_to_be_recorded(call, recorder):
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return RECORDED[call](q, k, v)

    record = torch.export.export if recorder == "export" else partial(torch.jit.trace, check_trace=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(NotImplementedError, match=f"{call}.* by torch.{recorder}"):
            record(Module(), tuple(inputs(batch=1)))


def test_tensors_of_inference_mode_are_measured_outside_it():
    """A model's activations, as a hook keeps them."""
    given, weights = inputs(batch=1), torch.ones(1, SEQLEN, 4)
    with torch.inference_mode():
        q, k, _ = (x.clone() for x in given)
        sinks = q[0, 0, :, 0].clone()
    found = column_sums(q, k, CAUSAL, sinks=sinks)
    close(found, column_sums(given[0], given[1], CAUSAL, sinks=given[0][0, 0, :, 0]))
    loss = dx.trained.index_loss(q, k[:, :, 0], weights, q, k).loss
    close(loss, dx.trained.index_loss(given[0], given[1][:, :, 0], weights, *given[:2]).loss)


def test_column_sums_within_a_compiled_function():
    q, k, _ = inputs(batch=1)
    torch._dynamo.reset()
    run = torch.compile(lambda q, k: column_sums(q, k, CAUSAL) + 1, backend="eager")
    close(run(q, k), column_sums(q, k, CAUSAL) + 1)


@pytest.mark.parametrize("which", range(3))
def test_no_fake_tensor_reaches_the_core(which):
    """Its address is 0; torch refuses to mix it with others, whichever it is."""
    given = inputs()
    given[which] = FakeTensorMode().from_tensor(given[which])
    with pytest.raises(AssertionError, match="convert all Tensors to FakeTensors"):
        ours(*given)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_parts_without_memory_are_refused():
    q, k, v = inputs()
    fake = FakeTensorMode().from_tensor
    used, sinks = torch.full((2,), SEQLEN, dtype=torch.int32), torch.zeros(4)
    for call in (
        lambda: dx.sparse_attention(q, k, v, CAUSAL, sinks=fake(sinks)),
        lambda: dx.sparse_decode(q[:, :1], dx.PagedCache(fake(k), fake(v), used, page_size=16)),
        lambda: dx.trained.selected_attention(q, k, v, BLOCKS.expand(2, -1, -1, -1), block_size=16, sinks=fake(sinks)),
    ):
        with pytest.raises((NotImplementedError, AssertionError), match=r"memory of their own|convert all Tensors"):
            call()


def test_a_distributed_tensor_is_named():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        given = [DTensor.from_local(x, mesh, [Replicate()]) for x in inputs()]
        for call in (ours, lambda q, k, v: flash_attn_func(q, k, v, window_size=(5, 3))):
            with pytest.raises(TypeError, match="`q` must be a plain tensor, got a distributed tensor; pass"):
                call(*given)
    finally:
        torch.distributed.destroy_process_group()
