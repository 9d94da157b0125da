# SPDX-License-Identifier: Apache-2.0
"""ALiBi and T5's bias by buckets against dense fp64 attention, on every backend and through every way to call."""

from itertools import pairwise, product

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

import dynaxx as dx
from biases import KINDS, RULES, SHAPES, bias_of, check, dense, inputs
from dynaxx.core.library import ISA_VARIABLE
from dynaxx.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
from dynaxx.ops import column_sums
from dynaxx.testing.oracle import oracle_attention


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_dtypes(shape, dtype):
    for i, kind in enumerate(KINDS):
        check(dx.sparse_attention, shape, list(RULES)[i % len(RULES)], kind, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_with_softcap_and_scale(kind):
    for scale in (1.0, -0.5, 0.0):
        check(dx.sparse_attention, "grouped", "window", kind, torch.float32, scale=scale, softcap=3.0)
        check(dx.sparse_attention, "cached keys", "causal", kind, torch.float32, scale=scale)


@pytest.mark.parametrize("kind", KINDS)
def test_gathers_without_the_core(kind, monkeypatch):
    monkeypatch.setenv(ISA_VARIABLE, "torch")
    check(dx.sparse_attention, "grouped", "window", kind, torch.float32, softcap=3.0)


def test_more_heads_than_a_wave_and_many_threads():
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 300, heads, 16, generator=generator).bfloat16() for heads in (6, 2, 2))
    layout = dx.SlidingWindow(100).layout(300, block_size=32)
    found = []
    for threads in (1, 3):
        table = torch.ones(32, 6, requires_grad=True)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            out = dx.sparse_attention(q, k, v, layout, position_bias=dx.T5Bias(table))
            found.append(torch.autograd.grad(out.float().square().sum(), table)[0])
        finally:
            torch.set_num_threads(before)
    assert torch.equal(*found)


def test_packed_sequences_attend_as_alone():
    ends = (0, 33, 33, 90)
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 90, 2, 16))
    table = torch.randn(32, 2, requires_grad=True)
    layout = dx.packed_layout(dx.SlidingWindow(40), ends, block_size=16)
    found = dx.sparse_attention(q, k, v, layout, position_bias=dx.T5Bias(table))
    alone = [
        dx.sparse_attention(
            *(x[None, a:b] for x in (q, k, v)),
            dx.SlidingWindow(40).layout(b - a, block_size=16),
            position_bias=dx.T5Bias(table),
        )[0]
        for a, b in pairwise(ends)
        if b > a
    ]
    assert torch.allclose(found, torch.cat(alone), atol=2e-6)
    wanted = torch.autograd.grad(torch.cat(alone).square().sum(), (q, table))
    for a, b in zip(torch.autograd.grad(found.square().sum(), (q, table)), wanted, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    longer = dx.packed_layout(dx.Causal(), (0, 40, 90), (0, 50, 90), block_size=16)
    with pytest.raises(ValueError, match="as many keys as queries"):
        dx.sparse_attention(q, k, v, longer, position_bias=dx.T5Bias(table))


def test_compiled_and_transformed():
    q, k, v = (torch.randn(2, 70, heads, 16) for heads in (4, 2, 2))
    layout = dx.Causal().layout(70, block_size=32)
    slopes = torch.rand(4, requires_grad=True)

    def loss(q, slopes):
        return dx.sparse_attention(q, k, v, layout, position_bias=dx.Alibi(slopes)).square().sum()

    leaf = q.clone().requires_grad_()
    wanted = torch.autograd.grad(loss(leaf, slopes), (leaf, slopes))
    near = lambda found: [
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-4) for a, b in zip(found, wanted, strict=True)
    ]
    near(torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(leaf, slopes), (leaf, slopes)))
    near(torch.func.grad(loss, argnums=(0, 1))(q, slopes.detach()))
    many = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, None))(q[None], slopes.detach())
    near([x[0] for x in many])
    table = torch.randn(32, 4, requires_grad=True)
    by_table = lambda table: dx.sparse_attention(q, k, v, layout, position_bias=dx.T5Bias(table)).square().sum()
    found = torch.compile(by_table, backend="aot_eager", fullgraph=True)(table)
    for a, b in zip(torch.autograd.grad(found, table), torch.autograd.grad(by_table(table), table), strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-4)


def test_buckets_are_those_of_t5():
    for buckets, most, both in product((4, 8, 32, 33), (17, 20, 128, 1000), (True, False)):
        table = torch.arange(buckets, dtype=torch.float64)[:, None]
        ahead = torch.arange(most + 9, -most - 9, -1, dtype=torch.float64)
        found = dx.T5Bias(table, both, most).by_distance(ahead)[0, 0].long()
        assert torch.equal(found, T5Attention._relative_position_bucket(ahead.long(), both, buckets, most))


def test_flash_attn_takes_slopes():
    q, k, v = torch.randn(3, 2, 50, 4, 16)
    slopes = torch.rand(2, 4)
    layout = dx.SlidingWindow(20).layout(50)
    wanted = dx.sparse_attention(q, k, v, layout, position_bias=dx.Alibi(slopes))
    assert torch.equal(flash_attn_func(q, k, v, causal=True, window_size=(19, 0), alibi_slopes=slopes), wanted)
    packed = flash_attn_varlen_func(
        q[0], k[0], v[0], (0, 20, 50), (0, 20, 50), 30, 30, causal=True, alibi_slopes=slopes[0]
    )
    alone = flash_attn_func(*(x[:1, 20:] for x in (q, k, v)), causal=True, alibi_slopes=slopes[0])
    torch.testing.assert_close(packed[20:], alone[0])
    with pytest.raises(ValueError, match="`alibi_slopes` must be"):
        flash_attn_func(q, k, v, alibi_slopes=slopes[:, :3])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_column_sums(dtype):
    q, k, _ = (x.detach() for x in inputs("grouped", dtype))
    layout = RULES["window"].layout(130, causal=False, block_size=16)
    sinks, bias = torch.randn(6), bias_of("t5 encoder", 6)
    found = column_sums(q, k, layout, softcap=3.0, sinks=sinks, position_bias=bias)
    each = torch.eye(130, dtype=torch.float64)[None, :, None].expand(1, -1, 6, -1)
    given = q.double(), k.double().repeat_interleave(3, 2), each, layout.to_dense()
    weights, _ = oracle_attention(*given, softcap=3.0, sinks=sinks, bias=dense(bias, 130, 130))
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found.double(), weights.sum(1).detach(), atol=2e-4, rtol=1e-4)
    packed = dx.packed_layout(dx.Causal(), (0, 40, 130), block_size=16)
    alone = column_sums(q[:, 40:], k[:, 40:], dx.Causal().layout(90, block_size=16))
    torch.testing.assert_close(column_sums(q[0], k[0], packed)[:, 40:], alone[0], atol=1e-5, rtol=1e-5)


def test_what_does_not_fit_is_refused():
    q, k, v = torch.randn(3, 1, 20, 2, 16)
    layout = dx.Causal().layout(20)
    for bias, said in (
        (dx.Alibi(torch.ones(3)), "2 q heads"),
        (dx.Alibi(torch.ones(2, 2)), "batch 1"),
        (dx.Alibi(torch.ones(1, 1, 2)), "`slopes` must be"),
        (dx.T5Bias(torch.ones(32, 2), max_distance=8), "`max_distance`"),
        (dx.T5Bias(torch.ones(2, 2)), "2 buckets per direction"),
    ):
        with pytest.raises(ValueError, match=said):
            dx.sparse_attention(q, k, v, layout, position_bias=bias)
    with pytest.raises(TypeError, match="`position_bias` must be"):
        dx.sparse_attention(q, k, v, layout, position_bias=torch.ones(2))
    assert "adds no position bias" in str(dx.explain(q, k, v, layout, position_bias=dx.Alibi(torch.ones(2))))
    empty = torch.randn(1, 0, 2, 16)
    assert (
        dx.sparse_attention(empty, empty, empty, dx.Full().layout(0), position_bias=dx.Alibi(torch.ones(2))).numel()
        == 0
    )
