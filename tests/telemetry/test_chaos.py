# SPDX-License-Identifier: Apache-2.0
"""A chaos run of a few seconds: every fault occurs, and no request fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "benchmarks" / "serving" / "chaos.py"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks workers")
def test_no_request_notices():
    done = subprocess.run(
        [sys.executable, str(CHAOS), "--minutes", "0.2", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    found = json.loads(done.stdout)
    assert done.returncode == 0, found["problems"]
    assert found["seen"]["requests"] > 20
