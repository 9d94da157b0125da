# SPDX-License-Identifier: Apache-2.0
"""Selection: forced blocks, budgets, causality, scorers, and hybrids."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dynaxx as dx
from dynaxx.kernels.selection.cpu import best_blocks
from dynaxx.ops import column_sums
from dynaxx.selection import (
    AntiDiagonal,
    MeanPool,
    MeanQuery,
    MinMax,
    Threshold,
    TileQueries,
    TopK,
    TopP,
)
from dynaxx.testing import make_qkv

SCORERS = [
    MeanQuery(),
    MeanPool(),
    MeanPool(pool=16),
    MeanPool(pool=3),
    MinMax(),
    MinMax(bound=0.5),
    AntiDiagonal(),
    AntiDiagonal(stride=4),
    TileQueries(),
    TileQueries(tokens=5, sharpness=0.9),
]


def causal_mask(seqlen_q, seqlen_k):
    return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(seqlen_k - seqlen_q)


@pytest.mark.parametrize("scorer", SCORERS, ids=repr)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (200, 200), (65, 257), (130, 70), (0, 0), (0, 40)])
@pytest.mark.parametrize("causal", [True, False])
def test_budget_one_is_dense_and_zero_is_the_pattern(scorer, seqlen_q, seqlen_k, causal):
    q, k, _ = make_qkv(2, seqlen_q, seqlen_k, 4, 2, 16)
    pattern = dx.SlidingWindow(20) | dx.Sink(3)
    for make in (
        lambda b: TopK(float(b), scorer),
        lambda b: TopP(float(b), scorer),
        lambda b: Threshold(0.0 if b else float("inf"), "max", scorer),
        lambda b: Threshold(0.0 if b else 1e9, "uniform", scorer),
    ):
        full = dx.select_blocks(q, k, make(1), block_size=16, causal=causal).validate().to_dense()
        hybrid = dx.select_blocks(q, k, pattern | make(1), block_size=16, causal=causal).validate().to_dense()
        want = causal_mask(seqlen_q, seqlen_k) if causal else torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
        assert torch.equal(full, want.expand_as(full))
        assert torch.equal(hybrid, want.expand_as(full))
        none = dx.select_blocks(q, k, pattern | make(0), block_size=16, causal=causal).validate().to_dense()
        static = pattern.layout(seqlen_q, seqlen_k, block_size=16, causal=causal).to_dense()
        assert torch.equal(none, static.expand_as(none))


@pytest.mark.parametrize("scorer", SCORERS, ids=repr)
def test_a_hybrid_shows_its_pattern_and_the_budget_beside_it(scorer):
    q, k, _ = make_qkv(1, 256, 256, 4, 2, 16)
    pattern = dx.SlidingWindow(40) | dx.Sink(4)
    static = pattern.layout(256, block_size=16)
    layout = dx.select_blocks(q, k, pattern | TopK((0, 1, 2, 16), scorer), block_size=16).validate()
    dense, shown = layout.to_dense()[0], static.to_dense()[0, 0]
    assert torch.equal(dense[0], shown)
    for head, budget in ((1, 1), (2, 2)):
        assert (dense[head] | shown).equal(dense[head])
        assert not (dense[head] & ~causal_mask(256, 256)).any()
        added = (dense[head] & ~shown).unflatten(0, (16, 16)).unflatten(2, (16, 16)).any(3).any(1).sum(-1)
        assert added.max() == budget
    assert torch.equal(dense[3], causal_mask(256, 256))


def planted(block):
    """Return queries and keys with which every query attends almost only to kv block `block`."""
    q, k, _ = make_qkv(1, 256, 256, 2, 1, 16)
    q, k = q * 0.1, k * 0.1
    q[..., 0] = 8.0
    k[:, block * 16 : (block + 1) * 16, :, 0] = 8.0
    return q, k


@pytest.mark.parametrize("scorer", SCORERS, ids=repr)
def test_scorers_find_a_planted_block(scorer):
    q, k = planted(3)
    for selector in (
        TopK(1, scorer),
        TopP(0.6, scorer),
        Threshold(0.5, "max", scorer),
        Threshold(1.5, "uniform", scorer),
    ):
        layout = dx.select_blocks(q, k, selector, block_size=16)
        seen = layout.to_dense()[0, :, 64:, 48:64]
        assert seen.all()
        assert layout.density() < 0.4


def test_top_p_needs_fewer_blocks_where_attention_is_narrow():
    q, k = planted(3)
    wide = make_qkv(1, 256, 256, 2, 1, 16)[:2]
    wide = [x * 0.01 for x in wide]
    narrow_density = dx.select_blocks(q, k, TopP(0.9), block_size=16).density()
    assert narrow_density < 0.5 * dx.select_blocks(*wide, TopP(0.9), block_size=16).density()


def test_mean_pool_of_one_token_is_the_true_mass():
    q, k, _ = make_qkv(1, 64, 64, 2, 1, 16, dtype=torch.float64)
    mass = (q[:, :, 0] @ k[:, :, 0].transpose(-1, -2) / 4).masked_fill(~causal_mask(64, 64), -torch.inf).softmax(-1)
    mass = mass.view(4, 16, 4, 16).sum((1, 3)).log()
    grid = dx.layout.BlockGrid(64, 64, (16, 16))
    scores = MeanPool(pool=1).prepare(q, k, grid, 0.25)(0, 4)[0, 0].double()
    torch.testing.assert_close(scores, mass, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("causal", [True, False])
def test_mean_query_sums_what_each_visible_key_gets(causal):
    q, k, _ = make_qkv(1, 75, 107, 2, 1, 16)
    grid = dx.layout.BlockGrid(75, 107, (16, 32), causal)
    got = MeanQuery(0.5).prepare(q, k, grid, 1.0)(0, 5)
    for row, queries in enumerate(q.split(16, dim=1)):
        logits = queries.mean(1) @ k[0, :, 0].T / 2  # (1, heads, keys)
        last = min(16 * row + 15, 74) + 32 if causal else 106
        for col in range(4):
            seen = logits[..., 32 * col : min(32 * col + 32, last + 1)]
            torch.testing.assert_close(got[:, :, row, col], seen.logsumexp(-1))


def test_scores_that_may_have_8_bits_are_full_ones():
    q, k, _ = make_qkv(1, 75, 107, 2, 1, 16)
    grid = dx.layout.BlockGrid(75, 107, (16, 32), True)
    got, want = (MeanQuery(1.0, precision).prepare(q, k, grid, 1.0)(0, 5) for precision in ("int8", "full"))
    assert torch.equal(got, want)


@pytest.mark.parametrize("scorer", SCORERS, ids=repr)
@pytest.mark.parametrize("budget", [pytest.param(1, marks=pytest.mark.slow), 40_000])
def test_memory_budget_does_not_change_the_choice(scorer, budget):
    q, k, _ = make_qkv(2, 301, 333, 4, 2, 16)
    rule = dx.SlidingWindow(40) | TopK(0.2, scorer)
    whole = dx.select_blocks(q, k, rule, block_size=16)
    cut = dx.select_blocks(q, k, rule, block_size=16, memory_budget=budget)
    assert torch.equal(whole.kv_indptr, cut.kv_indptr)
    assert torch.equal(whole.kv_indices, cut.kv_indices)


class PeakBytes(TorchDispatchMode):
    """Record the most bytes that tensors allocated inside held at once."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.known = weakref.WeakKeyDictionary()

    def freed(self, size):
        self.live -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            storage = x.untyped_storage() if isinstance(x, torch.Tensor) else None
            if storage is None or storage in self.known or storage.data_ptr() in before:
                continue
            self.known[storage] = True
            self.live += storage.nbytes()
            weakref.finalize(storage, self.freed, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return out


def peak_bytes(rule, memory_budget):
    """Return the peak memory of a selection over 4,101 tokens, without the layout's own bytes."""
    q, k, _ = make_qkv(1, 4101, 4101, 4, 2, 32, dtype=torch.bfloat16)
    with PeakBytes() as memory:
        layout = dx.select_blocks(q, k, dx.Sink(4) | rule, block_size=16, memory_budget=memory_budget)
    return memory.peak - 100 * layout.nnz


@pytest.mark.parametrize(
    "scorer", [*SCORERS[::2], *(pytest.param(x, marks=pytest.mark.slow) for x in SCORERS[1::2])], ids=repr
)
def test_memory_budget_holds(scorer):
    assert peak_bytes(TopK(2, scorer), 8 << 20) < 8 << 20
    assert peak_bytes(Threshold(0.9, "max", scorer), 8 << 20) < 8 << 20


def test_memory_budget_matters():
    with PeakBytes() as memory:
        kept = torch.zeros(1000)
        del kept
        torch.ones(10)[2:].add_(torch.ones(8))
    assert memory.peak == 4000
    assert memory.live == 0
    assert peak_bytes(TopP(0.02), 2 << 20) < 2 << 20 < peak_bytes(TopP(0.02), 64 << 20)


@pytest.mark.parametrize("scorer", SCORERS, ids=repr)
def test_ties_keep_the_budget_and_repeat(scorer):
    q, k = torch.zeros(1, 200, 2, 16), torch.zeros(1, 200, 1, 16)
    layout = dx.select_blocks(q, k, TopK(3, scorer), block_size=16).validate()
    assert layout.kv_num_blocks.amax() == 3
    assert torch.equal(layout.kv_indices, dx.select_blocks(q, k, TopK(3, scorer), block_size=16).kv_indices)
    assert dx.select_blocks(q, k, Threshold(0.5, "max", scorer), block_size=16).validate().nnz


@pytest.mark.parametrize("scorer", SCORERS, ids=repr)
def test_values_past_the_tensors_are_not_read(scorer):
    """With odd lengths and strided inputs, memory around q and k does not matter."""
    q, k, _ = make_qkv(1, 77, 93, 4, 2, 16)
    around = [torch.full((1, x.shape[1] + 40, 8, 20), float("nan")) for x in (q, k)]
    views = [a[:, 7 : 7 + x.shape[1], 1 : 1 + x.shape[2], 2:18].copy_(x) for a, x in zip(around, (q, k), strict=True)]
    rule = TopK(0.4, scorer)
    want, got = dx.select_blocks(q, k, rule, block_size=16), dx.select_blocks(*views, rule, block_size=16)
    assert torch.equal(want.kv_indices, got.kv_indices)


def test_anti_diagonal_is_its_definition():
    q, k, _ = make_qkv(1, 96, 96, 2, 1, 16)
    grid, stride = dx.layout.BlockGrid(96, 96, (32, 16)), 8
    got = AntiDiagonal(stride).prepare(q, k, grid, 0.25)(0, 3)[0]
    full = q[0].transpose(0, 1) @ k[0, :, 0].T * 0.25
    tiles = full.view(2, 12, 8, 12, 8).permute(0, 1, 3, 2, 4).flip(-1).diagonal(dim1=-2, dim2=-1).mean(-1)
    share = tiles.masked_fill(torch.ones(12, 12, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    want = share.view(2, 3, 4, 6, 2).sum((2, 4))
    torch.testing.assert_close(got.exp(), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # the core scores fp32
def test_tile_queries_are_their_definition(dtype):
    q, k, _ = make_qkv(1, 90, 100, 2, 1, 16, dtype=dtype)
    got = TileQueries(tokens=8, sharpness=0.5).prepare(q, k, dx.layout.BlockGrid(90, 100, (32, 16)), 0.25)(0, 3)[0]
    means = torch.stack([each.mean(1) for each in q[0].transpose(0, 1).split(8, dim=1)], 1)
    share = means @ k[0, :, 0].T * 0.125
    hidden = torch.arange(100) >= ((torch.arange(12) + 1) * 8 + 10).clamp(max=100)[:, None]
    share = torch.nn.functional.pad(share.masked_fill(hidden, -torch.inf).softmax(-1), (0, 12))
    want = torch.stack([each.sum(1) for each in share.view(2, 12, 7, 16).sum(-1).split(4, dim=1)], 1)
    torch.testing.assert_close(got.exp().to(dtype), want, rtol=1e-4, atol=1e-5)


def test_one_tile_per_block_is_the_mean_query():
    q, k, _ = make_qkv(2, 96, 96, 4, 2, 16)
    for block in (16, 32):
        rules = [dx.Sink(16) | TopK(0.4, scorer) for scorer in (MeanQuery(), TileQueries(tokens=block))]
        mean, tiles = (dx.select_blocks(q, k, rule, block_size=block) for rule in rules)
        assert torch.equal(mean.kv_indices, tiles.kv_indices)


@pytest.mark.parametrize(("make", "some", "nothing", "all_"), [(TopK, 0.3, 0.0, 1.0), (TopP, 0.5, 0.0, 1.0),
                                                               (Threshold, 0.9, 1e9, 0.0)])  # fmt: skip
def test_heads_of_a_group_choose_together_unless_told_otherwise(make, some, nothing, all_):
    q, k, _ = make_qkv(2, 256, 256, 6, 2, 16)
    choose = lambda rule: dx.select_blocks(q, k, dx.Sink(4) | rule, block_size=16).validate().to_dense()
    together, alone = choose(make(some)), choose(make(some, per="head"))
    assert torch.equal(together[:, ::3], together[:, 1::3])
    assert torch.equal(together[:, ::3], together[:, 2::3])
    assert not torch.equal(alone[:, ::3], alone[:, 1::3])
    assert torch.equal(choose(make((some,) * 6)), together)
    mixed = choose(make((nothing, some, all_) * 2))
    assert torch.equal(mixed[:, 1::3], together[:, ::3])
    assert (mixed[:, ::3] <= mixed[:, 1::3]).all()
    q = q[:, :, ::3].repeat_interleave(3, dim=2)  # heads that are alike choose what one of them would
    assert torch.equal(choose(make(some)), choose(make(some, per="head")))


@pytest.mark.parametrize("pattern", [None, dx.Sink(16)], ids=["alone", "beside a sink"])
def test_a_group_ranks_by_what_its_heads_give_relative_to_their_best_block(pattern):
    q, k, _ = make_qkv(1, 256, 256, 2, 1, 16)
    q[:, :, 0] *= 20  # a head so sharp that its shares alone would decide
    grid = dx.layout.BlockGrid(256, 256, (16, 16))
    mass = MeanQuery().prepare(q, k, grid, 0.25)(0, 16)
    mass = mass.masked_fill(~torch.ones(16, 16, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    free = mass if pattern is None else mass[..., 1:]
    relative = (free / free.amax(-1, keepdim=True)).sum(1)[0]
    rule = TopK(4) if pattern is None else pattern | TopK(4)
    layout = dx.select_blocks(q, k, rule, block_size=16)
    differ = 0
    for row in range(5, 16):
        chosen = layout.kv_indices[layout.kv_indptr[0, 1, row] : layout.kv_indptr[0, 1, row + 1]].tolist()
        best = relative[row].topk(4).indices + (pattern is not None)
        assert set(chosen) == {*best.tolist(), *([] if pattern is None else [0])}
        differ += set(best.tolist()) != set((free.sum(1)[0, row].topk(4).indices + (pattern is not None)).tolist())
    assert differ  # the sum of shares would choose other blocks


def test_a_group_keeps_a_mass_by_the_sum_of_its_heads():
    q, k, _ = make_qkv(1, 128, 128, 2, 1, 16)
    grid = dx.layout.BlockGrid(128, 128, (16, 16))
    mass = MeanQuery().prepare(q, k, grid, 0.25)(0, 8)
    mass = mass.masked_fill(~torch.ones(8, 8, dtype=torch.bool).tril(), -torch.inf).softmax(-1).mean(1)[0]
    layout = dx.select_blocks(q, k, TopP(0.5), block_size=16)
    for row in range(8):
        best, where = mass[row].sort(descending=True)
        chosen = layout.kv_indices[layout.kv_indptr[0, 1, row] : layout.kv_indptr[0, 1, row + 1]]
        assert set(chosen.tolist()) == set(where[best.cumsum(0) - best < 0.5].tolist())


def test_threshold_compares_mass_with_its_reference():
    q, k, _ = make_qkv(1, 256, 256, 2, 1, 16)
    grid = dx.layout.BlockGrid(256, 256, (16, 16))
    mass = MeanQuery().prepare(q, k, grid, 0.25)(0, 16)
    mass = mass.masked_fill(~torch.ones(16, 16, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    for of, reference in (("max", mass.amax(-1, keepdim=True)), ("uniform", 1 / torch.arange(1, 17)[:, None])):
        layout = dx.select_blocks(q, k, Threshold((0.9, 0.4), of, per="head"), block_size=16)
        kept = (mass >= torch.tensor([0.9, 0.4])[:, None, None] * reference).sum(-1)
        assert torch.equal(layout.kv_num_blocks.long(), kept)


def test_floor_gives_early_rows_the_share_of_later_ones():
    q, k, _ = make_qkv(1, 256, 256, 2, 1, 16)
    counts = dx.select_blocks(q, k, TopK(0.25, floor=8), block_size=16).kv_num_blocks[0, 0].tolist()
    assert counts == [1, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda q, k: TopK(1.5), "`budget` must be from 0.0 to 1.0"),
        (lambda q, k: TopK(-1), "`budget` must be >= 0"),
        (lambda q, k: TopK(float("nan")), "`budget` must be from 0.0 to 1.0"),
        (lambda q, k: TopP(2.0), "`mass` must be from"),
        (lambda q, k: TopK(1, per="layer"), "`per` must be 'group' or 'head'"),
        (lambda q, k: MeanQuery(0.0), "`sharpness` must be > 0"),
        (lambda q, k: MeanQuery(precision="fp8"), "`precision` must be 'full' or 'int8'"),
        (lambda q, k: MeanPool(pool=0), "`pool` must be >= 1"),
        (lambda q, k: MinMax(bound=1.1), "`bound` must be from"),
        (lambda q, k: AntiDiagonal(0), "`stride` must be >= 1"),
        (lambda q, k: TileQueries(0), "`tokens` must be >= 1"),
        (lambda q, k: TileQueries(sharpness=0.0), "`sharpness` must be > 0"),
        (lambda q, k: Threshold(-0.1), "`share` must be >= 0"),
        (lambda q, k: Threshold(0.1, "mean"), "`of` must be"),
        (lambda q, k: dx.select_blocks(q, k, TopK(1), memory_budget=0), "`memory_budget` must be >= 1"),
        (lambda q, k: dx.select_blocks(q, k, TopK(1), scale=float("inf")), "`scale` must be 0 or"),
        (lambda q, k: dx.select_blocks(q, k, TopK((1, 2))), "one per q head"),
        (lambda q, k: dx.select_blocks(q[0], k, TopK(1)), "`q` must be"),
        (lambda q, k: dx.select_blocks(q, k[..., :8], TopK(1)), "must agree"),
        (lambda q, k: dx.select_blocks(q[..., :0], k[..., :0], TopK(1)), "head_dim must be >= 1, got 0"),
    ],
)
def test_bad_input_is_refused(build, message):
    q, k, _ = make_qkv(1, 64, 64, 4, 2, 16)
    with pytest.raises(ValueError, match=message):
        build(q, k)


def test_a_batch_without_sequences_has_a_layout_without_blocks():
    q, k, _ = make_qkv(1, 64, 64, 4, 2, 16)
    layout = dx.select_blocks(q[:0], k[:0], TopK(1), block_size=16)
    assert (layout.nnz, layout.density(), layout.visible_pairs().shape) == (0, 0.0, (0, 4))
    assert layout.to_dense().shape == (0, 4, 64, 64)
    assert "nnz=0" in repr(layout)
    assert layout.validate() is layout


def test_queries_without_data_are_refused_or_computed_without_the_core():
    """The core reads addresses, so it must not receive tensors without data or with other shapes."""
    q, k = torch.randn(1, 64, 4, 16), torch.randn(1, 64, 2, 16)
    assert best_blocks.serves(q, k)
    for queries, keys in ((q.to("meta"), k), (q, k.to("meta")), (q[..., :8], k), (q[:, :, :3], k), (q, k[:0])):
        with pytest.raises((TypeError, ValueError)):
            dx.select_blocks(queries, keys, dx.TopK(2), block_size=16)
    with pytest.raises(TypeError, match="`q` must be a plain tensor, got one on the meta device"):
        dx.select_blocks(q.to("meta"), k.to("meta"), dx.TopK(2), block_size=16)
    with pytest.raises(TypeError, match="`q` must be a plain tensor, got one on the meta device"):
        column_sums(q.to("meta"), k.to("meta"), dx.Causal().layout(64, block_size=16))
