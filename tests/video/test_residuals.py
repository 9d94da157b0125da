# SPDX-License-Identifier: Apache-2.0
"""Residual sharing: exact where it must be, and never across runs, passes or shapes."""

import pytest
import torch
from diffusion_models import random_model, run

import dynaxx as dx
from dynaxx.policy.resolve import plan_of
from dynaxx.testing import make_qkv
from dynaxx.video import Grid, GridWindow, VideoPolicy, VideoRule, model_facts
from dynaxx.video.attention import Padding, attend
from dynaxx.video.residuals import MAX_CALLS, Residuals

GRID = Grid(3, 7, 13, text=6)
FEW, MORE = dx.TopK(0.1, dx.MeanPool(), per="head"), dx.TopK(0.5, dx.MeanQuery(), per="head")
FACTS = {"model_type": "X", "layers": 2, "q_heads": 4, "kv_heads": 4, "head_dim": 8}


def plan(rule, heads=2):
    return plan_of([rule] * heads, heads, (16, 16), causal=False)


def qkv(seed=0, batch=1, heads=2):
    torch.manual_seed(seed)
    return [x.double() for x in make_qkv(batch, GRID.seqlen, GRID.seqlen, heads, heads, 8)]


def step(kept, index, given, few=FEW, more=MORE, *, steps=10, period=(0.0, 0), **options):
    return kept.attend(*given, GRID, plan(few), plan(more), step=(index, steps), period=period, **options)


def test_after_a_refresh_equal_inputs_give_the_denser_output():
    kept, given, every = Residuals(), qkv(), dx.TopK(1.0)
    for index in range(3):
        out, layouts = step(kept, index, given)
        torch.testing.assert_close(out, attend(*given, GRID, plan(MORE))[0])
        assert len(layouts) == (1 if index else 2)
    dense = attend(*given, GRID, plan(every))[0]
    for index, rule in ((5, FEW), (6, every)):  # each starts a period, with all blocks
        torch.testing.assert_close(step(kept, index, given, rule, every, period=(0.0, index))[0], dense)
    other = qkv(1)  # all blocks between refreshes leave no difference
    found, layouts = step(kept, 7, other, every, every, period=(0.0, 6))
    assert len(layouts) == 1
    torch.testing.assert_close(found, attend(*other, GRID, plan(every))[0])


@pytest.mark.parametrize("padded", [False, True])
def test_between_refreshes_the_kept_blocks_are_corrected(padded):
    """Equal dense attention that is masked by the blocks of the refresh."""
    first, second = qkv(0, 2), qkv(1, 2)
    visible = torch.ones(2, GRID.seqlen, dtype=torch.bool)
    visible[1, 120:] = not padded
    padding = Padding(visible, blank=True) if padded else None
    kept = Residuals()
    _, (dense, few) = step(kept, 0, first, padding=padding)
    out, (again,) = step(kept, 1, second, padding=padding)
    assert again is few
    assert few.kv_indices.numel() < dense.kv_indices.numel()

    def masked(given, layout):
        shown = GRID.restored(GRID.restored(layout.to_dense(), 2), 3)
        q, k, v = (x.transpose(1, 2) for x in given)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=shown).transpose(1, 2)
        return out.masked_fill(~visible[:, :, None, None], 0.0)

    torch.testing.assert_close(out, masked(second, few) + masked(first, dense) - masked(first, few))


@pytest.mark.parametrize(
    ("index", "steps", "given"),
    [
        (0, 10, qkv(1)),  # a new run
        (3, 12, qkv(1)),
        (3, 10, qkv(1, batch=2)),
        (3, 10, [x.float() for x in qkv(1)]),
    ],
)
def test_differences_never_reach_another_run_or_shape(index, steps, given):
    kept = Residuals()
    step(kept, 2, qkv())
    out, layouts = step(kept, index, given, steps=steps)
    assert len(layouts) == 2
    torch.testing.assert_close(out, attend(*given, GRID, plan(MORE))[0])


def test_calls_of_a_step_are_kept_apart_and_the_last_step_keeps_nothing():
    kept = Residuals()
    for index in (0, 1):
        for number in range(MAX_CALLS + 1):
            given = qkv(number)
            out, layouts = step(kept, index, given, steps=3)
            torch.testing.assert_close(out, attend(*given, GRID, plan(MORE))[0])
            assert len(layouts) == (1 if index or number == MAX_CALLS else 2)
    assert len(kept._kept) == MAX_CALLS
    assert [len(step(kept, 2, qkv(), steps=3)[1]) for _ in range(MAX_CALLS)] == [1] * MAX_CALLS
    assert not kept._kept


def test_gradients_are_refused():
    kept, (q, k, v) = Residuals(), qkv()
    with pytest.raises(dx.UnsupportedInputError, match=r"run under torch\.no_grad"):
        step(kept, 0, (q, k.requires_grad_(), v))
    with torch.no_grad():
        step(kept, 0, (q, k, v))


def test_policies_store_and_check_refreshes(tmp_path):
    rules = (
        VideoRule.of(FEW, layers=(0,), heads=(0, 1), refresh=dx.TopK((0.3, 0.6), dx.MeanPool(), per="head")),
        VideoRule.of(FEW, layers=(0,), heads=(2,), steps=(0.2, 1.0), refresh=dx.TopK(1.0)),
        VideoRule.of(FEW, layers=(1,)),
    )
    policy = VideoPolicy(model=FACTS, rules=rules, refresh_every=0.15)
    dx.save_policy(policy, tmp_path / "policy.json")
    assert dx.video.load_policy(tmp_path / "policy.json") == policy
    assert set(policy.plans(0.5, refresh=True)) == {0}
    assert policy.depends_on_step
    periods = [policy.period(index / 20) for index in range(20)]
    assert [at for at in range(20) if at == 0 or periods[at] != periods[at - 1]] == [0, 3, 4, 7, 10, 13, 16, 19]
    mixed = (VideoRule.of(FEW, heads=(0,), refresh=MORE), VideoRule.of(FEW, heads=(1,)))
    for wrong, every, said in (
        (rules, 0.0, "`refresh_every` must be above 0.0"),
        (rules[2:], 0.2, "`refresh_every` must be above 0.0 if and only if"),
        (mixed, 0.2, "`rules` of layer 0 at step share 0 must all have `refresh`, or none"),
        ((VideoRule.of(FEW, refresh=dx.TopK((0.3, 0.6))),), 0.2, r"`rules\.0\.refresh` must give one budget"),
    ):
        with pytest.raises(dx.PolicyError, match=said):
            VideoPolicy(model=FACTS, rules=wrong, refresh_every=every)


def test_a_transformer_shares_residuals_in_runs_with_guidance():
    """Two runs in turn equal runs of their own; a compiled model and offloading do as eager; counters are honest."""
    diffusers = pytest.importorskip("diffusers", reason="make test-video")
    hooks = pytest.importorskip("accelerate.hooks")
    model, arguments = random_model(diffusers, "wan", shape=(6, 20, 24))
    rule = VideoRule.of(GridWindow(1, 1, 1), refresh=dx.TopK(1.0))
    policy = VideoPolicy(model=model_facts(model), rules=(rule,), refresh_every=0.5, block_size=16)
    steps = 5

    @torch.no_grad()
    def denoise(handle, seed):
        x = arguments["hidden_states"] + seed
        text = arguments["encoder_hidden_states"]
        for index in range(steps):
            handle.step(index, steps)
            made = [run(model, {**arguments, "hidden_states": x, "encoder_hidden_states": t}) for t in (text, -text)]
            x = x - 0.2 * (made[0] + 2 * (made[0] - made[1]))
        return x

    with dx.apply(model, VideoPolicy(model=policy.model, rules=(), block_size=16)) as handle:
        dense = denoise(handle, 0)
    alone = []
    for seed in (0, 1):
        with dx.apply(model, policy) as handle:
            alone.append(denoise(handle, seed))
    with dx.apply(model, policy) as handle:
        layouts = []
        handle.watchers.append(lambda layer, q, k, v, out, layout: layouts.append(layout.density(causal=False)))
        assert torch.equal(denoise(handle, 0), alone[0])
        assert handle.counts == {"refresh": 2 * 2 * 2, "sparse": 2 * 2 * 3}  # passes x layers x steps 0, 3
        few = min(layouts)
        assert handle.density() == pytest.approx((2 * 1.0 + 5 * few) / 5)
        assert "layer 1, refreshed every 50%: heads 0-1: TopK" in handle.explain()
        assert torch.equal(denoise(handle, 1), alone[1])
        with pytest.raises(dx.UnsupportedInputError, match="gradients"):
            run(model, arguments)
        hooks.add_hook_to_module(model, hooks.AlignDevicesHook("cpu", io_same_device=True))
        assert torch.equal(denoise(handle, 0), alone[0])
        hooks.remove_hook_from_module(model)
        model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(denoise(handle, 0), alone[0], rtol=1e-4, atol=1e-4)
    window = VideoPolicy(model=policy.model, rules=(VideoRule.of(GridWindow(1, 1, 1)),), block_size=16)
    model, _ = random_model(diffusers, "wan", shape=(6, 20, 24))
    with dx.apply(model, window) as handle:
        plain = denoise(handle, 0)
    assert (alone[0] - dense).norm() < 0.5 * (plain - dense).norm()
