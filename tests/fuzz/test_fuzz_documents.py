# SPDX-License-Identifier: Apache-2.0
"""Untrusted documents: each file is either refused quickly, with a message, or accepted, and then it runs.

`make fuzz` runs this for ten minutes; `make test` tries a few examples of each.
"""

import json
import time

import pytest
import torch
from hypothesis import given
from json_mutations import check_words, run, spoiled_text

import dynaxx as dx
import report_documents
from dynaxx.lab.report.run import write_report
from dynaxx.lab.resume import Steps
from dynaxx.policy import ModelFacts, Policy, Rule, load_profile, parse_policy, policy_text, resolve
from dynaxx.policy.diff import diff
from dynaxx.policy.profile import BINS, LADDER
from dynaxx.policy.resolve import resolve_decode
from dynaxx.telemetry import Recorder
from dynaxx.telemetry.files import read_snapshot
from dynaxx.telemetry.overview import Watch
from dynaxx.telemetry.snapshot import Snapshot

SECONDS = 20  # of processor time that one document may take, on a machine that does other things as well
LENGTHS = ((1, 1), (33, 33), (5, 150))

FACTS = ModelFacts(model_type="llama", layers=2, q_heads=4, kv_heads=2, head_dim=16)
RULES = (
    dx.SlidingWindow(64) | dx.Sink(4) | dx.RandomBlocks(2, seed=3),
    (dx.Dilated(8, 3) | dx.Strided(32) | dx.GlobalTokens((3, 9))) & dx.SlidingWindow((-1, 5)),
    dx.LastQueries(64) | dx.LocalBlocks(2) | dx.GlobalTokens(4, symmetric=True),
    dx.SlidingWindow(32) | dx.TopK((0.1, 0.5, 0.2, 1.0), scorer=dx.MinMax(0.5, pool=8), per="head"),
    dx.TopK(3, scorer=dx.MeanQuery(0.5, "int8")),
    dx.TopP(0.9, scorer=dx.MeanPool(16)),
    dx.Threshold(0.3, "uniform", dx.AntiDiagonal(8)),
    dx.GlobalContent(token_ids=(3, 4), sequences=((5, 6),), span=2) | dx.SlidingWindow(16),
)


def histogram(calls):
    return [calls, *[0] * (BINS - 1)]


PROFILE = {
    "format": "dynaxx.profile",
    "version": 1,
    "policy": "abc",
    "command": "dynaxx tune",
    "requests": 7,
    "rows": 16,
    "layers": [
        {
            "layer": layer,
            "calls": 7,
            **{name: [histogram(7) for _ in range(4)] for name in ("recall", "entropy", "local")},
            "ladder_calls": 5,
            "ladder": [[0.5] * len(LADDER)] * 4,
        }
        for layer in (0, 1)
    ],
}


def policies():
    found = [
        Policy(model=FACTS, block_size=16, rules=(Rule.of(rule, layers=(0,)), Rule.of(dx.TopP(0.8), layers=(1,))))
        for rule in RULES
    ]
    decode = Rule.of(dx.Sink(16) | dx.SlidingWindow(64) | dx.TopK(0.2, scorer=dx.MinMax()), phase="decode")
    everything = found[0].replace(
        rules=(*found[3].rules, decode), dense_below=16, sparse_from=32, decode_dense_below=8,
        rollout={"share": 0.5, "layers": [0], "max_tokens": 100}, guard={"min_recall": 0.9, "action": "widen"},
        reference=PROFILE, evidence=({"what": "x", "command": "y", "values": {"a": 1, "b": None}},),
    )  # fmt: skip
    return [json.loads(policy_text(policy)) for policy in (*found, everything)]


class Soon:
    """Fail if the block takes too long."""

    def __enter__(self):
        self.started = time.process_time()

    def __exit__(self, kind, *_):
        assert kind is not None or time.process_time() - self.started < SECONDS


def test_policies():
    @given(spoiled_text(policies()))
    def target(text):
        with Soon():
            try:
                policy = parse_policy(text)
            except dx.PolicyError as error:
                check_words(error)
                return
            again = parse_policy(policy_text(policy))
            assert again == policy
            assert diff(policy, again).same
            try:
                resolve_decode(policy)
            except dx.PolicyError as error:
                check_words(error)
            facts = policy.model
            if facts.q_heads > 64 or facts.head_dim > 256:
                return
            for plan in resolve(policy).values():
                for seqlen_q, seqlen_k in LENGTHS:
                    q = torch.zeros(1, seqlen_q, facts.q_heads, facts.head_dim)
                    k = torch.zeros(1, seqlen_k, facts.kv_heads, facts.head_dim)
                    plan.resolve(torch.arange(seqlen_k)).layout(q, k).validate()

    run(target, 0.5)


def test_statistics(tmp_path):
    @given(spoiled_text([PROFILE]))
    def target(text):
        path = tmp_path / "statistics.json"
        path.write_bytes(text)
        with Soon():
            try:
                load_profile(path)
            except dx.PolicyError as error:
                check_words(error)

    run(target, 0.05)


def snapshot():
    numbers = Recorder(strict=True, model_name="m")
    numbers.add("dynaxx_requests_total", 3, route="sparse")
    numbers.add("dynaxx_layer_calls_total", 3, backend="cpu", phase="prefill")
    numbers.add("dynaxx_fallbacks_total", 1, reason="kernel failed")
    for name in ("recall", "output_error", "density"):
        numbers.set(f"dynaxx_layer_{name}_ratio", 0.5, layer=1)
    for value in (0.1, 0.9, 5.0):
        numbers.observe("dynaxx_request_seconds", value, route="sparse")
        numbers.observe("dynaxx_recall_ratio", value)
    numbers.set("dynaxx_guard_level", 2)
    numbers.info("dynaxx_policy_info", version="1", digest="abc")
    numbers.event("kernel_failed", backend="cpu", layer=2)
    return Snapshot.of(numbers).to_document()


def look_twice(read):
    """Read a source twice, and render the overview in every form."""
    terminal = pytest.importorskip("dynaxx.telemetry.terminal")
    watch = Watch(read, "here")
    for _ in range(2):
        seen = watch.look()
    text = terminal.as_text(seen, width=80)
    assert "\x1b" not in text
    text.encode()
    json.dumps({"seen": seen.to_dict(), "history": list(watch.history)}, allow_nan=False)


def test_snapshots(tmp_path):
    @given(spoiled_text([snapshot()]))
    def target(text):
        path = tmp_path / "snapshot.json"
        path.write_bytes(text)
        with Soon():
            try:
                read_snapshot(path)
            except ValueError as error:
                check_words(error)
                return
            look_twice(lambda: read_snapshot(path))

    run(target, 0.15)


@pytest.mark.parametrize("name", ["profile", "analysis", "tuning", "validation"])
def test_results(name, tmp_path):
    pytest.importorskip("jinja2")

    @given(spoiled_text([getattr(report_documents, name)()]))
    def target(text):
        (tmp_path / f"{name}.json").write_bytes(text)
        with Soon():
            page = write_report(tmp_path).read_text()
        assert "<script" not in page

    run(target, 0.04, examples=10)


def test_tune_steps(tmp_path):
    path = tmp_path / "state.json"
    Steps(path, "key").remember("dense", lambda: [0.5, 0.25])
    Steps(path, "key").remember("crossover", lambda: [{"seqlen": 64}])

    head, first, second, _ = path.read_text().split("\n")

    @given(spoiled_text([json.loads(head), json.loads(first), json.loads(second)]))
    def target(text):
        path.write_bytes(head.encode() + b"\n" + text)
        with Soon():
            steps = Steps(path, "key")
            assert steps.remember("dense", lambda: [0.5, 0.25]) == [0.5, 0.25]

    run(target, 0.05)
