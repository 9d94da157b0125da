# SPDX-License-Identifier: Apache-2.0
"""Packed batches give each sequence the result it has alone, forward and backward."""

import random
import time
from itertools import accumulate, pairwise

import pytest
import torch

import dynaxx as dx
from dynaxx.layout import BLOCK_SIZES, pack_layouts
from dynaxx.selection.packed import select_packed_blocks
from dynaxx.testing import check_forward, check_gradients, make_qkv, random_pattern

LENGTHS = (0, 0, 1, 5, 16, 17, 33, 64, 70)


def cumulative(lengths):
    return tuple(sum(lengths[:s]) for s in range(len(lengths) + 1))


def ragged_case(seed):
    rng = random.Random(seed)
    seqlens_q = [rng.choice(LENGTHS) for _ in range(rng.randint(1, 6))]
    seqlens_k = [n if rng.random() < 0.6 else rng.choice((0, 1, 7, 32, 65)) for n in seqlens_q]
    rule = random_pattern(rng, min([n for n in seqlens_k if n] or [1]))
    while "Documents" in repr(rule):  # documents fix the length of their sequence
        rule = random_pattern(rng, 1)
    options = {"causal": rng.random() < 0.7, "block_size": (rng.choice(BLOCK_SIZES), rng.choice(BLOCK_SIZES))}
    return rng, rule, cumulative(seqlens_q), cumulative(seqlens_k), options


def attend_each(q, k, v, ends_q, ends_k, layout_of):
    """Run the reference once per sequence."""
    outs, lses = [q.new_zeros(0, q.shape[1], v.shape[2])], [q.new_zeros(q.shape[1], 0)]
    for s in range(len(ends_q) - 1):
        (a, b), (c, d) = ends_q[s : s + 2], ends_k[s : s + 2]
        if b == a:
            continue
        if c == d:
            outs.append(q.new_zeros(b - a, q.shape[1], v.shape[2]))
            lses.append(q.new_full((q.shape[1], b - a), -torch.inf))
            continue
        one = (q[None, a:b], k[None, c:d], v[None, c:d])
        out, lse = dx.sparse_attention(*one, layout_of(*one[:2]), return_lse=True, backend="reference")
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, dim=1)


@pytest.mark.parametrize("seed", range(120))
def test_a_packed_layout_shows_what_each_sequence_alone_shows(seed):
    _, rule, ends_q, ends_k, options = ragged_case(seed)
    layout = dx.packed_layout(rule, ends_q, ends_k, **options).validate()
    want = torch.zeros(ends_q[-1], ends_k[-1], dtype=torch.bool)
    dense = want.clone()
    for s in range(len(ends_q) - 1):
        (a, b), (c, d) = ends_q[s : s + 2], ends_k[s : s + 2]
        if b > a and d > c:
            want[a:b, c:d] = rule.layout(b - a, d - c, **options).to_dense()[0, 0]
            every = torch.ones(b - a, d - c, dtype=torch.bool)
            dense[a:b, c:d] = every.tril(d - c - b + a) if options["causal"] else every
    assert torch.equal(layout.to_dense()[0, 0], want)
    if want.numel():
        tight = dx.BlockLayout.from_dense(want, block_size=options["block_size"])
        most = dx.BlockLayout.from_dense(dense, block_size=options["block_size"])
        assert layout.nnz == tight.nnz
        assert layout.density(options["causal"]) == pytest.approx(tight.nnz / max(1, most.nnz))


@pytest.mark.parametrize("seed", range(120))
def test_packed_attention_is_that_of_each_sequence(seed):
    rng, rule, ends_q, ends_k, options = ragged_case(seed)
    dtype = torch.float64 if seed % 2 else torch.float32
    kv_heads, group_size = rng.choice((1, 2)), rng.choice((1, 2, 3))
    inputs = [x[0] for x in make_qkv(1, ends_q[-1], ends_k[-1], kv_heads * group_size, kv_heads, 16, 24, dtype=dtype)]
    layout = dx.packed_layout(rule, ends_q, ends_k, **options)
    ends = {"cu_seqlens_q": torch.tensor(ends_q), "cu_seqlens_k": torch.tensor(ends_k)}

    def of_one(one_q, one_k):
        return rule.layout(one_q.shape[1], one_k.shape[1], **options)

    packed = [x.clone().requires_grad_() for x in inputs]
    alone = [x.clone().requires_grad_() for x in inputs]
    got = dx.sparse_attention(*packed, layout, **ends, return_lse=True)
    want = attend_each(*alone, ends_q, ends_k, of_one)
    weights = torch.randn(got.out.shape, dtype=dtype)
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), **close)
    for out, lse in (got, want):
        if out.requires_grad:  # the oracle has no gradient if no sequence has both queries and keys
            ((out * weights).sum() + lse.masked_fill(lse == -torch.inf, 0.0).sin().sum()).backward()
    for a, b in zip(packed, alone, strict=True):
        grad = torch.zeros_like(b) if b.grad is None else b.grad
        torch.testing.assert_close(a.grad, grad, **close)


@pytest.mark.parametrize("seed", range(8))
def test_packed_attention_keeps_the_derived_tolerance(seed):
    _, rule, ends_q, ends_k, options = ragged_case(seed)
    layout = dx.packed_layout(rule, ends_q, ends_k, **options)
    inputs = make_qkv(1, ends_q[-1], ends_k[-1], 4, 2, 16)
    if not ends_k[-1]:
        pytest.skip("the oracle needs a key")

    def attend(q, k, v, layout):
        out, lse = dx.sparse_attention(q[0], k[0], v[0], layout, return_lse=True)
        return out[None], lse[None]

    for check in (check_forward, check_gradients):
        for report in check(attend, *inputs, layout):
            assert report.ok, report


@pytest.mark.parametrize("rule", [dx.TopK(0.4), dx.SlidingWindow(20) | dx.TopK(1), dx.Sink(3) | dx.TopP(0.6)], ids=repr)
@pytest.mark.parametrize("lengths", [(70, 0, 33, 64, 1), (64, 128, 32)])
def test_each_sequence_selects_as_it_would_alone(rule, lengths):
    ends = cumulative(lengths)
    q, k, v = (x[0] for x in make_qkv(1, ends[-1], ends[-1], 4, 2, 16, dtype=torch.float64))
    layout = select_packed_blocks(q, k, rule, ends, block_size=32)
    want = attend_each(q, k, v, ends, ends, lambda one_q, one_k: dx.select_blocks(one_q, one_k, rule, block_size=32))
    budgeted = select_packed_blocks(q, k, rule, ends, block_size=32, memory_budget=4096)
    assert torch.equal(budgeted.to_dense(), layout.to_dense())
    assert dx.explain(q, k, v, layout).chosen
    got = dx.sparse_attention(q, k, v, layout, cu_seqlens_q=ends, return_lse=True)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_packed_results_merge():
    ends = cumulative((40, 0, 24))
    q, k, v = (x[0] for x in make_qkv(1, 64, 64, 4, 2, 16, dtype=torch.float64))
    near, all_keys = (dx.packed_layout(rule, ends, block_size=16) for rule in (dx.SlidingWindow(7), dx.Causal()))
    far = dx.BlockLayout.from_dense(all_keys.to_dense() & ~near.to_dense(), block_size=16)
    out_far, lse_far = dx.sparse_attention(q[None], k[None], v[None], far, return_lse=True)
    merged = dx.merge_states([dx.sparse_attention(q, k, v, near, return_lse=True), (out_far[0], lse_far[0])])
    want = dx.sparse_attention(q, k, v, all_keys, return_lse=True)
    for a, b in zip(merged, want, strict=True):
        torch.testing.assert_close(a, b)


def test_aligned_sequences_visit_no_block_more():
    rule, ends = dx.SlidingWindow(50) | dx.Sink(2), (0, 64, 256, 384)
    alone = sum(rule.layout(b - a, block_size=32).nnz for a, b in pairwise(ends))
    assert dx.packed_layout(rule, ends, block_size=32).nnz == alone


def test_a_copy_on_a_device_knows_its_host_layout_and_serves_training():
    """Without the host layout, GPU kernels balance no long rows; inference tensors cannot be saved for backward."""
    with torch.inference_mode():
        there = dx.packed_layout(dx.SlidingWindow(21), (0, 50, 131), block_size=16, device="meta")
    assert not there.kv_indptr.is_inference()
    assert there.host is dx.packed_layout(dx.SlidingWindow(21), (0, 50, 131), block_size=16)
    assert there.kv_order is None or there.kv_order.device.type == "meta"


def test_nothing_at_all():
    for ends in ((0,), (0, 0, 0)):
        layout = dx.packed_layout(dx.Causal(), ends)
        out, lse = dx.sparse_attention(*(x[0] for x in make_qkv(1, 0, 0, 4, 2, 16)), layout, return_lse=True)
        assert (tuple(out.shape), tuple(lse.shape)) == ((0, 4, 16), (4, 0))


def test_the_layout_must_be_for_these_lengths():
    q, k, v = (x[0] for x in make_qkv(1, 64, 64, 4, 2, 16))
    layout = dx.packed_layout(dx.Causal(), (0, 20, 64), block_size=16)
    batch = dx.Causal().layout(64, block_size=16)
    for call, message in (
        (lambda: dx.sparse_attention(q, k, v, layout, cu_seqlens_q=(0, 21, 64)), "equal the lengths of the layout"),
        (lambda: dx.sparse_attention(q, k, v, layout, cu_seqlens_q=(0, 64)), "as many entries as the layout, 3"),
        (lambda: dx.sparse_attention(q, k, v, layout, cu_seqlens_k=(0, 20, 64)), "without `cu_seqlens_q`"),
        (lambda: dx.sparse_attention(q, k, v, batch), "with a packed layout"),
        (lambda: dx.sparse_attention(q, k, v, batch, cu_seqlens_q=(0, 20, 64)), "must be packed"),
        (lambda: dx.sparse_attention(q[None], k[None], v[None], layout, cu_seqlens_q=(0, 20, 64)), "packed `q` must"),
        (lambda: dx.sparse_attention(q[:50], k, v, layout), "50 x 64 tokens"),
        (lambda: dx.packed_layout(dx.Causal(), (0, 5, 3)), "start at 0 and never decrease"),
        (lambda: dx.packed_layout(dx.Causal(), (0, 5), (0, 5, 7)), "`cu_seqlens_q` and `cu_seqlens_k` must"),
        (lambda: pack_layouts([batch], (0, 60), block_size=16), r"`layouts\[0\]` must be for"),
        (lambda: pack_layouts([batch], (0, 64), block_size=32), "must agree in block size"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    for ends in ((0, 20.5, 64), torch.tensor([0, 20.5, 64]), (False, 20, 64), torch.tensor([0, 20, 64]) + 0j):
        with pytest.raises(TypeError, match=r"`cu_seqlens_q` must be (an integer|integers), got"):
            dx.sparse_attention(q, k, v, layout, cu_seqlens_q=ends)
    with pytest.raises(ValueError, match="equal the lengths of the layout"):
        dx.sparse_attention(q, k, v, layout, cu_seqlens_q=(0, 20, 2**40))
    with pytest.raises(TypeError, match="select_packed_blocks"):
        dx.packed_layout(dx.TopK(1), (0, 64))


SIMPLE = (
    dx.Causal(),
    dx.SlidingWindow((9, 4)),
    dx.SlidingWindow(16) | dx.Sink(4),
    dx.GlobalTokens((1, 7)),
    dx.SlidingWindow(300) & dx.Causal(),
    dx.Dilated(4, 2),
)


@pytest.mark.parametrize("seed", range(40))
def test_all_sequences_at_once_show_what_each_shows_alone(seed):
    rng = random.Random(seed)
    lengths = [(rng.choice(LENGTHS), rng.choice((*LENGTHS, 100))) for _ in range(rng.choice((1, 3, 30)))]
    ends_q, ends_k = (cumulative(side) for side in zip(*lengths, strict=True))
    ends_k = ends_q if rng.random() < 0.5 else ends_k
    rule, causal = rng.choice(SIMPLE), rng.random() < 0.6
    block_size = (rng.choice(BLOCK_SIZES), rng.choice(BLOCK_SIZES))
    alone = [
        rule.layout(b - a, d - c, causal=causal, block_size=block_size) if b > a and d > c else None
        for (a, b), (c, d) in zip(pairwise(ends_q), pairwise(ends_k), strict=True)
    ]
    found = dx.packed_layout(rule, ends_q, ends_k, causal=causal, block_size=block_size)
    wanted = pack_layouts(alone, ends_q, ends_k, block_size=block_size)
    found.validate()
    assert found.nnz <= wanted.nnz
    assert torch.equal(found.to_dense(), wanted.to_dense())


@pytest.mark.parametrize("rule", [dx.Causal(), dx.SlidingWindow(64) | dx.Sink(4)])
@pytest.mark.parametrize("same", [True, False])
def test_thousands_of_sequences_take_milliseconds(rule, same):
    rng = random.Random(0)
    lengths = [(rng.randint(1, 100), rng.randint(100, 300)) for _ in range(2000)]
    ends_q, ends_k = (list(accumulate(side, initial=0)) for side in zip(*lengths, strict=True))
    start = time.thread_time()
    dx.packed_layout(rule, ends_q, ends_q if same else ends_k, block_size=64)
    assert time.thread_time() - start < 0.5  # sequence by sequence, it takes several seconds
