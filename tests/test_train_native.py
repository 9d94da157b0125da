"""`examples/train_native.py` at a tiny size: it goes on after it was killed, and anneals from dense to sparse."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dynaxx.nn import NativeSizes

EXAMPLES = Path(__file__).parents[1] / "examples"
COMMAND = ["--data", "recall", "--context", "64", "--from-context", "32", "--batch", "2", "--steps", "12", "--tiny"]
COMMAND += ["--device", "cpu", "--variants", "dense", "native", "--anneal", "--eval-every", "10", "--eval-batches", "1"]


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(EXAMPLES))
    try:
        import train_native
    finally:
        sys.path.remove(str(EXAMPLES))
    return train_native


def test_a_killed_run_goes_on_to_the_same_end(example, tmp_path, monkeypatch):
    whole = example.run(example.arguments([*COMMAND, "--out", str(tmp_path / "whole")]))
    assert json.loads((tmp_path / "whole" / "results.json").read_text())["steps"] == 12

    save = example.save

    def save_and_die(path, state):
        save(path, state)
        raise KeyboardInterrupt

    again = [*COMMAND, "--save-every", "0", "--out", str(tmp_path / "again")]
    monkeypatch.setattr(example, "save", save_and_die)
    with pytest.raises(KeyboardInterrupt):
        example.run(example.arguments(again))
    monkeypatch.setattr(example, "save", save)
    torch.manual_seed(1)  # nothing hangs on the seed of the process
    resumed = example.run(example.arguments(again))
    for variant, values in whole["variants"].items():
        assert resumed["variants"][variant]["curve"] == values["curve"]
        assert resumed["variants"][variant]["tokens"] == values["tokens"] == 12 * 2 * 64


def test_schedules(example):
    sizes = replace(NativeSizes(), slc_count=16, slc_block=64)
    counts = [example.count_at(sizes, 8192, share / 10) for share in range(10)]
    assert counts[:5] == [128] * 5  # all blocks
    assert counts[-2:] == [16, 16]
    assert counts == sorted(counts, reverse=True)
    args = example.arguments(["--out", "x", "--context", "8192", "--from-context", "256"])
    contexts = [example.context_at(args, share / 10) for share in range(10)]
    assert contexts[0] == 256
    assert contexts[5:] == [8192] * 5
    assert contexts == sorted(contexts)
