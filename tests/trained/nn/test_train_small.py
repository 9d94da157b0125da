# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/quality/train_small.py` at a tiny size: full density trains as dense attention does."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "quality" / "train_small.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_small", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_small"] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def test_full_density_trains_as_dense_attention_does(script):
    shape = script.Shape(layers=2, width=64, heads=2, seqlen=768)
    runs = script.make_runs(shape)
    script.train(runs, script.batches(shape), 20, lambda line: None)
    dense, full, sparse = (torch.tensor(run.losses) for run in runs)
    torch.testing.assert_close(full, dense, rtol=1e-5, atol=0)
    assert dense[-1] < dense[0] - 0.5
    assert runs[2].density < 0.7
    assert (sparse - dense).abs().max() > 1e-4  # it is another model
    assert sparse[-1] < sparse[0] - 0.5


@pytest.mark.slow
def test_command(tmp_path):
    wanted = tmp_path / "results.json"
    small = ["--layers", "1", "--width", "32", "--heads", "1", "--seqlen", "128", "--steps", "2"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *small, "--json", wanted], capture_output=True, text=True, check=True
    )
    assert "| torch SDPA, dense | 100.0% |" in done.stdout
    assert [len(run["losses"]) for run in json.loads(wanted.read_text())["runs"]] == [2, 2, 2]
    bad = subprocess.run([sys.executable, SCRIPT, "--width", "65"], capture_output=True, text=True)
    assert bad.returncode == 2
    assert "--width must be a multiple of --heads, got 65 and 4" in bad.stderr
