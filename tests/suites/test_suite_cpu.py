# SPDX-License-Identifier: Apache-2.0
"""The CPU suite on small shapes checks results before it times them, and times the requested rows."""

import pytest
from benchmarks.suites import cpu as bench_cpu
from benchmarks.suites.rows import rows_named
from benchmarks.targets import targets_of


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(bench_cpu, "QUICK_SHAPES", ((256, 64, "forward", "heads first"),))
    monkeypatch.setattr(bench_cpu, "GEMM", 64)
    monkeypatch.setattr(bench_cpu, "SMALL", (64,))
    monkeypatch.setattr(bench_cpu, "HALF", 128)
    checks = bench_cpu.check_backend
    monkeypatch.setattr(bench_cpu, "check_backend", lambda cases, seed, beat: checks(2, seed, beat))


@pytest.mark.parametrize(
    ("only", "rows"),
    [
        ([], {"window 256", "random 10 %, blocks 64", "full density", "small"}),
        (["window 512", "small"], {"window 512", "small"}),
        (["half"], {"half"}),
    ],
)
def test_rows_by_name(only, rows):
    said, beats = [], []
    found = bench_cpu.run_cpu_suite(quick=True, only=only, progress=said.append, beat=beats.append)
    assert "problem 2 of 2 against fp64" in beats
    assert len([beat for beat in beats if "round" in beat]) > 10, "nothing runs for long in silence"
    assert found["checks"] == {"cases": 2, "gradients": 1}
    names = {row["workload"] for row in found["rows"]} | {part for part in bench_cpu.PARTS if found[part]}
    assert names == rows if only else names > rows
    assert not found["decode"]
    assert targets_of(found)
    assert all(row["density"] <= 1 and row["times_faster"] > 0 for row in found["rows"])


def test_a_name_of_no_row_is_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(bench_cpu, "check_backend", lambda *_: pytest.fail("measured first"))
    with pytest.raises(ValueError, match=r"`only` must name some of \['window 256', .*'decode'\], got 'windows'"):
        bench_cpu.run_cpu_suite(only=["full", "windows"])


def test_a_wrong_backend_has_no_times(monkeypatch):
    def wrong(cases, seed, beat):
        raise RuntimeError("no times")

    monkeypatch.setattr(bench_cpu, "check_backend", wrong)
    monkeypatch.setattr(bench_cpu, "time_shape", lambda *_: pytest.fail("timed"))
    with pytest.raises(RuntimeError, match="no times"):
        bench_cpu.run_cpu_suite(quick=True)


def test_names_keep_the_order_of_the_rows():
    assert rows_named("only", ["b", "a 2"], ["a 1", "a 2", "b"]) == ["a 2", "b"]
