# SPDX-License-Identifier: Apache-2.0
"""`make sanitize` says why it cannot run, and its planted bugs still match the core's source."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "sanitize/run.py"


def test_without_a_compiler_it_is_skipped():
    done = subprocess.run(
        [sys.executable, str(TOOL)], env={**os.environ, "CXX": "no-such-compiler"}, capture_output=True, text=True
    )
    assert done.returncode == 77, done.stderr
    assert "skipped: address: no g++" in done.stdout


def test_the_planted_bugs_have_a_place():
    tool = runpy.run_path(str(TOOL))
    for sanitizer in tool["SANITIZERS"]:
        name, before, after = sanitizer.bug
        assert before in (tool["ROOT"] / "src" / tool["CORE"] / name).read_text()
        assert before != after
