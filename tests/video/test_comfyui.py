# SPDX-License-Identifier: Apache-2.0
"""The example node of ComfyUI, called as ComfyUI calls it, and in ComfyUI's own Wan where PYTHONPATH has ComfyUI."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import dynaxx as dx
from dynaxx.video import Grid, GridWindow, VideoPolicy, VideoRule, grid_attention

HEADS, HEAD_DIM, SHAPE = 4, 24, (3, 8, 13)
WINDOW = GridWindow(3, 5, 5)


@pytest.fixture
def patch(tmp_path):
    """Return a function that runs the node with a policy of some rules, and returns the model's options."""
    path = Path(__file__).parents[2] / "examples" / "comfyui_node.py"
    spec = importlib.util.spec_from_file_location("comfyui_node", path)
    node = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(node)

    def run(*rules, first=0.0, last=1.0, **fields):
        facts = {"model_type": "WanTransformer3DModel", "layers": 2, "q_heads": HEADS, "kv_heads": HEADS}
        policy = VideoPolicy(model=facts | {"head_dim": HEAD_DIM}, block_size=16, rules=rules, **fields)
        dx.save_policy(policy, tmp_path / "wan.json")
        model = SimpleNamespace(clone=lambda: SimpleNamespace(model_options={"transformer_options": {}}))
        (patched,) = node.NODE_CLASS_MAPPINGS["DynaxxPolicy"]().patch(model, str(tmp_path / "wan.json"), first, last)
        return patched.model_options["transformer_options"]

    return run


def dense(q, k, v, heads, mask=None, **more):
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(-2)


def test_refreshes_are_shared_between_steps_of_a_block(patch):
    options = patch(VideoRule.of(WINDOW, refresh=dx.TopK(1.0)), refresh_every=0.5)
    override = options.pop("optimized_attention_override")
    sigmas = torch.tensor([1.0, 0.8, 0.6, 0.3, 0.0])
    first, second = torch.randn(2, 3, 2, 312, HEADS * HEAD_DIM)

    def call(given, at, block=1):
        more = {"grid_sizes": SHAPE, "block_index": block, "sample_sigmas": sigmas, "sigmas": sigmas[at : at + 1]}
        return override(dense, *given, HEADS, transformer_options=options | more)

    def window(given):
        q, k, v = (x.unflatten(-1, (HEADS, -1)) for x in given)
        return grid_attention(q, k, v, Grid(*SHAPE), WINDOW, block_size=16).flatten(-2)

    torch.testing.assert_close(call(first, 0), dense(*first, HEADS))
    torch.testing.assert_close(call(second, 0, block=0), dense(*second, HEADS))
    expected = window(second) + dense(*first, HEADS) - window(first)
    torch.testing.assert_close(call(second, 1), expected)
    torch.testing.assert_close(call(second, 2), dense(*second, HEADS))
    torch.testing.assert_close(call(second, 0), dense(*second, HEADS))  # a new run


@pytest.mark.parametrize(("steps", "part"), [(0.5, {}), (0.9, {"first": 0.8})])
def test_calls_follow_the_policy_by_block_and_step_or_stay_dense(patch, steps, part):
    options = patch(VideoRule.of(WINDOW, layers=(1,), steps=(steps, 1.0)), dense_below=300, **part)
    override = options.pop("optimized_attention_override")
    sigmas = torch.tensor([1.0, 0.8, 0.6, 0.3, 0.0])
    q, k, v = torch.randn(3, 2, 312, HEADS * HEAD_DIM)
    window = grid_attention(*(x.unflatten(-1, (HEADS, -1)) for x in (q, k, v)), Grid(*SHAPE), WINDOW, block_size=16)

    def call(keys=312, mask=None, **changes):
        given = options | {"grid_sizes": SHAPE, "block_index": 1, "sample_sigmas": sigmas, "sigmas": sigmas[2:3]}
        return override(dense, q, k[:, :keys], v[:, :keys], HEADS, mask, transformer_options=given | changes)

    assert torch.equal(call(), window.flatten(-2))
    assert torch.equal(call(sigmas=torch.tensor([0.301, 0.301])), window.flatten(-2))
    expected = dense(q, k, v, HEADS)
    others = {"block_index": 0}, {"sigmas": sigmas[1:2]}, {"grid_sizes": (2, 8, 13)}, {"mask": torch.zeros(312, 312)}
    for change in others:
        assert torch.equal(call(**change), expected)
    assert torch.equal(call(keys=40), dense(q, k[:, :40], v[:, :40], HEADS))  # cross-attention
    assert override.counts == {"sparse": 2, "dense": 5}
    with pytest.raises(ValueError, match="the policy is for 4 heads of 24"):
        override(dense, q, k, v, 2, transformer_options=options)


def test_comfyui_runs_its_own_wan_under_a_policy(patch):
    cli_args = pytest.importorskip("comfy.cli_args", reason="needs ComfyUI in PYTHONPATH")
    cli_args.args.cpu = True
    import comfy.ldm.wan.model
    import comfy.ops

    torch.manual_seed(0)
    model = comfy.ldm.wan.model.WanModel(
        dim=HEADS * HEAD_DIM, ffn_dim=64, freq_dim=16, text_dim=16, num_heads=HEADS, num_layers=2,
        operations=comfy.ops.disable_weight_init, dtype=torch.float32)  # fmt: skip
    frames, height, width = SHAPE
    inputs = torch.randn(2, 16, frames, 2 * height, 2 * width), torch.tensor([500.0, 500.0]), torch.randn(2, 512, 16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.2 if parameter.ndim > 1 else 0.1))
        expected = model(*inputs, transformer_options={})
        for rule, close in ((dx.TopK(1.0), True), (WINDOW, False)):
            options = patch(VideoRule.of(rule))
            found = model(*inputs, transformer_options=options)
            assert torch.allclose(found, expected, rtol=1e-3, atol=1e-3) == close
            assert options["optimized_attention_override"].counts == {"sparse": 2, "dense": 2}
