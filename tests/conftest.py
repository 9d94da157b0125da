"""Every test counts into a recorder of its own, which raises on names that the catalogue does not know.

Slow tests wait until they are asked for: `pytest -m slow`, or `-m "slow or not slow"` for all.
"""

import warnings
from contextlib import contextmanager

import pytest
import torch

from dynaxx.telemetry import Recorder, use


def pytest_collection_modifyitems(config, items):
    if config.getoption("-m"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: pytest -m slow"))


@pytest.fixture(autouse=True)
def telemetry():
    with use(Recorder(strict=True)) as recorder:
        yield recorder


@pytest.fixture
def never_waits():
    """`with never_waits():` whatever waits for the GPU within raises, on every stream of it."""

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
