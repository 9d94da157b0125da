# SPDX-License-Identifier: Apache-2.0
"""A video policy in vLLM-Omni's own Wan transformer, in one process and split by heads and by tokens."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dynaxx as dx
from dynaxx.video import Grid, GridWindow, VideoPolicy, VideoRule, model_facts
from dynaxx.video.attention import attend

diffusers = pytest.importorskip("diffusers", reason="make test-vllm-omni")
pytest.importorskip("vllm_omni", reason="make test-vllm-omni")
pytestmark = pytest.mark.slow

SIZES = {
    "num_attention_heads": 4, "attention_head_dim": 32, "in_channels": 4, "out_channels": 4, "text_dim": 16,
    "freq_dim": 16, "ffn_dim": 64, "num_layers": 2, "rope_max_seq_len": 32,
}  # fmt: skip
TOP = dx.TopK(0.2, dx.MeanPool(), per="head")
BY_HEAD = (  # heads differ, so that a rank that took another's rules would be seen
    VideoRule.of(GridWindow(1, 3, 3), heads=(0, 1)),
    VideoRule.of(TOP, heads=(2,), layers=(0,)),
    VideoRule.of(GridWindow(3, 1, 1) | TOP, heads=(2,), layers=(1,), steps=(0.5, 1.0)),
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = diffusers.WanTransformer3DModel(**SIZES).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return model


def inputs(shape=(5, 12, 14)):
    draw = torch.Generator().manual_seed(1)
    made = lambda *size: torch.randn(size, generator=draw)
    return made(1, 4, *shape), torch.tensor([500]), made(1, 7, 16)


def policy_of(model, *rules, **fields):
    return VideoPolicy(model=model_facts(model), rules=rules, **{"block_size": 16, **fields})


def omni(model, policy, tmp_path, *, ranks=1, split="", given=None, steps=(None,), **environment):
    """Return the outputs and counts of every process of vLLM-Omni; raise CalledProcessError if one fails."""
    dx.save_policy(policy, tmp_path / "policy.json")
    file = tmp_path / "given.pt"
    weights = {name: weight.detach() for name, weight in model.state_dict().items()}
    torch.save({"config": SIZES, "weights": weights, "inputs": given or inputs(), "steps": steps, "split": split}, file)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "DYNAXX_VIDEO_POLICY": str(tmp_path / "policy.json"), "OMP_NUM_THREADS": "1"} | {
        name: value for name, value in environment.items() if value is not None
    }
    worker = [sys.executable, str(Path(__file__).with_name("omni_worker.py"))]
    with (tmp_path / "log").open("w+") as log:
        started = [
            subprocess.Popen([*worker, str(rank), str(ranks), str(port), str(file)], env=environment, stdout=log,
                             stderr=log) for rank in range(ranks)
        ]  # fmt: skip
        codes = [process.wait(timeout=300) for process in started]
        if any(codes):
            log.seek(0)
            raise subprocess.CalledProcessError(max(codes), worker, log.read())
    return [torch.load(f"{file}.{rank}") for rank in range(ranks)]


def close(a, b):
    return float((a - b).norm() / b.norm()) < 1e-4


def test_every_layer_follows_the_policy(model, tmp_path):
    policy, grid = policy_of(model, *BY_HEAD), Grid(5, 6, 7)
    (found,) = omni(model, policy, tmp_path, steps=(0, 9), DYNAXX_VIDEO_STEPS="10")
    assert found["counts"] == {"sparse": 4}
    outputs = []
    for at, (layer, q, k, v, out) in enumerate(found["calls"]):
        expected, layout = attend(q, k, v, grid, policy.plans(0.0 if at < 2 else 0.9)[layer], scale=32**-0.5)
        torch.testing.assert_close(out, expected)
        assert layout.kv_indices.numel() < layout.visible_blocks(causal=False)
        outputs.append(out)
    with torch.no_grad(), dx.apply(model, policy) as handle:
        handle.share = 0.9
        assert close(found["outputs"][1], model(*inputs(), return_dict=False)[0])
    assert not close(outputs[1], outputs[3])  # a rule of the second layer begins at half of the steps
    assert not close(*found["outputs"])


def test_residuals_are_shared_between_steps(model, tmp_path):
    rule = VideoRule.of(GridWindow(1, 3, 3), refresh=dx.TopK(1.0))
    policy = policy_of(model, rule, refresh_every=0.5)
    (found,) = omni(model, policy, tmp_path, steps=(0, 1, 5), DYNAXX_VIDEO_STEPS="10")
    assert found["counts"] == {"refresh": 4, "sparse": 2}
    with torch.no_grad():
        dense = model(*inputs(), return_dict=False)[0]
    assert all(close(output, dense) for output in found["outputs"])


@pytest.mark.parametrize(
    ("split", "shape", "rules", "of_second"),
    [
        ("tensor_parallel_size", (5, 12, 14), BY_HEAD[:1], {"dense: no rule": 2}),  # heads 2 and 3 have none
        ("ulysses_degree", (4, 12, 14), BY_HEAD[:1], {"dense: no rule": 2}),
        ("ulysses_degree", (5, 6, 14), (BY_HEAD[0], VideoRule.of(GridWindow(3, 1, 1), heads=(2, 3))), {"sparse": 2}),
    ],
    ids=["tensor parallel", "ulysses", "ulysses, odd"],
)
def test_ranks_follow_the_rules_of_their_heads(model, tmp_path, split, shape, rules, of_second):
    """The last grid has an odd number of tokens, to which vLLM-Omni adds one that the policy leaves out."""
    policy, given = policy_of(model, *rules), inputs(shape)
    (whole,) = omni(model, policy, tmp_path, given=given)
    assert whole["counts"] == {"sparse": 2}
    first, second = omni(model, policy, tmp_path, ranks=2, split=split, given=given)
    for found in (first, second):
        assert close(found["outputs"][0], whole["outputs"][0])
    assert first["counts"] == {"sparse": 2}
    assert second["counts"] == of_second


def test_what_is_not_covered_is_dense_with_its_reason(model, tmp_path):
    (dense,) = omni(model, policy_of(model, *BY_HEAD), tmp_path, DYNAXX_VIDEO_POLICY="")
    assert dense["counts"] == {}
    for policy, reason in (
        (policy_of(model, *BY_HEAD), "step is unknown; set DYNAXX_VIDEO_STEPS to the number of steps"),
        (policy_of(model, BY_HEAD[0], dense_below=10_000), "below dense_below"),
    ):
        (found,) = omni(model, policy, tmp_path)
        assert torch.equal(found["outputs"][0], dense["outputs"][0])
        assert found["counts"] == {f"dense: {reason}": 2}


def test_a_policy_of_another_model_is_refused(model, tmp_path):
    facts = model_facts(model).model_copy(update={"q_heads": 6, "kv_heads": 6})
    with pytest.raises(subprocess.CalledProcessError) as error:
        omni(model, VideoPolicy(model=facts, rules=(VideoRule.of(TOP),)), tmp_path)
    assert "DYNAXX_VIDEO_POLICY is for 2 blocks of 6 heads of 32" in error.value.output
