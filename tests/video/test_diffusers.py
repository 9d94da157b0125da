# SPDX-License-Identifier: Apache-2.0
"""Policies in random transformers of diffusers: exact at full density, and what they cover, count and restore."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from diffusion_models import FAMILIES, random_model, run

import dynaxx as dx
from dynaxx.video import GridWindow, RadialDecay, VideoPolicy, VideoRule, apply, model_facts

diffusers = pytest.importorskip("diffusers", reason="make test-video")
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast", "ignore:The .grad attribute")
EVERYTHING = dx.TopK(1.0, dx.MeanPool(), per="head")
SPARSE = GridWindow(1, 1, 1) | dx.TopK(0.1, dx.MeanPool(), per="head")


def policy_for(model, *rules, **fields):
    rules = [rule if isinstance(rule, VideoRule) else VideoRule.of(rule) for rule in rules]
    return VideoPolicy(model=model_facts(model), rules=tuple(rules), **{"block_size": 16, **fields})


def close(a, b, error=2e-5):
    return float((a - b).norm() / b.norm()) < error


@pytest.mark.parametrize("order", ["bars", "hilbert"])
@pytest.mark.parametrize("name", FAMILIES)
def test_full_density_is_dense_attention(name, order):
    model, arguments = random_model(diffusers, name)
    with torch.no_grad():
        dense = run(model, arguments)
        with dx.apply(model, policy_for(model, EVERYTHING, order=order)) as handle:
            assert close(run(model, arguments), dense)
        assert handle.counts["sparse"] >= 2
        assert set(handle.counts) == {"sparse"}
        assert handle.density() == 1.0
        assert torch.equal(run(model, arguments), dense)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sparse_policy_sees_less_and_is_what_its_mask_says(name):
    """Attention of every call equals dense attention with the layout as a mask, in the model's order."""
    shape = (1, 16, 16) if name in ("flux", "qwen") else (6, 12, 16)
    model, arguments = random_model(diffusers, name, shape=shape)
    seen = []
    with torch.no_grad(), apply(model, policy_for(model, SPARSE)) as handle:

        def check(layer, q, k, v, out, layout):
            grid = handle.grid(q)
            shown = grid.restored(grid.restored(layout.to_dense(), 2), 3)
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=shown).transpose(1, 2)
            own = out.abs().sum((2, 3), keepdim=True) > 0  # rows of padding may be blank
            seen.append(float(((out - expected) * own).abs().max()))

        handle.watchers.append(check)
        assert bool(run(model, arguments).isfinite().all())
    assert max(seen) < 1e-4
    assert handle.density() < 0.9


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_at_full_density_are_those_of_dense_attention(name):
    model, arguments = random_model(diffusers, name, batch=1)

    def gradients():
        model.zero_grad()
        run(model, arguments).square().mean().backward()
        return {at: x.grad.clone() for at, x in model.named_parameters() if x.grad is not None}

    expected = gradients()
    with apply(model, policy_for(model, EVERYTHING)) as handle:
        found = gradients()
    assert handle.counts["sparse"]
    largest = max(float(x.norm()) for x in expected.values())
    assert all(float((found[at] - x).norm()) < 1e-3 * float(x.norm()) + 1e-6 * largest for at, x in expected.items())


@pytest.mark.parametrize("text", [1, 16, 33])
@pytest.mark.parametrize("name", ["hunyuan", "cogvideox", "flux"])
def test_texts_of_any_length(name, text):
    model, arguments = random_model(diffusers, name, text=max(text, 4))
    with torch.no_grad():
        dense = run(model, arguments)
        with apply(model, policy_for(model, EVERYTHING)):
            assert close(run(model, arguments), dense)


@pytest.mark.parametrize("shape", [(1, 2, 2), (5, 6, 14), (2, 34, 2)])
def test_any_grid(shape):
    model, arguments = random_model(diffusers, "wan", shape=shape)
    with torch.no_grad():
        dense = run(model, arguments)
        with apply(model, policy_for(model, EVERYTHING)):
            assert close(run(model, arguments), dense)


def test_guidance_in_one_batch_or_two_calls_is_the_same():
    model, arguments = random_model(diffusers, "wan")
    one_by_one = [{name: x[i : i + 1] for name, x in arguments.items()} for i in range(2)]
    with torch.no_grad(), apply(model, policy_for(model, SPARSE)):
        both = run(model, arguments)
        assert close(torch.cat([run(model, each) for each in one_by_one]), both)


def test_rules_per_layer_head_and_step():
    model, arguments = random_model(diffusers, "wan")
    rules = (
        VideoRule.of(GridWindow(1, 1, 1), layers=(1,), heads=(0,)),
        VideoRule.of(RadialDecay(2, 2), layers=(0,), steps=(0.5, 1.0)),
    )
    with torch.no_grad(), apply(model, policy_for(model, *rules)) as handle:
        with pytest.raises(dx.UnsupportedInputError, match=r"handle\.scheduler = pipe\.scheduler"):
            run(model, arguments)
        handle.step(0, 4)
        layouts = {}
        handle.watchers.append(lambda layer, q, k, v, out, layout: layouts.setdefault(layer, layout))
        run(model, arguments)
        assert handle.counts == {"dense: no rule": 1, "sparse": 1}
        assert layouts[0] is None
        layout = layouts[1]
        counts = layout.kv_num_blocks[0].sum(-1).tolist()
        assert counts[0] < counts[1] == layout.q_blocks * layout.kv_blocks
        tensors = handle.on_step_end(SimpleNamespace(num_timesteps=4), 1, None, {"latents": 1})
        assert tensors == {"latents": 1}
        run(model, arguments)
        assert handle.counts == {"dense: no rule": 1, "sparse": 3}
        said = handle.explain()
    assert "from 50% of the steps:\nlayer 0: heads 0-1: RadialDecay(height=2, width=2)" in said
    assert "3 calls sparse" in said
    with pytest.raises(ValueError, match="`index` must be from 0 to 3, got 4"):
        handle.step(4, 4)


@pytest.mark.parametrize(("name", "unit"), [("wan", 1.0), ("flux", 1000.0)])
def test_a_scheduler_tells_the_step(name, unit):
    model, arguments = random_model(diffusers, name)
    scheduler = SimpleNamespace(timesteps=torch.tensor([1000.0, 900.0, 500.0, 250.0]))
    policy = policy_for(model, VideoRule.of(EVERYTHING, steps=(0.5, 1.0)))
    with torch.no_grad(), apply(model, policy, scheduler=scheduler) as handle:
        for time in scheduler.timesteps:
            run(model, {**arguments, "timestep": torch.full((2,), float(time) / unit)})
    assert handle.counts == {"dense: no rule": 4, "sparse": 4}


def test_calls_that_a_policy_cannot_serve_are_counted():
    model, arguments = random_model(diffusers, "wan")
    with torch.no_grad():
        dense = run(model, arguments)
        with apply(model, policy_for(model, SPARSE, dense_below=10_000)) as handle:
            assert torch.equal(run(model, arguments), dense)
            assert handle.counts == {"dense: below dense_below": 2}
            handle.kill_switch.engage()
            run(model, arguments)
        assert handle.counts == {"dense: below dense_below": 2, "dense: kill switch": 2}
    other, arguments = random_model(diffusers, "ltx")
    coordinates = torch.zeros(2, 3, arguments["hidden_states"].shape[1])
    unnamed = {name: x for name, x in arguments.items() if name not in ("num_frames", "height", "width")}
    with torch.no_grad(), apply(other, policy_for(other, SPARSE)) as handle:
        run(other, {**unnamed, "video_coords": coordinates})
    assert handle.counts == {"dense: grid is unknown": 2}
    with pytest.raises(dx.PolicyError, match="is for another model"):
        apply(other, policy_for(model, SPARSE))
    with pytest.raises(dx.UnsupportedInputError, match="served are WanTransformer3DModel"):
        model_facts(torch.nn.Linear(1, 1))
    with apply(model, policy_for(model, SPARSE)), pytest.raises(ValueError, match="has a policy already"):
        apply(model, policy_for(model, SPARSE))
    with pytest.raises(ValueError, match="takes no other argument"):
        dx.apply(model, policy_for(model, SPARSE), name="wan")
    with pytest.raises(TypeError, match="`policy` must be"):
        apply(model, None)


def test_dense_calls_keep_the_backend_of_the_user():
    model, arguments = random_model(diffusers, "wan")
    model.set_attention_backend("_native_math")
    try:
        with torch.no_grad(), apply(model, policy_for(model)) as handle, torch.profiler.profile() as found:
            run(model, arguments)
    finally:
        model.set_attention_backend("native")  # which diffusers sets for the whole process
    assert "aten::_scaled_dot_product_attention_math" in {event.key for event in found.key_averages()}
    assert handle.counts == {"dense: no rule": 2}


def test_processors_without_a_known_attention_are_refused():
    model, _ = random_model(diffusers, "wan")
    model.blocks[1].attn1.processor = SimpleNamespace()
    with pytest.raises(dx.UnsupportedInputError, match="the processor calls no known attention"):
        apply(model, policy_for(model, SPARSE))
    assert not hasattr(model.blocks[0].attn1.processor, "dynaxx_layer")


def test_a_compiled_block_serves_all_layers_and_steps():
    model, arguments = random_model(diffusers, "wan", shape=(6, 20, 24), batch=1)
    policy = policy_for(model, VideoRule.of(SPARSE, steps=(0.5, 1.0)))
    with torch.no_grad(), apply(model, policy) as handle:
        handle.step(0, 2)
        dense = run(model, arguments)
        handle.step(1, 2)
        sparse = run(model, arguments)
        model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
        torch._dynamo.utils.counters.clear()
        assert close(run(model, arguments), sparse)
        handle.step(0, 2)
        assert close(run(model, arguments), dense)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not close(sparse, dense)


@pytest.mark.slow
def test_a_compiled_model_trains():
    model, arguments = random_model(diffusers, "wan", batch=1)
    run(model, arguments).square().mean().backward()
    expected = model.blocks[0].attn1.to_q.weight.grad.clone()
    model.zero_grad()
    with apply(model, policy_for(model, EVERYTHING)) as handle:
        compiled = torch.compile(model, backend="aot_eager")
        run(compiled, arguments).square().mean().backward()
    assert handle.counts["sparse"] == 2
    assert close(model.blocks[0].attn1.to_q.weight.grad, expected, 1e-3)


def test_hooks_of_offloading_keep_working():
    hooks = pytest.importorskip("accelerate.hooks")
    model, arguments = random_model(diffusers, "wan")
    with torch.no_grad():
        dense = run(model, arguments)
        hooks.add_hook_to_module(model, hooks.AlignDevicesHook("cpu", io_same_device=True))
        with apply(model, policy_for(model, EVERYTHING)) as handle:
            assert close(run(model, arguments), dense)
    assert handle.counts == {"sparse": 2}


@pytest.mark.parametrize("name", FAMILIES)
def test_copies_and_pickles_have_the_original_attention(name, caplog):
    model, arguments = random_model(diffusers, name)
    with torch.no_grad():
        dense = run(model, arguments)
        with apply(model, policy_for(model, SPARSE)) as handle:
            sparse = run(model, arguments)
            stored = pickle.dumps(model)
            assert b"dynaxx" not in stored
            for other in (copy.deepcopy(model), pickle.loads(stored)):
                assert torch.equal(run(other, arguments), dense)
                with apply(other, policy_for(other, SPARSE)):
                    assert torch.equal(run(other, arguments), sparse)
            assert caplog.text.count("with its original attention") == 2
            assert torch.equal(run(model, arguments), sparse)
            for attempt in (copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match="copy or pickle the model"):
                    attempt(handle)
        assert torch.equal(run(model, arguments), dense)
