"""Selection: forced blocks, budgets, causality, scorers, and hybrids."""

import pytest
import torch

import dynaxx as dx
from dynaxx.selection import LastQueryProbe, MeanPool, MinMax, TopK, TopP
from dynaxx.testing import make_qkv

SCORERS = [MeanPool(), MeanPool(pool=16), MinMax(), MinMax(bound=0.5), LastQueryProbe(), LastQueryProbe(queries=1000)]


def causal_mask(seqlen_q, seqlen_k):
    return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(seqlen_k - seqlen_q)


@pytest.mark.parametrize("scorer", SCORERS, ids=repr)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (200, 200), (65, 257), (130, 70), (0, 0), (0, 40)])
@pytest.mark.parametrize("causal", [True, False])
def test_budget_one_is_dense_and_zero_is_the_pattern(scorer, seqlen_q, seqlen_k, causal):
    q, k, _ = make_qkv(2, seqlen_q, seqlen_k, 4, 2, 16)
    pattern = dx.SlidingWindow(20) | dx.Sink(3)
    for make in (lambda b: TopK(float(b), scorer), lambda b: TopP(float(b), scorer)):
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
    """Every query attends to kv block `block` alone, but for the noise."""
    q, k, _ = make_qkv(1, 256, 256, 2, 1, 16)
    q, k = q * 0.1, k * 0.1
    q[..., 0] = 8.0
    k[:, block * 16 : (block + 1) * 16, :, 0] = 8.0
    return q, k


@pytest.mark.parametrize("scorer", SCORERS, ids=repr)
def test_scorers_find_a_planted_block(scorer):
    q, k = planted(3)
    for selector in (TopK(1, scorer), TopP(0.6, scorer)):
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


def test_memory_budget_does_not_change_the_choice(monkeypatch):
    q, k, _ = make_qkv(2, 300, 300, 4, 2, 16)
    rule = dx.SlidingWindow(40) | TopK(0.2, MeanPool(pool=4))
    whole = dx.select_blocks(q, k, rule, block_size=16).to_dense()
    monkeypatch.setattr("dynaxx.selection.base.SCORE_BYTES", 1)
    assert torch.equal(whole, dx.select_blocks(q, k, rule, block_size=16).to_dense())


def test_floor_gives_early_rows_the_share_of_later_ones():
    q, k, _ = make_qkv(1, 256, 256, 2, 1, 16)
    counts = dx.select_blocks(q, k, TopK(0.25, floor=8), block_size=16).kv_num_blocks[0, 0].tolist()
    assert counts == [1, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda q, k: TopK(1.5), "`budget` must be a count"),
        (lambda q, k: TopK(-1), "`budget` must be a count"),
        (lambda q, k: TopP(2.0), "`mass` must be from"),
        (lambda q, k: MeanPool(pool=0), "`pool` must be >= 1"),
        (lambda q, k: MinMax(bound=1.1), "`bound` must be from"),
        (lambda q, k: LastQueryProbe(queries=0), "`queries` must be >= 1"),
        (lambda q, k: dx.select_blocks(q, k, TopK((1, 2))), "one per q head"),
        (lambda q, k: dx.select_blocks(q[0], k, TopK(1)), "`q` must be"),
        (lambda q, k: dx.select_blocks(q, k[..., :8], TopK(1)), "must agree"),
    ],
)
def test_bad_input_is_refused(build, message):
    q, k, _ = make_qkv(1, 64, 64, 4, 2, 16)
    with pytest.raises(ValueError, match=message):
        build(q, k)
