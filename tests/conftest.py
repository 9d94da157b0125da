# SPDX-License-Identifier: Apache-2.0
"""Each test has its own metrics recorder, which raises on names that the catalogue does not list.

Slow tests are skipped unless requested: `pytest -m slow`, or `-m "slow or not slow"` for all tests. Under Triton's
interpreter, which takes a thousand times as long as a GPU, a sample of the cases of each test runs, or all with
`--every-case`.
"""

import os
import warnings
import zlib
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from dynaxx.core.build import processors
from dynaxx.telemetry import Recorder, use
from interpreter import DEVICE, INTERPRETED, NAME, OPTIONS, start_interpreted, stop_interpreted


def pytest_addoption(parser):
    parser.addoption("--every-case", action="store_true", help="run all cases under Triton's interpreter")
    parser.addoption("--record", type=Path, help="write what passed, and on what, for benchmarks/render.py")


def pytest_terminal_summary(terminalreporter, config):
    """Keep what ran where: docs/where.md is rendered from these records."""
    path = config.getoption("--record")
    if path is not None:
        from benchmarks.record import run_of

        counts = Counter({name: len(terminalreporter.stats.get(name, [])) for name in ("passed", "failed", "error")})
        path.write_text(run_of(config.invocation_params.args, counts))


def pytest_configure(config):
    """Divide the cores among pytest's workers, because with too many threads small tensors wait for each other."""
    if config.getoption("--every-case"):
        OPTIONS.append("--every-case")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        torch.set_num_threads(max(1, min(torch.get_num_threads(), processors() // workers)))


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: item.name == NAME)
    if INTERPRETED and not config.getoption("--every-case"):
        items[:] = _sample(items)
    if config.getoption("-m"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: pytest -m slow"))


def _sample(items):
    """Return the first case of each test and one in `SAMPLE` of the others, drawn by their names."""
    firsts = {}
    for item in items:
        firsts.setdefault((item.path, item.originalname), item)
    drawn = lambda item: zlib.crc32(item.name.encode()) % SAMPLE == 0
    return [item for item in items if drawn(item) or item is firsts[item.path, item.originalname]]


SAMPLE = 24


def pytest_collection_finish(session):
    """Start the files for Triton's interpreter in the main process only, since every xdist worker collects them."""
    here = DEVICE == "cpu" and not INTERPRETED and "PYTEST_XDIST_WORKER" not in os.environ
    if here and not session.config.option.collectonly:
        runs = [item for item in session.items if item.name == NAME and not item.get_closest_marker("skip")]
        start_interpreted({item.path for item in runs})


def pytest_unconfigure(config):
    stop_interpreted()


@pytest.fixture(autouse=True)
def telemetry():
    with use(Recorder(strict=True)) as recorder:
        yield recorder


@pytest.fixture(autouse=True)
def shared_memory_of_a_gpu(request):
    """Return a GPU's memory after large tests, since workers share the GPU, and torch keeps what a test has freed."""
    yield
    if request.node.get_closest_marker("gpu") and torch.cuda.memory_reserved() > KEPT_BYTES:
        torch.cuda.empty_cache()


KEPT_BYTES = 1 << 30  # of each worker


@pytest.fixture
def never_waits():
    """Return a context manager in which any wait for the GPU raises, on every stream."""

    @contextmanager
    def within():
        try:
            with warnings.catch_warnings():  # it is raised after the mode was set
                warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
                torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return within
