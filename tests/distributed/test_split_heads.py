# SPDX-License-Identifier: Apache-2.0
"""Heads split over ranks and caches split by pages give the results of one device."""

import pytest
from ranks import cases_of, run_cases

from dynaxx import distributed as dxd


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=lambda count: f"{count} ranks")
def results(request):
    return run_cases("head_cases", request.param)


@pytest.mark.parametrize("case", cases_of("head_cases"))
def test_against_one_device(results, case):
    assert not results[case], "\n".join(results[case])


@pytest.mark.parametrize(("heads", "ranks"), [((32, 8), 2), ((32, 8), 16), ((6, 3), 3), ((4, 1), 4)])
def test_shares_cover_all_heads_once(heads, ranks):
    shares = dxd.share_heads(*heads, ranks)
    assert [i for share in shares for i in range(share.q_heads.start, share.q_heads.stop)] == list(range(heads[0]))
    group = heads[0] // heads[1]
    for share in shares:
        assert {i // group for i in range(share.q_heads.start, share.q_heads.stop)} == set(
            range(share.kv_heads.start, share.kv_heads.stop)
        )
