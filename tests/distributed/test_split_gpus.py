# SPDX-License-Identifier: Apache-2.0
"""Two GPUs through NCCL give the results of one: two processes run all cases, in 100 s, most of it compiling.

The cases of CPUs also run on GPUs, with `-m "gpu and slow"`: they compile many more kernels.
"""

import time

import pytest
import torch
from ranks import cases_of, run_cases

GPUS = 2


@pytest.fixture(scope="module")
def results():
    if torch.cuda.device_count() < GPUS:
        pytest.skip(f"needs {GPUS} GPUs")
    return run_cases("gpu_cases", GPUS, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases_of("gpu_cases"))
def test_against_one_gpu(results, case):
    assert not results[case], "\n".join(results[case])


@pytest.mark.gpu
@pytest.mark.parametrize("copies", [False, True], ids=["NCCL", "copy engines"])
def test_the_others_learn_of_a_rank_that_died(monkeypatch, copies):
    """After the group's timeout, NCCL's watchdog or the kernel that waits for a copy ends the others, and says why."""
    if torch.cuda.device_count() < GPUS:
        pytest.skip(f"needs {GPUS} GPUs")
    monkeypatch.setenv("RANKS_COLLECTIVE_SECONDS", "15")
    if copies:
        monkeypatch.setenv("DYNAXX_COPY_ENGINES", "1")
    start = time.monotonic()
    failures = run_cases("lost_cases", GPUS, "cuda")["case_a_rank_is_killed_between_two_steps"]
    assert time.monotonic() - start < 120
    said = [failure.lower() for failure in failures if failure.startswith("rank 0")]
    assert all("timeout" in failure or "timed out" in failure or "cuda error" in failure for failure in said), said
