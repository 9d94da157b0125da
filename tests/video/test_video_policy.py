# SPDX-License-Identifier: Apache-2.0
"""Policies for diffusion transformers: their file, their errors, and the plans that they give."""

import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dynaxx as dx
from dynaxx.video import GridWindow, RadialDecay, VideoPolicy, VideoRule, load_policy
from dynaxx.video.diffusers.families import Family, timestep_of

FACTS = {"model_type": "WanTransformer3DModel", "layers": 3, "q_heads": 4, "kv_heads": 4, "head_dim": 8}
POOLED = dx.TopK(0.2, dx.MeanPool(), per="head")


def policy(*rules, **fields):
    return VideoPolicy(model=FACTS, rules=rules, **fields)


def test_a_policy_survives_its_file(tmp_path):
    rules = (
        VideoRule.of(GridWindow(3, width=5) | POOLED, layers=(0, 2), steps=(0.25, 1.0)),
        VideoRule.of(dx.TopK((0.1, 0.2), dx.MeanPool(), per="head"), layers=(1,), heads=(0, 3)),
        VideoRule.of(None, layers=(0,), steps=(0.0, 0.25)),
    )
    made = policy(*rules, order="hilbert", dense_below=4096)
    dx.save_policy(made, tmp_path / "policy.json")
    assert load_policy(tmp_path / "policy.json") == made
    assert made.starts == [0.0, 0.25]
    assert made.depends_on_step
    assert set(made.plans(0.0)) == {1}
    assert set(made.plans(0.3)) == {0, 1, 2}
    assert not made.plans(0.3)[0].causal


def test_readers_name_the_other_kind(tmp_path):
    dx.save_policy(policy(), tmp_path / "video.json")
    with pytest.raises(dx.PolicyError, match=r"diffusion transformer; read it with dynaxx\.video\.load_policy"):
        dx.load_policy(tmp_path / "video.json")
    dx.save_policy(dx.Policy(model={**FACTS, "model_type": "llama"}), tmp_path / "text.json")
    with pytest.raises(dx.PolicyError, match=r"read it with dynaxx\.load_policy"):
        load_policy(tmp_path / "text.json")


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (
            (VideoRule.of(POOLED), VideoRule.of(GridWindow(3), layers=(1,))),
            "`rules.1` and `rules.0` both cover layer 1",
        ),
        ((VideoRule.of(POOLED, layers=(3,)),), "`rules.0.layers` must be different and below 3"),
        ((VideoRule.of(POOLED, heads=(1, 1)),), "`rules.0.heads` must be different and below 4"),
        ((VideoRule.of(dx.TopK((0.1, 0.2))),), "`rules.0.attention` must give one budget, or one per head"),
        ([VideoRule.of(POOLED, layers=(0,), steps=(i / 40, (i + 1) / 40)) for i in range(40)], "at most 16 ranges"),
    ],
)
def test_rules_that_do_not_fit_are_named(rules, said):
    with pytest.raises(dx.PolicyError) as error:
        policy(*rules)
    assert said in str(error.value)


def test_indices_are_those_of_other_rules():
    assert VideoRule.of(None, layers=torch.arange(2), heads=range(1)).layers == (0, 1)
    with pytest.raises(TypeError, match=r"`layers` must be 'all' or a sequence of indices such as \[0\], got 3"):
        VideoRule.of(None, layers=3)
    with pytest.raises(dx.PolicyError, match="`heads`: Input should be 'all', got 'first'"):
        VideoRule.of(None, heads="first")


def test_rules_of_different_steps_may_cover_the_same_head():
    made = policy(VideoRule.of(POOLED, steps=(0.0, 0.5)), VideoRule.of(RadialDecay(3, 3), steps=(0.5, 1.0)))
    assert [type(made.plans(share)[0].groups[0].rule) for share in (0.49, 0.5)] == [dx.TopK, RadialDecay]
    with pytest.raises(ValueError, match="a first and a larger last share"):
        VideoRule.of(POOLED, steps=(0.5, 0.5))


CHANGES = [
    {"rules": [{"attention": {"kind": "grid_window", "frames": 0}}]},
    {"order": "zigzag"},
    {"block_size": 48},
    {"surprise": 1},
    {"version": 2},
]


@pytest.mark.parametrize("change", CHANGES)
def test_damaged_files_are_refused(tmp_path, change):
    dx.save_policy(policy(), tmp_path / "policy.json")
    document = json.loads((tmp_path / "policy.json").read_text()) | change
    (tmp_path / "policy.json").write_text(json.dumps(document))
    with pytest.raises(dx.PolicyError, match=next(iter(change))):
        load_policy(tmp_path / "policy.json")


def test_of_many_timesteps_the_host_reads_one_number():
    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    seen = []
    family = Family(shape=lambda config, arguments: None, time_scale=1000.0)
    steps = torch.arange(1000.0).half()
    with Copies():
        assert timestep_of(family, {"timestep": steps}) == 999_000.0
    assert seen == ["aten.max.default", "aten._local_scalar_dense.default"]
    assert timestep_of(family, {"timestep": 0.5}) == 500.0
