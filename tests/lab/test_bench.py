# SPDX-License-Identifier: Apache-2.0
"""`dynaxx bench` checks results before it times them."""

import pytest

from dynaxx import sparse_attention
from dynaxx.lab import bench


def test_rows_of_every_pattern_and_pass():
    lines = []
    found = bench.run_bench("cpu", seqlen=512, say=lines.append)
    assert [(row["pattern"], row["timed_pass"]) for row in found["rows"]] == [
        (name, each) for name in ("window 64", "random 10 %", "full") for each in ("forward", "backward")
    ]
    assert len(lines) == 6
    for row in found["rows"]:
        assert 0 < row["density"] <= 1
        assert row["times_faster"] == row["sdpa_ms"] / row["ms"]


def test_a_wrong_result_has_no_time():
    attend = lambda q, k, v, layout, **options: sparse_attention(q, k, 1.01 * v, layout, **options)
    with pytest.raises(RuntimeError, match=r"no times: SlidingWindow\(window=64\) gives a wrong result: out"):
        bench.run_bench("cpu", seqlen=512, attend=attend)
