# SPDX-License-Identifier: Apache-2.0
"""Snapshots contain what was counted; the file stays complete despite faults of the disk or the clock."""

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dynaxx import storage
from dynaxx.telemetry import Recorder, use
from dynaxx.telemetry.files import SnapshotFile, read_snapshot, read_snapshots, write_snapshot
from dynaxx.telemetry.snapshot import Snapshot

CALLS = "dynaxx_layer_calls_total"


def fill(recorder: Recorder, times: int = 1) -> None:
    view = recorder.bind(model_name="smollm2")
    for i in range(times):
        view.add(CALLS, backend="cpu", phase="prefill")
        view.observe("dynaxx_recall_ratio", 0.9 + 0.001 * (i % 100))
        view.set("dynaxx_layer_recall_ratio", 0.9 + 0.01 * i % 0.1, layer=i % 3)
    view.info("dynaxx_policy_info", version="1", digest="abc")
    view.event("policy_loaded", digest="abc")


def wait_for(condition, seconds: float = 10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


def test_a_snapshot_survives_its_file(telemetry, tmp_path):
    fill(telemetry, 5)
    telemetry.event("kernel_failed", ids=[1, 2], share=float("inf"))
    path = tmp_path / "snapshot.json"
    with SnapshotFile(path, interval=60):
        wait_for(path.exists)
    before, after = Snapshot.of(telemetry), read_snapshot(path)
    assert after.readings == before.readings
    assert [event["name"] for event in after.events] == ["policy_loaded", "kernel_failed"]
    assert after.events[1]["facts"]["ids"] == "<list>"
    assert list(tmp_path.iterdir()) == [path]


def test_it_is_written_again_and_again_and_once_at_the_end(telemetry, tmp_path):
    path = tmp_path / "snapshot.json"
    with SnapshotFile(path, interval=0.02) as file:
        wait_for(path.exists)
        fill(telemetry)
        wait_for(lambda: read_snapshot(path).total(CALLS) == 1)
        telemetry.add(CALLS, backend="cpu", phase="decode")
        file.close()
        assert read_snapshot(path).total(CALLS) == 2


def test_questions(telemetry):
    fill(telemetry, 100)
    telemetry.bind(engine="1").add(CALLS, 7, backend="dense", phase="decode")
    telemetry.bind(engine="1").set("dynaxx_layer_recall_ratio", 0.5, layer=2)
    snapshot = Snapshot.of(telemetry)
    assert snapshot.total(CALLS) == 107
    assert snapshot.total(CALLS, engine="1") == 7
    assert snapshot.by(CALLS, "backend") == {"cpu": 100, "dense": 7}
    assert snapshot.by("dynaxx_layer_recall_ratio", "layer")["2"] == 0.5  # recall combines by min
    assert snapshot.mean("dynaxx_recall_ratio") == pytest.approx(0.9495)
    assert snapshot.quantile("dynaxx_recall_ratio", 0.5) == pytest.approx(0.95, abs=0.003)
    assert snapshot.quantile("dynaxx_output_error_ratio", 0.5) is None
    assert snapshot.mean("dynaxx_output_error_ratio") is None
    assert snapshot.gauge("dynaxx_kill_switch") is None


def test_quantiles_are_those_of_prometheus(telemetry):
    for value in (0.005, 0.015, 0.015, 0.04, 99.0):
        telemetry.observe("dynaxx_density_ratio", value, phase="prefill")
    snapshot = Snapshot.of(telemetry)
    assert snapshot.quantile("dynaxx_density_ratio", 0.4) == pytest.approx(0.015)  # halfway into (0.01, 0.02]
    assert snapshot.quantile("dynaxx_density_ratio", 0.99) == 1.0  # the last bound


def test_since_counts_what_came_after_and_a_restart_counts_from_zero(telemetry):
    fill(telemetry, 3)
    first = Snapshot.of(telemetry)
    fill(telemetry, 2)
    telemetry.add("dynaxx_fallbacks_total", reason="new")
    later = Snapshot.of(telemetry)
    delta = later.since(first)
    assert delta.total(CALLS) == 2
    assert delta.total("dynaxx_fallbacks_total") == 1
    assert sum(r.count for r in delta.get("dynaxx_recall_ratio")) == 2
    assert 0 <= delta.uptime < 60
    with use(Recorder(strict=True)) as anew:
        fill(anew)
        assert Snapshot.of(anew).since(later).total(CALLS) == 1


def test_several_processes_make_one(tmp_path):
    paths = []
    for index, (level, loaded) in enumerate(((1, 10.0), (2, 20.0))):
        numbers = Recorder(strict=True, model_name="m")
        numbers.add(CALLS, index + 1, backend="cpu", phase="prefill")
        numbers.observe("dynaxx_recall_ratio", 0.9)
        numbers.set("dynaxx_guard_level", level)
        numbers.set("dynaxx_policy_loaded_timestamp_seconds", loaded)
        numbers.set("dynaxx_kv_cache_bytes", 100)
        numbers.set("dynaxx_layer_recall_ratio", 0.9 - index * 0.1, layer=0)
        paths.append(tmp_path / f"{index}.json")
        SnapshotFile(paths[-1], interval=60, numbers=numbers).close()
    together = read_snapshots(paths)
    assert together.total(CALLS) == 3
    assert together.get("dynaxx_recall_ratio")[0].count == 2
    assert together.gauge("dynaxx_guard_level") == 2
    assert together.gauge("dynaxx_policy_loaded_timestamp_seconds") == 20.0
    assert together.gauge("dynaxx_kv_cache_bytes") == 200
    assert together.gauge("dynaxx_layer_recall_ratio") == pytest.approx(0.8)
    assert read_snapshots([]).readings == {}


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left on device"), PermissionError(13, "no")])
def test_a_full_disk_is_counted_and_the_old_file_stays(telemetry, tmp_path, monkeypatch, fault, caplog):
    path = tmp_path / "snapshot.json"
    file = SnapshotFile(path, interval=60)
    wait_for(path.exists)

    def broken(*_):
        raise fault

    monkeypatch.setattr(os, "replace", broken)
    assert not file.write()
    assert not file.write()
    monkeypatch.undo()
    assert telemetry.value("dynaxx_telemetry_errors_total", what="snapshot file") == 2
    assert read_snapshot(path).total(CALLS) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["snapshot.json"]
    assert caplog.text.count("logged once") == 1
    file.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
def test_a_device_that_is_really_full(telemetry, tmp_path, monkeypatch):
    file = SnapshotFile(tmp_path / "snapshot.json", interval=60)
    wait_for(file.path.exists)
    before = file.path.read_bytes()
    monkeypatch.setattr(os, "unlink", lambda path: None)
    monkeypatch.setattr(storage, "_FLAGS_NEW", os.O_WRONLY)
    monkeypatch.setattr(Path, "with_name", lambda self, name: Path("/dev/full"))
    with pytest.raises(OSError, match="No space left"):
        write_snapshot(file.path, Snapshot.of(telemetry))
    assert not file.write()
    assert file.path.read_bytes() == before
    monkeypatch.undo()
    file.close()


def test_a_folder_that_goes_away_is_counted(telemetry, tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    file = SnapshotFile(folder / "snapshot.json", interval=60)
    wait_for(file.path.exists)
    file.path.unlink()
    folder.rmdir()
    file.close()
    assert telemetry.value("dynaxx_telemetry_errors_total", what="snapshot file") == 1


def test_a_clock_that_goes_back_bends_no_duration(telemetry, monkeypatch):
    first = Snapshot.of(telemetry)
    monkeypatch.setattr("time.time", lambda: first.time - 7200)
    fill(telemetry)
    later = Snapshot.of(telemetry)
    assert later.time < first.time
    assert later.since(first).uptime >= 0
    assert later.since(first).total(CALLS) == 1
    assert read_snapshots([]).uptime is None


def test_wrong_places_are_refused(tmp_path):
    with pytest.raises(ValueError, match="existing folder"):
        SnapshotFile(tmp_path / "no" / "snapshot.json")
    with pytest.raises(ValueError, match="must be > 0 seconds"):
        SnapshotFile(tmp_path / "snapshot.json", interval=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist"),
        ("", "is not JSON"),
        ("\x00\xff", "is not JSON"),
        ("[1]", "not a snapshot file"),
        ('{"format": "dynaxx.policy"}', "not a snapshot file"),
        ('{"format": "dynaxx.snapshot", "version": 2}', "upgrade dynaxx"),
        ('{"format": "dynaxx.snapshot", "version": 1}', "is damaged"),
        (
            '{"format": "dynaxx.snapshot", "version": 1, "time": 0, "uptime_seconds": 0, "events": [], "metrics": '
            '{"dynaxx_recall_ratio": [{"labels": {"model_name": "", "engine": "0"}, "counts": [1], "sum": 1}]}}',
            "is damaged",
        ),
        (
            '{"format": "dynaxx.snapshot", "version": 1, "time": 0, "uptime_seconds": 0, "events": [], "metrics": '
            '{"dynaxx_guard_level": [{"labels": {}, "value": 1}]}}',
            "is damaged",
        ),
    ],
)
def test_wrong_files_are_named(tmp_path, text, message):
    path = tmp_path / "snapshot.json"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=rf"snapshot.json {message}|snapshot.json.*{message}"):
        read_snapshot(path)


def test_a_metric_of_another_version_is_left_out(telemetry, tmp_path):
    document = Snapshot.of(telemetry).to_document()
    document["metrics"]["dynaxx_future_total"] = [{"labels": {}, "value": 1}]
    path = tmp_path / "snapshot.json"
    path.write_text(json.dumps(document))
    assert read_snapshot(path).readings == {}


def test_a_process_that_is_killed_leaves_a_whole_file(tmp_path):
    path = tmp_path / "snapshot.json"
    code = (
        "import sys; from dynaxx.telemetry import recorder; from dynaxx.telemetry.files import SnapshotFile\n"
        f"file = SnapshotFile({str(path)!r}, interval=0.0005)\n"
        "while True: recorder().add('dynaxx_fallbacks_total', reason='x')"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    wait_for(path.exists, 60)
    for _ in range(200):
        assert read_snapshot(path).time > 0
    process.kill()
    process.wait()
    assert read_snapshot(path).time > 0
