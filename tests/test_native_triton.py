"""Native Sparse Attention's Triton kernels against fp64: under Triton's interpreter on a CPU, and on a GPU.

The interpreter must be chosen before Triton loads, so it runs in a process of its own: this file again.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dynaxx.kernels.triton import native
from dynaxx.testing.native import random_selected_case

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

runs_here = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED, reason="runs on a GPU, or again under the interpreter"
)
gpu = pytest.mark.gpu
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
SCHEDULES = ("union", "gather")


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the tests below run in this process")
def test_under_the_interpreter():
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(Path(__file__).resolve())],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[1],
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout


def check(case, gradients=True):
    for report in case.check("triton", gradients):
        assert report.ok, f"{report}\n{case.label}"


@runs_here
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(6))
def test_random_cases(seed, schedule, monkeypatch):
    """fp32 and fp16, since the interpreter does not multiply bf16; by either schedule, cut into chunks and items."""
    monkeypatch.setattr(native.config, "choose_schedule", lambda group_size: schedule)
    monkeypatch.setattr(native, "PARTIAL_BYTES", 1 << 15)
    monkeypatch.setattr(native.config, "item_length", lambda group_size: 8)
    sizes = {"head_dims": (16, 24), "lengths": (0, 1, 13, 20), "groups": (1, 2, 3, 4, 16)}
    check(random_selected_case(seed, dtype=torch.float16 if seed % 2 else torch.float32, device=DEVICE, **sizes))
