# SPDX-License-Identifier: Apache-2.0
"""A model with a policy counts its calls, and the counts match what ran."""

import pytest
import torch

import dynaxx as dx
from dynaxx.telemetry.snapshot import Snapshot

transformers = pytest.importorskip("transformers")

from dynaxx.integrations.transformers.apply_policy import model_facts  # noqa: E402


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    return transformers.LlamaForCausalLM(config).eval()


def test_prefill_and_decode_are_measured(model, telemetry):
    rules = (
        dx.Rule.of(dx.Sink(4) | dx.SlidingWindow(64) | dx.TopK(0.2), layers=[0, 1]),
        dx.Rule.of(dx.TopK(0.25), layers=[0, 1], phase="decode"),
    )
    policy = dx.Policy(model=model_facts(model), block_size=32, rules=rules)
    ids = torch.randint(0, 100, (2, 500))
    layouts = {}
    with dx.apply(model, policy) as handle, torch.no_grad():
        handle.counts.probe.sample_rate, handle.counts.probe.spacing = 1.0, 0.0
        with handle.watch(lambda layer, layout: layouts.__setitem__(layer, layout)):
            out = model(ids, use_cache=True)
            for _ in range(3):
                out = model(ids[:, :1], past_key_values=out.past_key_values)
        sparse = handle.stats()["sparse_calls"]
        seen = Snapshot.of(telemetry)
        held = 2 * 2 * 2 * 3 * (500 + 3) * 16 * 4  # keys and values, batch, kv heads, layers, tokens, head_dim, bytes
        assert seen.gauge("dynaxx_kv_cache_bytes") == held
        del out
    calls = {(r.labels["backend"], r.labels["phase"]): r.value for r in seen.get("dynaxx_layer_calls_total")}
    assert calls == {("cpu", "prefill"): 2, ("cpu", "decode"): 6, ("own_pattern", "prefill"): 1, ("dense", "decode"): 3}
    assert sparse == 8
    assert seen.by("dynaxx_dense_calls_total", "reason") == {"no rule": 3}
    assert sum(r.count for r in seen.get("dynaxx_attention_seconds", phase="decode")) == 6
    assert sum(r.count for r in seen.get("dynaxx_attention_seconds", phase="prefill")) == 2
    for layer, layout in layouts.items():
        (density,) = seen.get("dynaxx_layer_density_ratio", layer=str(layer))
        assert density.value == pytest.approx(layout.density())
    assert seen.by("dynaxx_requests_total", "route") == {"sparse": 1}
    assert seen.total("dynaxx_tokens_total") == 1000
    assert seen.total("dynaxx_telemetry_errors_total") == 0


def test_a_removed_handle_leaves_no_gauge_that_lies(model, telemetry):
    policy = dx.Policy(model=model_facts(model), block_size=32, rules=(dx.Rule.of(dx.SlidingWindow(64)),))
    with dx.apply(model, policy), torch.no_grad():
        model(torch.randint(0, 100, (1, 200)), use_cache=True)
    assert Snapshot.of(telemetry).gauge("dynaxx_kv_cache_bytes") == 0
