# SPDX-License-Identifier: Apache-2.0
"""`examples/train_nsa.py` at a tiny size continues after it was killed, and lengthens its sequences."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dynaxx.trained.nn import NsaSizes

EXAMPLES = Path(__file__).parents[3] / "examples"
COMMAND = ["--data", "recall", "--context", "64", "--from-context", "32", "--batch", "2", "--steps", "12", "--tiny"]
COMMAND += [
    "--device",
    "cpu",
    "--variants",
    "dense",
    "nsa",
    "--find-first",
    "--eval-every",
    "10",
    "--eval-batches",
    "1",
]


@pytest.fixture(scope="module")
def examples():
    """Return the modules of the example by name."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import nsa_data
        import nsa_decoder
        import nsa_trainer
        import train_nsa
    finally:
        sys.path.remove(str(EXAMPLES))
    return {module.__name__: module for module in (nsa_data, nsa_decoder, nsa_trainer, train_nsa)}


@pytest.fixture(scope="module")
def example(examples):
    return examples["train_nsa"]


@pytest.fixture(scope="module")
def text(examples, tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.bin"
    assert examples["nsa_data"].pack_text(path, 400_000) == 400_000 == path.stat().st_size
    return path


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_end(example, tmp_path):
    command = [*COMMAND, "--steps", "40", "--save-every", "0"]
    whole = example.run(example.arguments([*command, "--out", str(tmp_path / "whole"), "--eval-at", "96"]))
    assert json.loads((tmp_path / "whole" / "results.json").read_text())["steps"] == 40
    assert 0 <= whole["variants"]["nsa"]["at"][96][1] <= 1

    again, checkpoint = [*command, "--out", str(tmp_path / "again")], tmp_path / "again" / "checkpoint.pt"
    process = subprocess.Popen([sys.executable, EXAMPLES / "train_nsa.py", *again], stdout=subprocess.DEVNULL,
                               env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())})  # fmt: skip
    while not checkpoint.exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert checkpoint.exists()
    assert not (tmp_path / "again" / "results.json").exists()
    torch.manual_seed(1)  # nothing hangs on the seed of the process
    resumed = example.run(example.arguments(again))
    for variant, values in whole["variants"].items():
        assert resumed["variants"][variant]["curve"] == values["curve"]
        assert resumed["variants"][variant]["tokens"] == values["tokens"] == 40 * 2 * 64

    other = example.arguments([*again, "--lr", "1e-2"])
    with pytest.raises(SystemExit, match=r"--lr 0.001 instead of 0.01: give this one another --out"):
        example.run(other)


def test_training_goes_on_where_no_checkpoint_can_be_written(example, tmp_path, capsys):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))  # as a quota: results fit, checkpoints do not
    try:
        results = example.run(example.arguments([*COMMAND, "--save-every", "0", "--out", str(tmp_path)]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert results["steps"] == 12
    assert "File too large" in capsys.readouterr().err
    assert (tmp_path / "results.json").exists()
    assert not [path for path in tmp_path.iterdir() if "checkpoint" in path.name]


def test_a_run_in_a_log_says_how_far_it_is(example, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(example, "SAY_EVERY", 0.0)
    example.run(example.arguments([*COMMAND, "--out", str(tmp_path)]))
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("training ")
    assert re.fullmatch(r"10/12 steps, about \d+ s to go ", said[1])


def test_a_run_that_is_done_is_measured_again(example, tmp_path):
    """The last checkpoint is complete, and a partial file of a killed write does not matter."""
    command = [*COMMAND, "--out", str(tmp_path)]
    first = example.run(example.arguments(command))
    (tmp_path / ".checkpoint.pt.1.0.tmp").write_bytes(b"half of")
    again = example.run(example.arguments([*command, "--eval-at", "96"]))
    for variant, values in again["variants"].items():
        assert values["curve"] == first["variants"][variant]["curve"]
        assert set(values["at"]) == {96}


@pytest.mark.parametrize("held", [b"", b"no archive", 20_000, {"another": "file"}])
def test_a_damaged_checkpoint_is_named(examples, tmp_path, held):
    path, trainer = tmp_path / "checkpoint.pt", examples["nsa_trainer"]
    if isinstance(held, bytes):
        path.write_bytes(held)
    else:
        torch.save(held if isinstance(held, dict) else {"settings": {}, "x": torch.zeros(100_000)}, path)
        if isinstance(held, int):
            os.truncate(path, held)
    with pytest.raises(SystemExit, match=r"checkpoint.pt is no whole checkpoint of such a run .*: remove it"):
        trainer.load(path, {})


def test_a_folder_that_takes_no_files_is_refused_before_training(example, tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SystemExit, match=f"--out {out}: "):
            example.run(example.arguments([*COMMAND, "--out", str(out)]))


def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(example, tmp_path):
    out = ["--out", str(tmp_path)]
    with pytest.raises(SystemExit, match="gradients of dense: nan"):
        example.run(example.arguments([*COMMAND, *out, "--lr", "1e30", "--save-every", "0"]))
    assert not (tmp_path / "checkpoint.pt").exists()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--cmp", "8"], "--cmp must be 2 numbers"),
        (["--heads", "6,4,16"], "multiple of KV"),
        (["--cmp", "12,8"], "`cmp_stride` must divide"),
        (["--slc-count", "2"], "must cover the forced blocks"),
        (["--context", "64", "--from-context", "128"], "at most --context = 64"),
        (["--warm-up", "1.5"], "--warm-up must be between 0 and 1"),
        (["--text", "nowhere.bin"], "nsa_data.py FILE` makes one"),
    ],
)
def test_errors_say_what_to_do(example, capsys, given, says):
    with pytest.raises(SystemExit):
        example.arguments(["--out", "x", *given])
    assert says in capsys.readouterr().err


def test_tiny_gives_way_to_what_is_named(example):
    args = example.arguments(["--out", "x", "--tiny", "--layers", "3", "--slc-count", "4"])
    assert (args.layers, args.slc_count, args.hidden, args.context) == (3, 4, 64, 256)


@pytest.mark.parametrize(("part", "asks"), [("train", 4), ("held_out", 1)])
def test_needles(examples, text, part, asks):
    """The answer to a held-out question occurs once before the question, and is the target."""
    data = examples["nsa_data"]
    source = data.Needles(data.Text(text))
    tokens, targets = source.batch(3, 512, 5, part)
    assert tokens.shape == targets.shape == (3, 512)
    for row, wanted in zip(tokens, targets, strict=True):
        asked = (wanted != -100).nonzero().flatten().tolist()
        assert len(asked) == 32 * asks
        assert min(asked) >= 256
        for position in asked:
            told = (row == row[position]).nonzero().flatten().tolist()
            assert len(told) == 1 + asks
            assert told[0] < 256 <= told[1]
            assert row[told[0] + 1] == wanted[position]
        assert (row >= data.KEY).sum() >= 2 * 32 * (1 + asks) - 1  # the last value may lie beyond the end
    assert not torch.equal(tokens, source.batch(3, 512, 6, part)[0])
    assert torch.equal(tokens, source.batch(3, 512, 5, part)[0])


def test_a_share_of_the_rotary_pairs(examples):
    rotary_of = examples["nsa_decoder"].rotary_of
    full, half = rotary_of(100, 16, "cpu"), rotary_of(100, 16, "cpu", share=0.5)
    for one, other, still in zip(full, half, (1.0, 0.0), strict=True):
        assert torch.equal(one[:, :4], other[:, :4])
        assert (other.view(100, 2, 8)[:, :, 4:] == still).all()


def test_schedules(examples, example):
    sizes = NsaSizes(cmp_block=8, cmp_stride=4)
    early, late = (examples["nsa_trainer"].sizes_at(sizes, share) for share in (0.59, 0.6))
    assert late == sizes
    assert early == NsaSizes(8, 4, slc_block=16, slc_count=1, first_blocks=0, local_blocks=1, window=16)
    assert examples["nsa_trainer"].sizes_at(NsaSizes(), 0.0).slc_block == 32  # holds a compressed token
    args = example.arguments(["--out", "x", "--context", "8192", "--from-context", "64"])
    contexts = [example.context_at(args, share / 100) for share in range(100)]
    assert contexts[:20] == [64] * 20
    assert contexts[85:] == [8192] * 15
    assert contexts == sorted(contexts)
    assert set(contexts) == {64 << i for i in range(8)}


def test_a_task_that_was_not_learned_is_said(example):
    results = {"data": "copy", "variants": {name: {"curve": [(30, 4.0, found)]} for name, found in
                                            (("dense", 0.99), ("nsa", 0.045))}}  # fmt: skip
    assert example.unlearned(results, tiny=True) == [
        "nsa did not learn to copy: 4.5% right (guessing: 1.6%)",
        "--tiny checks that training runs; leave it out, or give sizes and --steps, to compare variants",
    ]
    assert "docs/guides/train.md" in example.unlearned(results, tiny=False)[-1]
    assert example.unlearned(results | {"data": "text"}, tiny=True) == []
