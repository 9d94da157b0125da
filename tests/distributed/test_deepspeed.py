# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's Ulysses and ZeRO on two ranks, through gloo: `make test-deepspeed` has DeepSpeed."""

import importlib.util

import pytest
import torch
from ranks import cases_of, run_cases

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed has an environment of its own: make test-deepspeed", allow_module_level=True)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results():
    return run_cases("deepspeed_cases", 2)


@pytest.mark.parametrize("case", cases_of("deepspeed_cases"))
def test_on_two_ranks(results, case):
    assert not results[case], "\n".join(results[case])


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2])
def test_on_gpus(count):
    """Not run yet: no GPU was at hand when this was written."""
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    results = run_cases("deepspeed_gpu_cases", count, device="cuda")
    assert not {case: failures for case, failures in results.items() if failures}
