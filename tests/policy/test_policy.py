# SPDX-License-Identifier: Apache-2.0
"""The policy document: round trips, refusals that name the field and the fix, complete files, plans per layer."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import dynaxx as dx
from dynaxx.patterns import Intersection, Union
from dynaxx.policy import (
    Evidence,
    LengthSwitch,
    MeasuredOn,
    ModelFacts,
    Policy,
    Rule,
    Tolerances,
    load_policy,
    parse_policy,
    policy_text,
    resolve,
    save_policy,
    to_spec,
)
from dynaxx.policy.resolve import resolve_decode
from dynaxx.selection import TileQueries
from dynaxx.testing import make_qkv

FACTS = ModelFacts(model_type="llama", layers=4, q_heads=6, kv_heads=2, head_dim=16)
RULES = [
    dx.Causal(),
    dx.Full(),
    dx.SlidingWindow(64),
    dx.SlidingWindow((-1, 8)),
    dx.Dilated(8, 3),
    dx.Strided(32),
    dx.GlobalTokens(16, symmetric=True),
    dx.GlobalTokens((3, 9)),
    dx.Sink(4),
    dx.LastQueries(64),
    dx.LocalBlocks(2),
    dx.RandomBlocks(2, seed=-7),
    dx.Documents((0, 10, 200)),
    dx.SlidingWindow(64) | dx.Sink(4) | dx.RandomBlocks(1),
    (dx.SlidingWindow(64) | dx.Sink(4)) & dx.Documents((0, 50, 200)),
    Union((dx.Causal(), Intersection((dx.Full(), dx.Sink(1))))),
    dx.TopK(3),
    dx.TopK(1),
    dx.TopK(1.0),
    dx.TopK(0.25, scorer=dx.MinMax(), floor=16, per="head"),
    dx.TopK(0.5, scorer=dx.MinMax(bound=0.5)),
    dx.TopK((0.1, 0.2, 0.3, 0.0, 1.0, 0.5), scorer=dx.AntiDiagonal(32)),
    dx.TopK((1, 2, 3, 4, 5, 6), scorer=dx.MeanPool(16)),
    dx.TopP(0.9),
    dx.TopP((0.5, 0.6, 0.7, 0.8, 0.9, 1.0), scorer=dx.MinMax()),
    dx.SlidingWindow(32) | dx.TopK(0.1),
    dx.Threshold(0.1),
    dx.Threshold((0.0, 0.5, 1.0, 2.0, 3.0, 4.0), "uniform", dx.AntiDiagonal(8)),
    dx.TopP(0.9, scorer=dx.MinMax(0.5, pool=8)),
    dx.TopK(0.2, scorer=TileQueries(8, 0.9)),
    dx.TopP(0.9, scorer=dx.MeanQuery(precision="int8")),
    dx.TopK(4, scorer=dx.MeanQuery(0.5, "int8")),
    (dx.SlidingWindow(32) | dx.Sink(2)) | dx.TopP(0.95, scorer=dx.MeanPool()),
    None,
]


def policy(*rules, **fields):
    return Policy(model=FACTS, rules=rules, **{"block_size": 16, **fields})


FULL = policy(
    Rule.of(dx.SlidingWindow(32) | dx.TopK((0.1, 0.5)), layers=(0, 2), heads=(1, 4)),
    Rule.of(dx.Sink(4) | dx.SlidingWindow(16), layers=[0]  , heads=[0]),
    Rule.of(dx.TopP(0.9), layers=[3], block_size=(32, 64)),
    dense_below=512,
    sparse_from=640,
    tolerances=Tolerances(perplexity_ratio=1.02, kl=0.05, slowdown=None),
    measured_on=MeasuredOn(device="cpu", hardware="a machine", threads=2, versions={"torch": "2.13"}),
    evidence=(Evidence(what="perplexity", command="dynaxx validate m p", values={"dense": 14.5, "ok": True}),),
)  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_rules_survive_data_and_file(rule, tmp_path):
    again = to_spec(rule).build()
    assert again == rule
    assert repr(again) == repr(rule)
    whole = policy(Rule.of(rule, layers=[0]))
    save_policy(whole, tmp_path / "policy.json")
    loaded = load_policy(tmp_path / "policy.json")
    assert loaded == whole
    assert repr(loaded.rules[0].attention.build()) == repr(rule)


def test_a_full_policy_survives_its_file(tmp_path):
    save_policy(FULL, tmp_path / "policy.json")
    assert load_policy(tmp_path / "policy.json") == FULL
    assert "[0, 2]" in (tmp_path / "policy.json").read_text()
    assert FULL.replace(dense_below=0).dense_below == 0
    with pytest.raises(dx.PolicyError, match="sparse_from"):
        FULL.replace(dense_below=1000)


def changed(path, value):
    data = json.loads(policy_text(FULL))
    *parents, last = path
    spot = data
    for part in parents:
        spot = spot[part]
    if value is KeyError:
        del spot[last]
    else:
        spot[last] = value
    return json.dumps(data)


def test_pages_of_decode_rules_may_have_8_tokens(tmp_path):
    half = dx.Hybrid(dx.Sink(8) | dx.SlidingWindow(64), dx.TopK(0.5, dx.MinMax(0.5)))
    small = policy(Rule.of(half, phase="decode", block_size=8), block_size=(32, 16))
    save_policy(small, tmp_path / "policy.json")
    plans = resolve_decode(load_policy(tmp_path / "policy.json"))
    assert {plan.page_size for plan in plans.values()} == {8}
    assert {plan.budget.bound for plan in plans.values()} == {0.5}
    with pytest.raises(ValueError, match="`block_size` must be one of"):
        Rule.of(half, block_size=8)
    with pytest.raises(ValueError, match="`block_size` must be one of"):
        Rule.of(half, phase="decode", block_size=(8, 8))
    with pytest.raises(ValueError, match="`block_size` must be one of"):
        policy(block_size=8)
    rules = [Rule.of(half, heads=[head], phase="decode", block_size=8 * (1 + head)) for head in (0, 1)]
    with pytest.raises(ValueError, match=r"`rules.1.block_size` must be \(8, 8\) in layer 0"):
        policy(*rules)


SELECTOR = ("rules", 0, "attention", "selector")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "other", "`format` must be 'dynaxx.policy', got 'other'; this is not a dynaxx policy"),
        (("format",), KeyError, "`format` must be"),
        (("version",), 2, "`version` must be at most 1, got 2.*upgrade dynaxx"),
        (("version",), True, "`version` must be 1, got True"),
        (("version",), "1", "`version`"),
        (("rollout",), 0.1, "`rollout`: Input should be .*got 0.1"),
        (("rollout", "share"), 2.0, "`rollout.share`: Input should be less than or equal to 1"),
        (("guard",), {"rows": 0}, "`guard.rows`"),
        (("speed",), 0.1, "`speed`: Extra inputs are not permitted, got 0.1; remove it"),
        (("rules", 0, "head"), [1], "`rules.0.head`: Extra.*; did you mean `heads`"),
        (("dense_belo",), 1, "`dense_belo`: Extra.*; did you mean `dense_below`"),
        (("model", "layer"), 4, "`model.layer`: Extra.*; did you mean `layers`"),
        (("rules", 0, "attention"), {"kind": "sliding_window", "windw": 64}, "windw`: Extra.*; did you mean `window`"),
        (("rollout",), {"shar": 0.1}, "`rollout.shar`: Extra.*; did you mean `share`"),
        (("guard",), {"min_recal": 0.9}, "`guard.min_recal`: Extra.*; did you mean `min_recall`"),
        (("rules", 0, "attention"), {"kind": "slidng_window", "window": 64}, "; did you mean `sliding_window`"),
        (("model", "layers"), KeyError, "`model.layers`: Field required; add it"),
        (("model", "layers"), "4", "`model.layers`: Input should be a valid integer, got '4'"),
        (("model", "kv_heads"), 4, "`model`: `q_heads` must be a multiple"),
        (("dense_below",), 1.5, "`dense_below`"),
        (("dense_below",), float("nan"), "`dense_below`"),
        (("dense_below",), True, "`dense_below`"),
        (("sparse_from",), 100, "`sparse_from` must be >= `dense_below` = 512, got 100; leave it out"),
        (("block_size",), 48, "`block_size`.*must be one of"),
        (("rules", 0, "block_size"), [64, 65], "`rules.0.block_size`"),
        (("rules", 0, "heads"), [1, 6], "`rules.0.heads` must be below 6, the model's number of heads, got 6"),
        (("rules", 0, "layers"), [0, 9], "`rules.0.layers` must be below 4"),
        (("rules", 0, "layers"), [-1], "`rules.0.layers"),
        (("rules", 0, "layers"), [], "`rules.0.layers"),
        (("rules", 0, "layers"), "some", "`rules.0.layers"),
        (("rules", 0, "heads"), [1, 1], "`rules.0.heads` must not repeat an index"),
        (("rules", 1, "heads"), "all", "`rules.1` and `rules.0` both cover layer 0, head 1; remove it from one"),
        (("rules", 1, "block_size"), 32, r"`rules.1.block_size` must be \(16, 16\) in layer 0, as in `rules.0`"),
        (("rules", 0, "phase"), "training", "`rules.0.phase`: Input should be 'prefill' or 'decode', got 'training'"),
        (("rules", 0, "attention", "kind"), "magic", "`rules.0.attention`: Input tag 'magic'"),
        (("rules", 0, "attention", "kind"), KeyError, "`rules.0.attention`.*add `kind`"),
        ((*SELECTOR, "share"), "much", "`rules.0.attention.selector.share`: Input should be a valid number"),
        ((*SELECTOR, "share"), 1.5, "`rules.0.attention.selector.share`: Input should be less than or equal to 1"),
        ((*SELECTOR, "share"), [0.5], r"one per covered head \(2\), got 1"),
        ((*SELECTOR, "share"), None, "exactly one of `share` and `blocks`"),
        ((*SELECTOR, "blocks"), 3, "exactly one of `share` and `blocks`"),
        ((*SELECTOR, "scorer"), {"kind": "anti_diagonal", "stride": 0}, "scorer.stride`"),
        (("rules", 0, "attention", "pattern", "window"), 0, "`rules.0.attention.pattern.window`"),
        (("rules", 0, "attention", "pattern"), {"kind": "any_of", "parts": []}, "pattern.parts`"),
        (("rules", 0, "attention", "pattern"), {"kind": "documents", "cu_seqlens": [1, 5]}, "must start at 0"),
        (("tolerances", "perplexity_ratio"), "1%", "`tolerances.perplexity_ratio`"),
        (("evidence", 0, "command"), KeyError, "`evidence.0.command`: Field required"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_its_fix(path, value, message, tmp_path):
    file = tmp_path / "policy.json"
    file.write_text(changed(path, value))
    with pytest.raises(dx.PolicyError, match=message) as caught:
        load_policy(file)
    assert str(file) in str(caught.value)
    assert "constrained" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "\x00", "{" * 100_000, '{"format": 1, "format": 2}'])
def test_invalid_policies_are_refused(text):
    with pytest.raises(dx.PolicyError):
        parse_policy(text)
    with pytest.raises(dx.PolicyError):
        parse_policy(b"\xff\xfe\x00")


def test_python_built_policies_are_checked_too():
    with pytest.raises(dx.PolicyError, match=r"`rules\.0\.heads` must be below 6"):
        policy(Rule.of(dx.Sink(4), heads=[6]))
    with pytest.raises(ValueError, match="cannot express"):
        Rule.of(object())
    with pytest.raises(ValueError, match="shares or block counts, not both"):
        Rule.of(dx.TopK((1, 0.5)))
    with pytest.raises(ValueError, match="frozen"):
        FULL.dense_below = 3


def test_saving_is_all_or_nothing(tmp_path, monkeypatch):
    file = tmp_path / "policy.json"
    save_policy(FULL, file)
    before = file.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_policy(FULL.replace(dense_below=0), file)
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(full))
    with pytest.raises(OSError, match=r"cannot be written \(No space left.*policy.json"):
        save_policy(FULL.replace(dense_below=0), file)
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["policy.json"]


def test_importing_dynaxx_does_not_load_pydantic():
    code = "import sys, dynaxx; assert not {'pydantic', 'transformers'} & set(sys.modules), 'loaded'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_hysteresis_holds_between_the_borders():
    switch = LengthSwitch(100, 200)
    lengths = (150, 199, 200, 150, 100, 99, 150, 300)
    assert [switch.sparse(n) for n in lengths] == [False, False, True, True, True, False, False, True]
    one_border = LengthSwitch(100)
    assert [one_border.sparse(n) for n in (99, 100, 99)] == [False, True, False]


def test_heads_that_differ_in_budget_share_one_rule():
    plans = resolve(
        policy(
            Rule.of(dx.SlidingWindow(32) | dx.TopK((0.1, 0.5, 0.2)), layers=[0], heads=(4, 0, 2)),
            Rule.of(dx.SlidingWindow(32), layers=[0], heads=[1]),
            Rule.of(None, layers=[0], heads=[3]),
            Rule.of(dx.Sink(4), layers=[2], heads=[3]),
            Rule.of(None, layers=[3]),
        )
    )
    assert sorted(plans) == [0, 2]  # nothing to do in dense layers
    (group,) = plans[0].groups
    assert group.rule == dx.SlidingWindow(32) | dx.TopK((0.5, 0.0, 0.2, 1.0, 0.1, 1.0))
    assert [(g.heads, g.rule) for g in plans[2].groups] == [((0, 1, 2, 4, 5), dx.Causal()), ((3,), dx.Sink(4))]
    (one,) = resolve(policy(Rule.of(dx.TopK(0.5), layers=[1])))[1].groups
    assert one.rule == dx.TopK(0.5)


@pytest.mark.parametrize("seqlens", [(100, 100), (33, 100), (1, 17)])
@pytest.mark.parametrize(
    "rules",
    [
        {
            0: dx.SlidingWindow(20) | dx.TopK(0.3, per="head"),
            1: dx.SlidingWindow(20),
            4: dx.SlidingWindow(20) | dx.TopK(0.1, per="head"),
        },
        {
            0: dx.TopK(2, per="head"),
            1: dx.TopK(0.5, per="head"),
            2: dx.TopP(0.7, per="head"),
            3: dx.TopP(0.9, scorer=dx.MinMax(), per="head"),
            5: dx.Strided(7),
        },
        {1: dx.Sink(3) | dx.SlidingWindow(9), 3: dx.Dilated(5, 3)},
        {head: dx.SlidingWindow(9) for head in range(6)},
        {
            1: dx.Threshold(0.5, per="head"),
            2: dx.Threshold(1.5, "uniform", per="head"),
            4: dx.Threshold(0.9, per="head"),
        },
        {0: dx.Sink(2) | dx.Threshold(0.5, per="head"), 3: dx.Sink(2)},
        {5: dx.SlidingWindow(9) | dx.TopP(0.5, per="head"), 0: dx.SlidingWindow(9)},
    ],
)
def test_a_plan_shows_each_head_its_own_rule(rules, seqlens):
    plan = resolve(policy(*(Rule.of(rule, layers=[1], heads=[head]) for head, rule in rules.items())))[1]
    q, k, _ = make_qkv(2, *seqlens, 6, 2, 16, seed=3)
    got = plan.layout(q, k).validate().to_dense().expand(2, 6, -1, -1)
    for head in range(6):
        alone = dx.select_blocks(
            q[:, :, head : head + 1], k[:, :, [head // 3]], rules.get(head, dx.Causal()), block_size=16
        )
        assert torch.equal(got[:, head], alone.to_dense()[:, 0].expand_as(got[:, head])), head


def test_layouts_made_in_inference_mode_serve_training_later():
    plan = resolve(policy(Rule.of(dx.SlidingWindow(21) | dx.Sink(5), layers=[0])))[0]
    q, k, v = make_qkv(1, 77, 77, 6, 2, 16)
    with torch.inference_mode():
        plan.layout(q, k)
    q.requires_grad_()
    dx.sparse_attention(q, k, v, plan.layout(q, k), backend="reference").sum().backward()
    assert q.grad.isfinite().all()


def test_the_pages_example_runs(tmp_path, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "guides" / "policy.md"
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
        exec(compile(block, str(page), "exec"), {})
    assert (tmp_path / "policy.json").exists()


def test_a_rule_takes_indices_of_any_integer_type():
    for layers in (range(2), np.arange(2), torch.arange(2), [np.int64(0), 1]):
        assert dx.Rule.of(None, layers=layers).layers == (0, 1)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"layers": 3}, TypeError, r"`layers` must be 'all' or a sequence of indices such as \[0\], got 3"),
        ({"heads": [True]}, TypeError, "`heads` must be an integer, got True"),
        ({"layers": [0.5]}, TypeError, "`layers` must be an integer, got 0.5"),
        ({"layers": "first"}, dx.PolicyError, "`layers`: Input should be 'all', got 'first'"),
        ({"layers": [-1]}, dx.PolicyError, "`layers.0`: Input should be greater than or equal to 0, got -1"),
        ({"heads": []}, dx.PolicyError, "`heads`: Tuple should have at least 1 item"),
        ({"phase": "x"}, dx.PolicyError, "`phase`: Input should be 'prefill' or 'decode', got 'x'"),
        ({"block_size": 0}, dx.PolicyError, "`block_size`: `block_size` must be one of"),
    ],
)
def test_a_wrong_rule_is_refused_as_a_policy_is(settings, error, message):
    with pytest.raises(error, match=message) as found:
        dx.Rule.of(dx.SlidingWindow(9), **settings)
    assert "pydantic" not in str(found.value)
