# SPDX-License-Identifier: Apache-2.0
"""Laws that hold for every rule and layout, on examples that hypothesis draws. The examples are the same in every
run.
"""

from itertools import pairwise

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dynaxx as dx
from dynaxx.layout import BLOCK_SIZES, BlockLayout, ElementMasks, from_block_mask, pack_layouts, to_block_mask
from dynaxx.testing import make_qkv

laws = settings(
    max_examples=40,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

lengths = st.integers(1, 90)
block_sizes = st.tuples(st.sampled_from(BLOCK_SIZES), st.sampled_from(BLOCK_SIZES))
leaves = st.one_of(
    st.builds(dx.SlidingWindow, st.integers(1, 60)),
    st.builds(dx.SlidingWindow, st.tuples(st.integers(-1, 20), st.integers(-1, 20))),
    st.builds(dx.Dilated, st.integers(1, 6), st.integers(1, 6)),
    st.builds(dx.Strided, st.integers(1, 50)),
    st.builds(dx.GlobalTokens, st.integers(0, 30), symmetric=st.booleans()),
    st.builds(dx.GlobalTokens, st.sets(st.integers(0, 89), max_size=4).map(tuple), symmetric=st.booleans()),
    st.builds(dx.Sink, st.integers(0, 5)),
    st.builds(dx.LastQueries, st.integers(0, 40)),
    st.builds(dx.LocalBlocks, st.integers(1, 3)),
    st.builds(dx.RandomBlocks, st.integers(0, 3), seed=st.integers(0, 5)),
    st.just(dx.Causal()),
    st.just(dx.Full()),
)
patterns = st.recursive(
    leaves,
    lambda rules: st.builds(lambda a, b, either: a | b if either else a & b, rules, rules, st.booleans()),
    max_leaves=4,
)
grids = st.fixed_dictionaries(
    {"seqlen_q": lengths, "seqlen_k": lengths, "causal": st.booleans(), "block_size": block_sizes}
)


def dense(rule, grid):
    return rule.layout(**grid).validate().to_dense()[0, 0]


def same(a, b):
    """Equal in every field."""
    fields = ("kv_indptr", "kv_num_partial", "kv_indices", "kv_masks")
    return torch.equal(a.masks.bits, b.masks.bits) and all(torch.equal(getattr(a, n), getattr(b, n)) for n in fields)


def attend(q, k, v, layout, backend="reference"):
    return dx.sparse_attention(q, k, v, layout, return_lse=True, backend=backend)


@laws
@given(patterns, patterns, grids)
def test_either_and_both_are_elementwise(a, b, grid):
    assert torch.equal(dense(a | b, grid), dense(a, grid) | dense(b, grid))
    assert torch.equal(dense(a & b, grid), dense(a, grid) & dense(b, grid))


@laws
@given(patterns, patterns, patterns, grids)
def test_combinations_are_a_lattice(a, b, c, grid):
    show = lambda rule: dense(rule, grid)
    for left, right in (
        (a | b, b | a),
        (a & b, b & a),
        ((a | b) | c, a | (b | c)),
        ((a & b) & c, a & (b & c)),
        (a | a, a),
        (a & a, a),
        (a | (a & b), a),
        (a & (a | b), a),
        (a & (b | c), (a & b) | (a & c)),
        (a | dx.Full(), dx.Full()),
        (a & dx.Full(), a),
    ):
        assert torch.equal(show(left), show(right)), f"{left} against {right}"


@laws
@given(patterns, grids)
def test_conversions_go_there_and_back(rule, grid):
    layout = rule.layout(**grid)
    mask = layout.to_dense()
    assert torch.equal(BlockLayout.from_dense(mask, block_size=grid["block_size"]).validate().to_dense(), mask)
    entries = layout.entries()
    order = torch.randperm(len(entries[0]), generator=torch.Generator().manual_seed(0))
    assert same(BlockLayout.from_entries(layout.grid(), *(x[order] for x in entries), layout.masks), layout)
    assert torch.equal(from_block_mask(to_block_mask(layout)).validate().to_dense(), mask)


def turned(layout):
    """Return the layout that `transposed` describes, from keys to queries."""
    by_key = layout.transposed
    masks = ElementMasks.from_dense(layout.masks.to_dense().transpose(1, 2))
    fields = (by_key.q_indptr, by_key.q_num_partial, by_key.q_indices, by_key.q_masks)
    return BlockLayout(layout.seqlen_k, layout.seqlen_q, layout.block_size[::-1], *fields, masks=masks).validate()


@laws
@given(patterns, grids)
def test_transposed_twice_is_the_layout(rule, grid):
    layout = rule.layout(**grid)
    assert torch.equal(turned(layout).to_dense(), layout.to_dense().transpose(-1, -2))
    assert same(turned(turned(layout)), layout)


@laws
@given(st.data(), lengths, lengths, st.sampled_from((16, 32)), st.booleans())
def test_the_order_of_block_indices_does_not_matter(data, seqlen_q, seqlen_k, block, causal):
    q_blocks, kv_blocks = -(-seqlen_q // block), -(-seqlen_k // block)
    order = st.permutations([*range(kv_blocks), -1, -1])
    slots = data.draw(st.integers(0, kv_blocks + 2))
    rows = [data.draw(order)[:slots] for _ in range(q_blocks)]
    shuffled = [data.draw(st.permutations(row)) for row in rows]
    make = lambda lists: BlockLayout.from_block_indices(
        torch.tensor(lists, dtype=torch.int64).view(1, 1, q_blocks, slots),
        seqlen_q,
        seqlen_k,
        block_size=block,
        causal=causal,
    ).validate()
    one, other = make(rows), make(shuffled)
    assert same(one, other)
    inputs = make_qkv(1, seqlen_q, seqlen_k, 2, 1, 16)
    for a, b in zip(attend(*inputs, one, "cpu"), attend(*inputs, other, "cpu"), strict=True):
        assert torch.equal(a, b)


@laws
@given(lengths, st.booleans(), block_sizes, st.integers(1, 3), st.integers(1, 3), st.integers(1, 40))
def test_density_one_is_dense_attention(seqlen, causal, block_size, kv_heads, group_size, head_dim):
    q, k, v = make_qkv(1, seqlen, seqlen, kv_heads * group_size, kv_heads, head_dim)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2).double() for x in (q, k, v)), is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
    full = dx.Full().layout(seqlen, causal=causal, block_size=block_size)
    chosen = dx.select_blocks(q, k, dx.TopK(1.0), causal=causal, block_size=block_size)
    for layout in (full, chosen):
        assert layout.density(causal) == 1.0
        torch.testing.assert_close(attend(q, k, v, layout, "cpu").out, want.float(), rtol=1e-5, atol=1e-5)
    out = attend(q.double(), k.double(), v.double(), full).out
    torch.testing.assert_close(out, want, rtol=1e-11, atol=1e-11)


@laws
@given(patterns, grids, st.integers(1, 4), st.integers(0, 99))
def test_merging_by_lse_is_one_pass(rule, grid, parts, seed):
    layout = rule.layout(**grid)
    mask = layout.to_dense()
    of = torch.randint(parts, mask.shape, generator=torch.Generator().manual_seed(seed))
    split = [BlockLayout.from_dense(mask & (of == part), block_size=grid["block_size"]) for part in range(parts)]
    for dtype, backend, close in ((torch.float64, "reference", 1e-11), (torch.float32, "cpu", 1e-5)):
        inputs = make_qkv(1, grid["seqlen_q"], grid["seqlen_k"], 2, 1, 8, dtype=dtype, seed=seed)
        merged = dx.merge_states([attend(*inputs, part, backend) for part in split])
        whole = attend(*inputs, layout, backend)
        for a, b in zip(merged, whole, strict=True):
            torch.testing.assert_close(a, b, rtol=close, atol=close)


@laws
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), leaves), min_size=1, max_size=5), st.booleans(),
       block_sizes)  # fmt: skip
def test_packed_is_each_sequence_alone(sequences, causal, block_size):
    ends = [[sum(each[side] for each in sequences[:s]) for s in range(len(sequences) + 1)] for side in (0, 1)]
    alone = [rule.layout(n, m, causal=causal, block_size=block_size) for n, m, rule in sequences]
    layout = pack_layouts(alone, *ends, block_size=block_size).validate()
    q, k, v = (x[0] for x in make_qkv(1, ends[0][-1], ends[1][-1], 2, 1, 8, dtype=torch.float64))
    out, lse = dx.sparse_attention(q, k, v, layout, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], return_lse=True)
    for each, (a, b), (c, d) in zip(alone, pairwise(ends[0]), pairwise(ends[1]), strict=True):
        assert torch.equal(layout.to_dense()[..., a:b, c:d], each.to_dense())
        own = attend(q[None, a:b], k[None, c:d], v[None, c:d], each)
        torch.testing.assert_close(out[a:b], own.out[0], rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(lse[:, a:b], own.lse[0], rtol=1e-11, atol=1e-11)
