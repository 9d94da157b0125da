# SPDX-License-Identifier: Apache-2.0
"""The Python model for Triton, without a server: batches, tokens, sampling, text pieces, repositories, metrics."""

import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

import dynaxx as dx
from dynaxx.engines.triton_server import RepositorySettings, write_repository
from dynaxx.engines.triton_server.generation import Limits, Prompt, TextStream, _draw, batches, generate
from dynaxx.engines.triton_server.metrics import TritonMetrics
from dynaxx.engines.triton_server.repository import export_model
from dynaxx.integrations.transformers import model_facts
from dynaxx.telemetry import Recorder
from tiny import llama, tokens

RULES = (
    dx.Rule.of(dx.Sink(4) | dx.SlidingWindow(32) | dx.TopK(0.3)),
    dx.Rule.of(dx.Sink(16) | dx.TopK(2, dx.MinMax()), phase="decode", block_size=16),
)


class Kept:
    def __init__(self, most=10**9):
        self.tokens, self.reasons, self._most = [], [], most

    def token(self, token, finish_reason):
        self.tokens.append(token)
        self.reasons.append(finish_reason)

    def cancelled(self):
        return len(self.tokens) >= self._most


def alone(model, prompt):
    """Return what transformers generates for one prompt."""
    ids = torch.tensor([prompt.ids])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=prompt.max_tokens)
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("rules", [(), RULES], ids=["dense", "sparse"])
def test_a_batch_generates_what_each_prompt_does_alone(rules):
    model = llama()
    model.generation_config.eos_token_id = None
    handle = dx.apply(model, dx.Policy(model=model_facts(model), block_size=16, rules=rules) if rules else None)
    shapes = [(1, 5), (3, 1), (17, 9), (300, 12), (64, 3), (65, 12)]
    prompts = [Prompt(tuple(tokens(n, seed=n).tolist()), most) for n, most in shapes]
    kept = [Kept() for _ in prompts]
    generate(model, handle, prompts, kept)
    assert [each.tokens for each in kept] == [alone(model, prompt) for prompt in prompts]
    assert all(each.reasons == [""] * (len(each.tokens) - 1) + ["length"] for each in kept)
    assert not rules or handle.stats()["sparse_calls"]


def test_end_tokens_and_cancelled_requests_end_early():
    model = llama()
    prompts = [Prompt(tuple(tokens(20, seed=seed).tolist()), 30) for seed in range(3)]
    first = alone(model, prompts[0])
    model.generation_config.eos_token_id = [first[4]]
    kept = [Kept(), Kept(most=2), Kept()]
    with dx.apply(model) as handle:
        generate(model, handle, prompts, kept)
    assert kept[0].tokens == first[: first.index(first[4]) + 1]
    assert kept[0].reasons[-1] == "stop"
    assert kept[1].reasons == ["", ""]
    assert kept[2].reasons[-1]


def test_draws_repeat_with_a_seed_and_keep_to_top_p():
    model, ids = llama(), tuple(tokens(20).tolist())
    prompts = [Prompt(ids, 12, temperature=1.0, seed=7), Prompt(ids, 12), Prompt(ids, 12, temperature=1.0, seed=8)]
    with dx.apply(model) as handle:
        first, again = [Kept() for _ in prompts], [Kept() for _ in prompts]
        generate(model, handle, prompts, first)
        generate(model, handle, prompts, again)
    assert [each.tokens for each in first] == [each.tokens for each in again]
    assert first[1].tokens == alone(model, prompts[1])
    assert first[0].tokens != first[2].tokens
    odds = torch.tensor([0.1, 0.5, 0.15, 0.25], dtype=torch.float64)
    drawn = {_draw(odds, 0.6, torch.Generator().manual_seed(seed)) for seed in range(50)}
    assert drawn == {1, 3}


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (Prompt((), 1), "at least one token"),
        (Prompt((64,), 1), "between 0 and 63, got 64"),
        (Prompt((-1,), 1), "between 0 and 63, got -1"),
        (Prompt((1,), 0), "`max_tokens` must be >= 1"),
        (Prompt((1,) * 1000, 25), "must fit 1024 tokens"),
        (Prompt((1,), 1, temperature=float("nan")), "`temperature`"),
        (Prompt((1,), 1, temperature=-1.0), "`temperature`"),
        (Prompt((1,), 1, temperature=1.0, top_p=0.0), "`top_p`"),
        (Prompt((1,), 1, top_p=0.5), "need a `temperature`"),
        (Prompt((1,), 1, seed=1), "need a `temperature`"),
    ],
)
def test_bad_prompts_are_refused(prompt, said):
    with pytest.raises(ValueError, match=said):
        Limits(llama()).check(prompt)


def test_batches_hold_every_prompt_once_and_keep_their_limit():
    prompts = [Prompt((1,) * n, 10) for n in (500, 3, 90, 4, 100, 2000, 5)]
    found = batches(prompts, 400)
    assert sorted(i for batch in found for i in batch) == list(range(7))
    assert found == [[1, 3, 6, 2], [4], [0], [5]]
    assert batches([], 400) == []


def test_text_appears_in_whole_characters():
    pieces = [b"a", "\N{SNOWMAN}".encode()[:1], "\N{SNOWMAN}".encode()[1:], b"b", b"\xe2"]
    stream = TextStream(lambda ids: b"".join(pieces[i] for i in ids).decode(errors="replace"))
    assert [stream.add(i, last=i == 4) for i in range(5)] == ["a", "", "\N{SNOWMAN}", "b", "\N{REPLACEMENT CHARACTER}"]


def test_repositories(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path / "model")
    policy = dx.Policy(model=model_facts(model), block_size=16, rules=RULES)
    write_repository(tmp_path / "model", policy, tmp_path / "repository")
    export_model(tmp_path / "model", None, tmp_path / "repository", {"name": "plain", "stream": "false"})
    assert sorted(path.name for path in (tmp_path / "repository").iterdir()) == ["dynaxx", "plain"]
    page = (Path(__file__).parents[2] / "docs" / "guides" / "deploy_triton.md").read_text(encoding="utf-8")
    assert set(re.findall(r"models/(\w+)/|`(\w+)/config", page)) == {("dynaxx", ""), ("", "dynaxx")}  # the default name
    version = tmp_path / "repository" / "dynaxx" / "1"
    assert sorted(path.name for path in version.iterdir()) == ["model", "model.py", "policy.json"]
    assert dx.load_policy(version / "policy.json") == policy
    assert "decoupled: false" in (tmp_path / "repository" / "plain" / "config.pbtxt").read_text()
    with pytest.raises(ValueError, match="already exists"):
        write_repository(tmp_path / "model", policy, tmp_path / "repository")
    with pytest.raises(ValueError, match=r"config\.json"):
        write_repository(tmp_path, None, tmp_path / "other")
    facts = {**policy.model.model_dump(), "layers": 3}
    with pytest.raises(dx.PolicyError):
        write_repository(tmp_path / "model", dx.Policy(model=facts), tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "options", [{"name": "../x"}, {"max_batch_size": "0"}, {"stream": "1"}, {"queue_delay": "-1"}, {"dtype": "int8"},
                {"streams": "true"}]
)  # fmt: skip
def test_bad_settings_are_refused(options, tmp_path):
    llama().save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=next(iter(options))):
        export_model(tmp_path / "model", None, tmp_path / "repository", options)
    assert not (tmp_path / "repository").exists()
    assert RepositorySettings().stream


def test_metrics_reach_triton():
    shown = {}

    class Family:
        COUNTER, GAUGE = "counter", "gauge"

        def __init__(self, name, description, kind):
            assert name not in shown
            shown[name] = {"kind": kind}
            self.name = name

        def Metric(self, labels):  # Triton's name
            key, values = json.dumps(labels), shown[self.name]
            values[key] = 0.0
            return SimpleNamespace(
                set=lambda value: values.__setitem__(key, value),
                increment=lambda value: values.__setitem__(key, values[key] + value),
            )

    numbers = Recorder(model_name="m")
    running = threading.active_count()
    metrics = TritonMetrics(SimpleNamespace(MetricFamily=Family), numbers)
    assert threading.active_count() == running, "a server that stops may never answer another thread"
    for _ in range(2):
        numbers.add("dynaxx_layer_calls_total", 3, backend="cpu", phase="prefill")
        numbers.observe("dynaxx_density_ratio", 0.3, phase="prefill")
        metrics.copy()
    (calls,) = [value for key, value in shown["dynaxx_layer_calls_total"].items() if key != "kind"]
    buckets = {json.loads(k)["le"]: v for k, v in shown["dynaxx_density_ratio_bucket"].items() if k != "kind"}
    assert calls == 6
    assert buckets["+Inf"] == 2
    assert sorted(set(buckets.values())) == [0, 2]
    assert shown["dynaxx_density_ratio_sum"]["kind"] == "counter"
