"""Every test counts into a recorder of its own, which raises on names that the catalogue does not know.

Slow tests wait until they are asked for: `pytest -m slow`, or `-m "slow or not slow"` for all.
"""

import pytest

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
