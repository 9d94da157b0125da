# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of served engines refuse options that they cannot use, before anything starts."""

import subprocess
import sys
from pathlib import Path

import pytest

SERVING = Path(__file__).parents[2] / "benchmarks" / "serving"


@pytest.mark.parametrize(
    "command",
    [
        "vllm_turns.py --lengths abc",
        "vllm_turns.py --lengths=",
        "vllm_turns.py --kernels 0",
        "vllm_turns.py --decode 16",
        "vllm_turns.py --decode 16x",
        "vllm_turns.py --pages x",
        "vllm_turns.py --pages 64/7",
        "vllm_turns.py --read 1.5",
        "vllm_turns.py --turns foo",
        "vllm_serving.py --parts foo",
        "vllm_serving.py --shares nan",
        "vllm_traffic.py http://localhost:1 --lengths 1,,2",
        "vllm_gpu.py own --lengths -5",
        "vllm_profile.py --lengths 1.5",
    ],
)
def test_a_wrong_option_is_an_error_of_the_command_line(command):
    done = subprocess.run(
        [sys.executable, *(SERVING / command).as_posix().split()], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert ": error: argument" in done.stderr
