# SPDX-License-Identifier: Apache-2.0
"""The training example with FSDP2 and a split sequence has one device's losses, and resumes with the same losses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_distributed.py"
TINY = "--device cpu --tokens 256 --hidden 32 --layers 2 --heads 4,2 --steps 4 --save-every 2 --check-resuming"


def train(folder, ranks):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*command, str(EXAMPLE), "--out", str(folder), *TINY.split()],
        env=environment, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "losses.json").read_text())["losses"]


@pytest.mark.slow
def test_two_ranks_train_and_resume(tmp_path):
    losses = train(tmp_path / "two", 2)
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 4


@pytest.mark.slow
def test_any_number_of_ranks_has_the_same_losses(tmp_path):
    assert train(tmp_path / "one", 1) == pytest.approx(train(tmp_path / "three", 3), rel=1e-4)
