# SPDX-License-Identifier: Apache-2.0
"""Rules over data, native sparse attention and modules with a split sequence give the results of one device."""

import pytest
import torch
from ranks import cases_of, run_cases

slow = lambda count: pytest.param((count, "cpu"), marks=pytest.mark.slow, id=f"{count} ranks")
quick = lambda count: pytest.param((count, "cpu"), id=f"{count} ranks")
GPUS = pytest.param((2, "cuda"), marks=[pytest.mark.gpu, pytest.mark.slow], id="2 GPUs")


@pytest.fixture(scope="module", params=[quick(2), slow(3), slow(4), GPUS])
def results(request):
    count, device = request.param
    if device == "cuda" and torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    return run_cases("rule_cases", count, device)


@pytest.mark.parametrize("case", cases_of("rule_cases"))
def test_against_one_device(results, case):
    assert not results[case], "\n".join(results[case])
