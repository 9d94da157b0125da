# SPDX-License-Identifier: Apache-2.0
"""The blocks that a rule leaves out, by their means: against a loop over blocks in fp64."""

import pytest
import torch

import dynaxx as dx
from dynaxx.policy.resolve import plan_of
from dynaxx.testing import make_qkv
from dynaxx.video import Grid, GridWindow, VideoPolicy, VideoRule, grid_attention
from dynaxx.video import rest as rest_module
from dynaxx.video.attention import GridPlan, attend, padding_of
from dynaxx.video.rest import TILE, rest_density, visited_blocks

GRID = Grid(3, 7, 13, text=6, order="raster")  # 279 tokens: neither tiles nor blocks fit
BLOCKS = (32, 64)
RULES = [dx.TopK(0.3, dx.MeanPool(), per="head"), GridWindow(1, 3, 3), dx.TopP(0.4, dx.MeanQuery())]


def reference(q, k, v, layout, rest, visible):
    """Return attention of (batch, seqlen, heads, head_dim), token by token."""
    out, (q_block, kv_block) = torch.zeros_like(v), layout.block_size
    shown = layout.to_dense().expand(q.shape[0], q.shape[2], -1, -1)
    visited = visited_blocks(layout).expand(q.shape[0], q.shape[2], -1, -1)
    for b in range(q.shape[0]):
        exists = lambda first, size, b=b: [at for at in range(first, min(first + size, q.shape[1])) if visible[b, at]]
        for h in range(q.shape[2]):
            for at in range(q.shape[1]):
                seen = shown[b, h, at].nonzero()[:, 0]
                scores, values = [k[b, seen, h] @ q[b, at, h] * q.shape[3] ** -0.5], [v[b, seen, h]]
                tile = exists(at // TILE * TILE, TILE)
                mean_query = q[b, tile, h].sum(0) / max(1, len(tile))
                for block in range(layout.kv_blocks if rest[h] else 0):
                    keys = exists(block * kv_block, kv_block)
                    if keys and not visited[b, h, at // q_block, block]:
                        score = k[b, keys, h].mean(0) @ mean_query * q.shape[3] ** -0.5
                        scores.append((score + torch.tensor(len(keys) * rest[h]).log())[None])
                        values.append(v[b, keys, h].mean(0, keepdim=True))
                out[b, at, h] = torch.cat(scores).softmax(0) @ torch.cat(values)
    return out


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_rest_equals_a_loop_over_blocks(rule, padded, monkeypatch):
    monkeypatch.setattr(rest_module, "MEMORY", 1)  # one head at a time
    q, k, v = (x.double() for x in make_qkv(2, GRID.seqlen, GRID.seqlen, 3, 3, 8))
    visible = torch.ones(2, GRID.seqlen, dtype=torch.bool)
    if padded:
        visible[1, 120:] = False  # whole blocks too
    factors = (0.4, 0.0, 1.0)
    plan = GridPlan.of(plan_of([rule] * 3, 3, BLOCKS, causal=False), factors)
    padding = padding_of(visible[:, None, None], q) if padded else None
    out, layout = attend(q, k, v, GRID, plan, padding=padding)
    torch.testing.assert_close(out, reference(q, k, v, layout, factors, visible))
    plain, _ = attend(q, k, v, GRID, plan_of([rule] * 3, 3, BLOCKS, causal=False), padding=padding)
    torch.testing.assert_close(out[:, :, 1], plain[:, :, 1])
    assert float((out - plain)[:, :, ::2].norm()) > 0.01 * float(plain.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_left_out_at_full_density(dtype):
    q, k, v = (x.to(dtype) for x in make_qkv(1, GRID.seqlen, GRID.seqlen, 2, 2, 16))
    found = [grid_attention(q, k, v, GRID, dx.TopK(1.0), rest=rest) for rest in (0.0, 1.0)]
    torch.testing.assert_close(*found)


def test_gradients_reach_queries_keys_and_values():
    grid = Grid(1, 5, 7)
    q, k, v = (x.double().requires_grad_() for x in make_qkv(1, grid.seqlen, grid.seqlen, 2, 2, 4))
    window = GridWindow(height=1)
    run = lambda q, k, v: grid_attention(q, k, v, grid, window, block_size=16, rest=0.5)
    assert torch.autograd.gradcheck(run, (q, k, v), fast_mode=True)


def test_means_of_random_keys_come_closer_to_dense_attention():
    q, k, v = make_qkv(1, GRID.seqlen, GRID.seqlen, 2, 2, 16)
    rule = dx.TopK(0.2, dx.MeanPool(), per="head")
    dense = grid_attention(q, k, v, GRID, dx.TopK(1.0))
    near, far = ((grid_attention(q, k, v, GRID, rule, rest=rest) - dense).norm() for rest in (0.4, 0.0))
    assert near < 0.8 * far


def test_rest_belongs_to_a_rules_heads_in_a_policy():
    facts = {"model_type": "X", "layers": 1, "q_heads": 4, "kv_heads": 4, "head_dim": 8}
    rules = (VideoRule.of(RULES[0], heads=(1, 2), rest=0.4), VideoRule.of(RULES[0], heads=(3,)))
    policy = VideoPolicy(model=facts, rules=rules)
    assert VideoPolicy.model_validate_json(policy.model_dump_json()) == policy
    plan = policy.plans(0.0)[0]
    assert plan.rest == (0.0, 0.4, 0.4, 0.0)
    assert [plan.shard(rank, 2).rest for rank in (0, 1)] == [(0.0, 0.4), (0.4, 0.0)]
    assert plan.shard(0, 1).rest == plan.rest
    assert rest_density(plan.rest, 64) == 0.5 / (16 * 64)
    with pytest.raises(ValueError, match="rest"):
        VideoRule.of(RULES[0], rest=1.5)
    with pytest.raises(ValueError, match="`rest` must be from"):
        grid_attention(*make_qkv(1, 35, 35, 1, 1, 8), Grid(1, 5, 7), RULES[0], rest=-1.0)
