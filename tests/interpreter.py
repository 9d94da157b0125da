"""Where Triton's kernels are tested: on a GPU, or on a CPU under its interpreter, asked for as triton is imported.

So a file of such tests runs once more, in a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
runs_here = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED, reason="runs on a GPU, or again under the interpreter"
)
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
starts_interpreter = pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the tests below run in this process")


def run_interpreted(file: str) -> None:
    """Run a file's tests under the interpreter."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(Path(file).resolve())],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[1],
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
