# SPDX-License-Identifier: Apache-2.0
"""Choose where Triton kernels are tested: on a GPU, or on a CPU under Triton's interpreter.

The interpreter must be chosen before Triton is imported. Each file of such tests therefore runs a second time, in a
process of its own, one at a time. These processes start with the session, at low priority, and the tests that wait for
them come last.
"""

import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from dynaxx.kernels.device import gpu_of

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    import patch_once  # noqa: F401  (a third of the interpreter's time)
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
HOPPER = DEVICE == "cuda" and gpu_of(torch.device("cuda")).has_wgmma
runs_here = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED, reason="runs on a GPU, or again under the interpreter"
)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
starts_interpreter = pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the tests below run in this process")


OPTIONS: list[str] = []  # of pytest, for these processes
NAME = "test_under_the_interpreter"
GIVE_WAY = "import os, sys, pytest; hasattr(os, 'nice') and os.nice(19); sys.exit(pytest.main(sys.argv[1:]))"


def run_interpreted(file: str) -> None:
    """Run a file's tests under the interpreter, or wait for the run that was started."""
    path = Path(file).resolve()
    code, said = _started.pop(path).result() if path in _started else _run(path)
    assert code == 0, said
    assert " passed" in said


def start_interpreted(files: set[Path]) -> None:
    """Start running some files in the background, in order."""
    _started.update({path: _pool.submit(_run, path) for path in sorted(files)})


def stop_interpreted() -> None:
    """Stop the background runs."""
    _pool.shutdown(wait=False, cancel_futures=True)
    for process in _running:
        process.kill()


def _run(path: Path) -> tuple[int, str]:
    """Return the exit code and the output."""
    with subprocess.Popen(
        [sys.executable, "-c", GIVE_WAY, "-x", "-p", "no:cacheprovider", *OPTIONS, str(path)],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    ) as process:
        _running.append(process)
        said, _ = process.communicate()
        _running.remove(process)
        return process.returncode, said


_pool = ThreadPoolExecutor(1)
_started: dict[Path, Future[tuple[int, str]]] = {}
_running: list[subprocess.Popen[str]] = []
