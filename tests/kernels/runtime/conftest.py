# SPDX-License-Identifier: Apache-2.0
"""Launches are direct in these tests, whose driver is a stand-in: also under a Triton that no GPU here has tried."""

import pytest


@pytest.fixture(autouse=True)
def proven_triton(monkeypatch):
    from dynaxx.kernels import trials

    monkeypatch.setattr(trials, "is_proven", lambda: True)


@pytest.fixture
def kept():
    """The recordings of calls, none at the start of a test and none after it."""
    from dynaxx.kernels.runtime.launch_cache import recordings

    recordings.clear()
    yield recordings
    recordings.clear()
