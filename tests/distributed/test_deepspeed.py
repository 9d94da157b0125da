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


@pytest.fixture(scope="module", params=[1, 2], ids=lambda count: f"gpus{count}")
def on_gpus(request):
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs")
    return run_cases("deepspeed_gpu_cases", request.param, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases_of("deepspeed_gpu_cases"))
def test_on_gpus(on_gpus, case):
    assert not on_gpus[case], "\n".join(on_gpus[case])
