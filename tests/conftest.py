"""Every test counts into a recorder of its own, which raises on names that the catalogue does not know."""

import pytest

from dynaxx.telemetry import Recorder, use


@pytest.fixture(autouse=True)
def telemetry():
    with use(Recorder(strict=True)) as recorder:
        yield recorder
