# SPDX-License-Identifier: Apache-2.0
"""Untrusted policy files: bounded work, no hang on pipes, no control characters in logs, the umask kept."""

import json
import logging
import os
import time

import pytest
import torch

import dynaxx as dx
from dynaxx.layout.cache import LayoutCache
from dynaxx.policy import (
    KillSwitch,
    ModelFacts,
    Policy,
    PolicyFollower,
    Rollout,
    Rule,
    load_policy,
    load_profile,
    parse_policy,
    policy_text,
    save_policy,
)
from dynaxx.policy.files import MAX_BYTES

FACTS = ModelFacts(model_type="llama", layers=4, q_heads=6, kv_heads=2, head_dim=16)
POLICY = Policy(model=FACTS, rules=(Rule.of(dx.Sink(4) | dx.SlidingWindow(64)),))
SINK = {"kind": "sink", "tokens": 4}


def changed(**fields):
    return json.dumps({**json.loads(policy_text(POLICY)), **fields})


def rule(**attention):
    return changed(rules=[{"attention": attention}])


def nested(levels):
    found = SINK
    for _ in range(levels):
        found = {"kind": "any_of", "parts": [found, SINK]}
    return found


def selected(**scorer):
    return rule(kind="top_k", share=0.1, scorer=scorer)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (changed(model={**FACTS.model_dump(), "layers": 3_000_000}), "`model.layers`"),
        (changed(model={**FACTS.model_dump(), "layers": 4096, "q_heads": 64, "kv_heads": 64}), "at most 65,536"),
        (rule(kind="top_k", blocks=10**19), "`rules.0.attention.blocks`"),
        (rule(kind="random_blocks", blocks=10**12), "`rules.0.attention.blocks`"),
        (rule(kind="sink", tokens=int("9" * 4000)), "`rules.0.attention.tokens`"),
        (rule(kind="sliding_window", window=[2**63, 0]), "`rules.0.attention.window"),
        (selected(kind="mean_query", sharpness=1e9), "sharpness`"),
        (rule(**nested(40)), "must nest at most 32 levels"),
        (rule(kind="any_of", parts=[SINK] * 65), "`rules.0.attention.parts`"),
        (rule(kind="any_of", parts=[{"kind": "any_of", "parts": [SINK] * 64}] * 300), "at most 16,384 objects"),
        (changed(rules=[{"attention": SINK, "layers": list(range(70_000))}]), "`rules.0.layers`"),
        (changed(dense_below=2**60), "`dense_below`"),
        (changed(guard={"widen": 1e300}), "`guard.widen`"),
        (changed(version=int("9" * 4000)), "`version` must be at most 1"),
        ('{"format": ' + "9" * 5000 + "}", "is not JSON"),
        ("[" * 100_000, "must nest"),
        (" " * (MAX_BYTES + 1), "bytes"),
    ],
)
def test_numbers_and_shapes_are_bounded_before_they_cost_anything(text, message):
    started = time.thread_time()
    with pytest.raises(dx.PolicyError, match=message) as caught:
        parse_policy(text)
    assert time.thread_time() - started < 5
    assert len(str(caught.value)) < 5000


def test_thousands_of_errors_are_cut_short():
    with pytest.raises(dx.PolicyError, match=r"and more$") as caught:
        parse_policy(changed(rules=[[]] * 10_000))
    assert len(str(caught.value).splitlines()) == 21


def test_a_policy_is_no_file_of_statistics(tmp_path):
    save_policy(POLICY, tmp_path / "policy.json")
    with pytest.raises(dx.PolicyError, match=r"is not a file of statistics.*'dynaxx.profile', got 'dynaxx.policy'$"):
        load_profile(tmp_path / "policy.json")


@pytest.mark.parametrize("read", [load_policy, load_profile])
def test_pipes_devices_folders_and_huge_files_are_refused_at_once(read, tmp_path):
    pipe, huge = tmp_path / "pipe", tmp_path / "huge"
    os.mkfifo(pipe)
    with open(huge, "wb") as file:
        file.truncate(1 << 40)
    for path in (pipe, huge, tmp_path, "/dev/zero"):
        with pytest.raises(OSError, match=r"regular file|at most|directory"):
            read(path)
    with pytest.raises(OSError, match="null"):
        read("a\0b")


def test_a_follower_survives_a_pipe_and_takes_the_next_policy(tmp_path, caplog):
    path, taken = tmp_path / "policy.json", []
    os.mkfifo(path)
    follower = PolicyFollower(path, lambda policy: taken.append(policy) or True)
    assert not follower.check()
    assert "must be a regular file" in caplog.text
    path.unlink()
    save_policy(POLICY, path)
    assert follower.check()
    assert taken == [POLICY]


def test_logged_text_of_a_policy_has_no_control_characters(tmp_path, caplog):
    evil = "\x1b]0;owned\x07\nERROR all is well \u202e"
    path = tmp_path / "policy.json"
    follower = PolicyFollower(path, lambda policy: True)
    texts = (changed(**{evil: 1}), changed(model={evil: evil}), changed(format=evil), f'{{"{evil[9:]}": 1, "x')
    for text in (*texts, json.dumps({"format": "dynaxx.policy", "rules": [{"attention": {"kind": evil}}]})):
        path.write_text(text)
        assert not follower.check()
        said = caplog.records[-1].getMessage()
        assert "\x1b" not in said
        assert "\u202e" not in said
        assert "\nERROR" not in said


def test_saving_keeps_the_umask_and_the_permissions_that_a_file_has(tmp_path):
    before = os.umask(0o077)
    try:
        save_policy(POLICY, tmp_path / "new.json")
        assert (tmp_path / "new.json").stat().st_mode & 0o777 == 0o600
        (tmp_path / "new.json").chmod(0o640)
        save_policy(POLICY, tmp_path / "new.json")
        assert (tmp_path / "new.json").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


def test_saving_over_a_link_leaves_what_it_points_at(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "policy.json").symlink_to(victim)
    save_policy(POLICY, tmp_path / "policy.json")
    assert victim.read_text() == "precious"
    assert load_policy(tmp_path / "policy.json") == POLICY


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_follows_with_a_thread_of_its_own(tmp_path):
    path, taken = tmp_path / "policy.json", []
    save_policy(POLICY, path)
    follower = PolicyFollower(path, lambda policy: taken.append(policy.dense_below) or True, interval=0.01)
    follower.start()
    with follower._checking:  # as while the parent's thread looks: the child must not wait for it
        child = os.fork()
        if not child:
            save_policy(POLICY.replace(dense_below=77), path)
            deadline = time.monotonic() + 20
            while 77 not in taken and time.monotonic() < deadline:
                time.sleep(0.01)
            os._exit(0 if 77 in taken else 1)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        follower.stop()


# ---- the kill file -----------------------------------------------------------------------------------------------


def test_a_kill_file_that_cannot_be_looked_up_engages_and_is_logged_once(tmp_path, monkeypatch, caplog):
    switch = KillSwitch()
    monkeypatch.setenv("DYNAXX_KILL_FILE", str(tmp_path / "kill"))
    assert switch.engaged() is None
    real = os.lstat

    def refused(path, **more):
        if str(path).endswith("kill"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, **more)

    monkeypatch.setattr(os, "lstat", refused)
    for _ in range(3):
        assert switch.engaged() == "unreadable file"
    assert caplog.text.count("cannot be looked up") == 1
    monkeypatch.setattr(os, "lstat", real)
    assert switch.engaged() is None
    (tmp_path / "kill").symlink_to(tmp_path / "nowhere")
    assert switch.engaged() == "file"


def test_a_kill_file_that_no_file_can_be_engages(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for path in (tmp_path / ("x" * 5000), tmp_path / "file" / "kill"):
        monkeypatch.setenv("DYNAXX_KILL_FILE", str(path))
        assert KillSwitch().engaged() == "unreadable file"


# ---- ids and layouts ---------------------------------------------------------------------------------------------


def test_any_string_is_a_request_id():
    rollout = Rollout(share=0.5)
    assert {rollout.admits(f"\ud800{i}") for i in range(64)} == {True, False}


def test_cached_layouts_are_bounded_by_bytes():
    made = []

    def fresh(seqlen):
        made.append(seqlen)
        layout = dx.RandomBlocks(4, seed=seqlen).layout(seqlen, block_size=16)
        return dx.BlockLayout.from_entries(
            layout.grid(), *layout.entries(), layout.masks, layout_batch=1, layout_heads=1
        )

    cache = LayoutCache(fresh, most_bytes=200_000)
    for seqlen in range(1024, 8192, 256):
        layout = cache(seqlen)
        assert layout.transposed is not None  # grows the layout after it was made
        assert cache(seqlen) is layout
    cache(16)
    assert cache.bytes <= 200_000
    assert 7936 in made
    before = len(made)
    cache(1024)
    assert len(made) == before + 1  # the least recently used went first
    large = LayoutCache(fresh, most_bytes=10)
    assert torch.equal(large(512).kv_indices, large(512).kv_indices)
    assert large.bytes == 0


def test_plans_keep_layouts_within_the_bound():
    from dynaxx.policy import resolve
    from dynaxx.policy.plan import _static_layout

    assert isinstance(_static_layout, LayoutCache)
    plan = resolve(POLICY)[0]
    q, k = torch.zeros(1, 100, 6, 16), torch.zeros(1, 100, 2, 16)
    assert plan.layout(q, k) is plan.layout(q, k)


def test_a_follower_logs_to_the_one_logger(tmp_path, caplog):
    with caplog.at_level(logging.ERROR, logger="dynaxx"):
        PolicyFollower(tmp_path / "none.json", lambda policy: True).check()
    assert "cannot be read" in caplog.text
