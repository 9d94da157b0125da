# SPDX-License-Identifier: Apache-2.0
"""A short soak on a tiny model: every fault occurs, no request fails, and a steady run raises no alarm."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from dynaxx.lab.models import load_model
from tiny import TEXT, save_tiny_model

SOAK = Path(__file__).parents[2] / "benchmarks" / "serving" / "soak.py"


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """Return a tiny model whose attention is not flat, a text, and the path at which runs keep the policy."""
    folder = tmp_path_factory.mktemp("soak")
    save_tiny_model(folder / "model")
    loaded = load_model(folder / "model")
    with torch.no_grad():
        for name, weight in loaded.model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight *= 12
    loaded.model.save_pretrained(folder / "model")
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("steady", [False, True])
def test_a_short_soak(setting, steady):
    words = ["--requests", "160", "--reference", "64", "--window", "16", "--lengths", "96,128", "--json"]
    words += ["--text", setting / "text.txt", "--policy", setting / "policy.json"]
    done = subprocess.run(
        [sys.executable, SOAK, setting / "model", *words, *(["--steady"] if steady else [])],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    # Some seconds say nothing on memory: the first run of each shape still allocates.
    failed = [check for check in found["checks"] if not check["passed"] and "memory" not in check["name"]]
    assert not failed, (found, done.stderr)
