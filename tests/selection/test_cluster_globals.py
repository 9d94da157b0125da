# SPDX-License-Identifier: Apache-2.0
"""Global columns that stand for the clusters of keys."""

import math

import pytest
import torch

import dynaxx as dx
from dynaxx.selection import ClusterGlobals
from dynaxx.testing import make_qkv

BLOCK = 16


def columns(q, k, rule, **options):
    """Return the visited blocks as bool (heads, q_blocks, kv_blocks)."""
    layout = dx.select_blocks(q, k, rule, **{"block_size": BLOCK, "causal": False, **options}).validate()
    dense = layout.to_dense()[0]
    pad = (0, -dense.shape[2] % BLOCK, 0, -dense.shape[1] % BLOCK)
    return torch.nn.functional.pad(dense, pad).unflatten(1, (-1, BLOCK)).unflatten(3, (-1, BLOCK)).any(4).any(2)


def planted(homes, strays=3, blocks=12):
    """Return keys of one direction per cluster: most in one home block, some in other blocks; other keys are noise."""
    q, k, v = make_qkv(1, blocks * BLOCK, blocks * BLOCK, 2, 1, 16)
    k = k * 0.05
    generator = torch.Generator().manual_seed(1)
    for cluster, home in enumerate(homes):
        others = [block for block in range(blocks) if block not in homes]
        places = [home * BLOCK + i for i in range(BLOCK)]
        places += [
            others[int(torch.randint(len(others), (), generator=generator))] * BLOCK + cluster for _ in range(strays)
        ]
        k[0, places, 0, cluster] += 9.0
    return q, k, v


def test_every_cluster_keeps_its_home_in_sight():
    homes = (2, 5, 9)
    q, k, _ = planted(homes)
    seen = columns(q, k, ClusterGlobals(clusters=8))
    assert set(homes) <= set(seen[0, 0].nonzero().flatten().tolist())
    assert seen[0, 0].sum() <= 8
    assert (seen == seen[:1, :1]).all(), "global: the same columns for every query and head"


def test_it_is_the_blocks_with_most_keys_of_each_cluster():
    """Count the keys of each block from the same centroids."""
    q, k, _ = make_qkv(1, 200, 200, 4, 2, 16, seed=3)
    for most in (1, 2, 5):
        rule = ClusterGlobals(most, clusters=6, seed=2)
        centroids = rule.scorer.index._centroids(k, 1 << 20)[0]
        seen = columns(q, k, rule)
        for head in range(4):
            keys, points = k[0, :, head // 2], centroids[head // 2]
            of = torch.cdist(keys, points).argmin(-1)
            want = set()
            for cluster in range(len(points)):
                blocks = (torch.arange(200)[of == cluster] // BLOCK).tolist()
                counts = sorted(
                    {block: blocks.count(block) for block in blocks}.items(), key=lambda kv: (-kv[1], kv[0])
                )
                want |= {block for block, _ in counts[:most]}
            assert set(seen[head, 0].nonzero().flatten().tolist()) == want


def test_an_attention_sink_is_a_cluster_of_its_own():
    q, k, _ = make_qkv(1, 256, 256, 2, 1, 16)
    k[0, 100, 0] = 30.0
    assert columns(q, k, ClusterGlobals(clusters=16))[:, :, 100 // BLOCK].all()


def test_queries_do_not_matter_and_causality_does():
    q, k, _ = make_qkv(1, 128, 160, 4, 2, 16)
    rule = ClusterGlobals(2, clusters=5)
    seen = columns(q, k, rule)
    assert torch.equal(columns(torch.randn_like(q), k, rule), seen)
    dense = dx.select_blocks(q, k, rule, block_size=BLOCK, causal=True).to_dense()[0]
    every = dx.select_blocks(q, k, rule, block_size=BLOCK, causal=False).to_dense()[0]
    assert torch.equal(dense, every & torch.ones(128, 160, dtype=torch.bool).tril(32))


def test_numbers_per_head_nothing_and_everything():
    q, k, _ = make_qkv(1, 100, 100, 4, 2, 16)
    window = dx.SlidingWindow(20)
    seen = columns(q, k, window | ClusterGlobals((0, 1, 3, math.inf), clusters=4), causal=True)
    shown = columns(q, k, window, causal=True)[0]
    assert torch.equal(seen[0], shown)
    assert torch.equal(seen[3], columns(q, k, dx.Full(), causal=True)[0])
    last = (seen & ~shown)[:, -1].sum(-1).tolist()
    assert last[0] == 0 < last[1] <= 4
    assert last[1] <= last[2] <= last[3]


def test_globals_keep_the_answers_that_lie_far_away():
    """Each query looks for one cluster; if the clusters' home blocks are visible, it keeps most of its attention
    mass.
    """
    homes = (1, 4, 8)
    q, k, _ = planted(homes, blocks=32)
    q = torch.zeros_like(q)
    for token in range(q.shape[1]):
        q[0, token, :, token % len(homes)] = 2.0
    near, late = dx.LocalBlocks(1), slice(16 * BLOCK, None)
    of = lambda rule: (
        dx.recall(q[:, late], k, dx.select_blocks(q[:, late], k, rule, block_size=BLOCK), rows=10_000).mean
    )
    with_globals = of(near | ClusterGlobals(clusters=8))
    assert with_globals > 0.7
    assert with_globals > 1.5 * of(near | dx.RandomBlocks(8))  # as many blocks at most, chosen blindly


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 0), (0, 40), (40, 0), (1, 1), (3, 70)])
def test_odd_lengths(seqlen_q, seqlen_k):
    q, k, _ = make_qkv(2, seqlen_q, seqlen_k, 4, 2, 16)
    dx.select_blocks(q, k, dx.Sink(2) | ClusterGlobals(2), block_size=BLOCK).validate()


def test_bad_numbers_say_so():
    q, k, _ = make_qkv(1, 40, 40, 4, 2, 16)
    for make, message in (
        (lambda: ClusterGlobals(-1), "`per_cluster` must be >= 0"),
        (lambda: ClusterGlobals(float("nan")), "`per_cluster` must be"),
        (lambda: ClusterGlobals(1.5), "`per_cluster` must be an integer"),
        (lambda: ClusterGlobals(1, clusters=0), "`clusters` must be from 1 to"),
        (lambda: dx.select_blocks(q, k, ClusterGlobals((1, 2))), r"one per q head \(4\), got 2"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            make()
