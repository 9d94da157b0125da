# SPDX-License-Identifier: Apache-2.0
"""Policies of 0.1 that let layers share a selection still load; each layer then selects by its own rules."""

import json

import pytest

import dynaxx as dx
from dynaxx.policy import ModelFacts, Policy, Rule, parse_policy, policy_digest, policy_text

FACTS = ModelFacts(model_type="llama", layers=4, q_heads=3, kv_heads=1, head_dim=16)
POLICY = Policy(model=FACTS, rules=(Rule.of(dx.Sink(16) | dx.TopK((0.1, 0.2, 0.4))),), block_size=16)
SHARED = [{"layer": 1, "source": 0, "heads": [2, 0, 0]}]


@pytest.mark.parametrize("fields", [{"reuse": 2}, {"shared": SHARED}, {"reuse": 1, "shared": SHARED}])
def test_sharing_is_dropped_with_a_warning(fields, caplog):
    text = json.dumps(json.loads(policy_text(POLICY)) | fields)
    assert parse_policy(text) == POLICY
    assert "each layer selects its own blocks" in caplog.text


def test_digests_of_other_policies_are_those_of_0_1(caplog):
    fields = json.loads(policy_text(POLICY))
    assert (fields["reuse"], fields["shared"]) == (1, [])
    assert policy_digest(parse_policy(policy_text(POLICY))) == policy_digest(POLICY)
    assert not caplog.records


@pytest.mark.parametrize("fields", [{"reuse": 2}, {"shared": SHARED}])
def test_new_policies_cannot_share(fields):
    with pytest.raises(dx.PolicyError, match=f"`{next(iter(fields))}"):
        POLICY.replace(**fields)


@pytest.mark.parametrize("fields", [{"reuse": 0}, {"reuse": True}, {"reuse": "2"}, {"shared": 3}])
def test_fields_that_were_never_valid_are_refused(fields):
    with pytest.raises(dx.PolicyError, match=f"`{next(iter(fields))}"):
        parse_policy(json.dumps(json.loads(policy_text(POLICY)) | fields))


@pytest.mark.parametrize(
    ("scorer", "second"),
    [({"fine": {"kind": "mean_query", "sharpness": 0.5}, "share": 0.3}, dx.MeanQuery(0.5)), ({}, dx.MeanQuery())],
)
def test_scores_in_two_stages_are_those_of_the_second(scorer, second, caplog):
    wanted = POLICY.replace(rules=(Rule.of(dx.Sink(16) | dx.TopK(0.1, second)),))
    data = json.loads(policy_text(wanted))
    data["rules"][0]["attention"]["selector"]["scorer"] = {"kind": "two_stage", "panel": 8} | scorer
    assert parse_policy(json.dumps(data)) == wanted
    assert "replaced by their second stage" in caplog.text


@pytest.mark.parametrize("kind", ["sim_hash", "key_clusters", "last_query_probe"])
def test_scorers_that_are_gone_are_refused_with_what_serves_instead(kind):
    data = json.loads(policy_text(POLICY))
    data["rules"][0]["attention"]["selector"]["scorer"] = {"kind": kind, "seed": 0}
    with pytest.raises(dx.PolicyError, match="it is gone; use `mean_query`"):
        parse_policy(json.dumps(data))


def test_global_blocks_by_clusters_are_refused_with_what_serves_instead():
    data = json.loads(policy_text(POLICY))
    data["rules"][0]["attention"] = {"kind": "cluster_globals", "per_cluster": 1}
    with pytest.raises(dx.PolicyError, match="it is gone; use `top_k`"):
        parse_policy(json.dumps(data))


@pytest.mark.parametrize(("name", "instead"), [("SimHash", "MeanQuery"), ("ClusterGlobals", "TopK")])
def test_names_that_are_gone_say_what_serves_instead(name, instead):
    with pytest.raises(AttributeError, match=f"it is gone, use `dynaxx.{instead}`"):
        getattr(dx, name)
