# SPDX-License-Identifier: Apache-2.0
"""`route` makes the decision for every engine, with one list of reasons."""

import itertools
import re
from pathlib import Path

import pytest

from dynaxx.integrations.runtime.routing import (
    CallProperties,
    Decision,
    DenseReason,
    LayerRules,
    PassState,
    Route,
    SequenceLengths,
    is_step,
    route,
)
from dynaxx.policy import Rollout

RULES = LayerRules(least_q=16, decodes=True, borders=(100, 200), decode_borders=(50, None))
LONG, STEP = SequenceLengths(300, 300), SequenceLengths(1, 300, decoding=True)


@pytest.mark.parametrize(
    ("layer", "state", "call", "sequence", "want"),
    [
        (RULES, PassState(), CallProperties(), LONG, None),
        (LayerRules(), PassState(), CallProperties(), LONG, "no rule"),
        (LayerRules(decodes=True), PassState(), CallProperties(), LONG, "no rule"),
        (LayerRules(least_q=16), PassState(), CallProperties(), STEP, "decode"),
        (RULES, PassState(), CallProperties(), SequenceLengths(15, 300), "fewer queries than one block"),
        (RULES, PassState(), CallProperties(own_pattern=True), LONG, "layer has its own window"),
        (RULES, PassState(DenseReason.KILLED), CallProperties(), LONG, "kill switch"),
        (RULES, PassState(), CallProperties(), SequenceLengths(150, 150), "below dense_below"),
        (RULES, PassState(was_long=True), CallProperties(), SequenceLengths(150, 150), None),
        (RULES, PassState(was_long=True), CallProperties(), SequenceLengths(99, 99), "below dense_below"),
        (RULES, PassState(was_long=True), CallProperties(), SequenceLengths(1, 49, decoding=True), "below dense_below"),
        (
            RULES._replace(rollout=Rollout(max_tokens=299)),
            PassState(),
            CallProperties(),
            LONG,
            "length not in the rollout",
        ),
        (RULES, PassState(), CallProperties(DenseReason.DROPOUT), LONG, "attention dropout"),
        (RULES, PassState(), CallProperties(), LONG._replace(causal=False), "padding or prefix"),
        (
            RULES,
            PassState(),
            CallProperties(),
            LONG._replace(unchosen=DenseReason.NOT_CHOSEN),
            "request not in the rollout",
        ),
    ],
)
def test_each_input_decides(layer, state, call, sequence, want):
    found = route(layer, state, call, sequence)
    assert found.reason == want
    if want is None:
        assert found.route is Route.RULE


def test_a_step_follows_the_decode_rule():
    assert route(RULES, PassState(), CallProperties(), STEP) == Decision(Route.DECODE)
    few = SequenceLengths(4, 300, decoding=is_step(4, 300))
    assert route(RULES, PassState(), CallProperties(), few).route is Route.DECODE
    assert route(LayerRules(least_q=4), PassState(), CallProperties(), few).route is Route.RULE


@pytest.mark.parametrize("reason", DenseReason)
def test_the_models_own_pattern_follows_where_no_rule_runs(reason):
    """The model's own pattern never runs if the caller wants the original attention, whatever the layer's rules are."""
    for layer in (LayerRules(), RULES):
        found = route(layer, PassState(reason), CallProperties(serves_own_pattern=True), LONG)
        assert found.route is (Route.OWN_PATTERN if reason.keeps_own_pattern else Route.DENSE)
    assert route(RULES, PassState(), CallProperties(serves_own_pattern=True), LONG).route is Route.RULE


def test_only_what_arrived_decides_on_dense_for_every_combination():
    rules = (LayerRules(), RULES, LayerRules(least_q=16), LayerRules(decodes=True))
    states = [PassState(blocked) for blocked in (None, DenseReason.KILLED, DenseReason.GUARD)]
    arrivals = [CallProperties(unserved, own) for unserved in (None, DenseReason.SHAPES) for own in (False, True)]
    for layer, state, call, sequence in itertools.product(rules, states, arrivals, (LONG, STEP)):
        found = route(layer, state, call, sequence)
        assert found == route(layer, state, call, sequence)
        assert (found.reason is None) == (found.route in (Route.RULE, Route.DECODE))


def test_reasons_are_text_and_documented():
    assert DenseReason.BELOW == "below dense_below"
    assert f"{DenseReason.BELOW}" == str(DenseReason.BELOW) == "below dense_below"
    page = (
        (Path(__file__).parents[3] / "docs" / "guides" / "why_dense.md")
        .read_text(encoding="utf-8")
        .partition("## Encoders")[0]
    )
    rows = set(re.findall(r"^\| `([^`]+)` \| (.+) \|$", page, flags=re.MULTILINE))
    assert {(reason.value, reason.meaning) for reason in DenseReason} == rows
