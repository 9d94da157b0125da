# SPDX-License-Identifier: Apache-2.0
"""A policy is translated to OpenVINO GenAI's configuration, or refused with a message that names the fix."""

from typing import Any

import pytest

import dynaxx as dx
from dynaxx.engines.openvino import sparse_attention_config
from dynaxx.errors import UnsupportedInputError
from dynaxx.policy import Guard, ModelFacts, Rollout, to_spec

MODEL = ModelFacts(model_type="llama", layers=3, q_heads=4, kv_heads=2, head_dim=64)


def policy(rule: Any, layers: Any = "all", **fields: Any) -> dx.Policy:
    return dx.Policy(model=MODEL, rules=(dx.Rule(layers=layers, heads="all", attention=to_spec(rule)),), **fields)


def test_windows_and_sinks_are_trishape() -> None:
    found = sparse_attention_config(policy(dx.Sink(32) | dx.SlidingWindow(1024) | dx.LastQueries(100)))
    assert found.to_dict() == {
        "mode": "TRISHAPE",
        "num_last_dense_tokens_in_prefill": 100,
        "num_retained_start_tokens_in_cache": 32,
        "num_retained_recent_tokens_in_cache": 1024,
    }
    assert sparse_attention_config(policy(dx.SlidingWindow(64))).num_retained_start_tokens_in_cache == 0
    same = sparse_attention_config(policy(dx.GlobalTokens(64) | dx.SlidingWindow(512), dense_below=512))
    assert same.num_retained_start_tokens_in_cache == 64


def test_mass_by_antidiagonals_is_xattention() -> None:
    chosen = dx.TopP(0.9, dx.AntiDiagonal(8), per="head")
    assert sparse_attention_config(policy(chosen, block_size=128)).to_dict() == {
        "mode": "XATTENTION",
        "num_last_dense_tokens_in_prefill": 0,
        "xattention_threshold": 0.9,
        "xattention_block_size": 128,
        "xattention_stride": 8,
    }
    assert sparse_attention_config(policy(dx.LastQueries(64) | chosen)).num_last_dense_tokens_in_prefill == 64


@pytest.mark.parametrize(
    ("rule", "fields", "said"),
    [
        (dx.TopK(0.3), {}, "cannot express TopK"),
        (dx.TopP(0.9), {}, "AntiDiagonal"),
        (dx.TopP(0.9, dx.AntiDiagonal(8)), {}, 'per="head"'),
        (dx.SlidingWindow(64) | dx.TopP(0.9, dx.AntiDiagonal(8), per="head"), {}, "only LastQueries"),
        (dx.TopP((0.9, 0.9, 0.8, 0.9), dx.AntiDiagonal(8), per="head"), {}, "the policy has 2"),
        (dx.TopP(0.9, dx.AntiDiagonal(8), per="head"), {"dense_below": 1}, "any length"),
        (dx.TopP(0.9, dx.AntiDiagonal(8), per="head"), {"block_size": (32, 64)}, "one block size"),
        (dx.Sink(4) | dx.SlidingWindow(64), {}, "32 for 4"),
        (dx.Sink(32), {}, "needs a SlidingWindow"),
        (dx.SlidingWindow(64) | dx.Strided(64), {}, "cannot express Strided"),
        (dx.SlidingWindow(64), {"dense_below": 4096}, "from 4096 tokens on"),
        (dx.SlidingWindow(64), {"sparse_from": 4096}, "from 4096 tokens on"),
        (dx.SlidingWindow(64), {"layers": [0, 2]}, "all heads of all layers"),
        (dx.SlidingWindow(64), {"guard": Guard()}, "no guard"),
        (dx.SlidingWindow(64), {"rollout": Rollout(share=0.5)}, "no rollout"),
    ],
)
def test_the_rest_is_refused(rule: Any, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedInputError, match="openvino_genai") as caught:
        sparse_attention_config(policy(rule, **fields))
    assert said in str(caught.value)


def test_a_policy_without_rules_is_refused() -> None:
    with pytest.raises(UnsupportedInputError, match="all heads of all layers"):
        sparse_attention_config(dx.Policy(model=MODEL))


def test_the_config_is_genais_own() -> None:
    genai = pytest.importorskip("openvino_genai")
    made = sparse_attention_config(policy(dx.Sink(32) | dx.SlidingWindow(1024))).config()
    assert made.mode == genai.SparseAttentionMode.TRISHAPE
    assert made.num_retained_recent_tokens_in_cache == 1024
    assert made.num_last_dense_tokens_in_prefill == 0
