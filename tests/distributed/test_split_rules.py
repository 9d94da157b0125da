"""Rules over data, Native Sparse Attention and modules with a split sequence give what one device gives."""

import pytest
from ranks import cases_of, run_cases


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow),
                                        pytest.param(4, marks=pytest.mark.slow)])  # fmt: skip
def results(request):
    return run_cases("rule_cases", request.param)


@pytest.mark.parametrize("case", cases_of("rule_cases"))
def test_against_one_device(results, case):
    assert not results[case], "\n".join(results[case])
