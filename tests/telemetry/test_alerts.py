# SPDX-License-Identifier: Apache-2.0
"""Alert rules and the dashboard ask for metrics that exist, and Prometheus itself agrees with them."""

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from importlib.resources import files
from pathlib import Path

import pytest

from dynaxx.telemetry import CATALOG, Recorder
from dynaxx.telemetry.dashboard import dashboard
from dynaxx.telemetry.overview import DRIFTED, ERROR_HIGH, FALLBACKS_HIGH, RECALL_LOW

yaml = pytest.importorskip("yaml")

ROOM = Path(str(files("dynaxx.telemetry")))
RULES, TESTS = ROOM / "alerts.yml", Path(__file__).parent / "alerts_test.yml"
PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool: apt-get install prometheus")
PROMETHEUS_LABELS = {"le", "instance", "job"}
GRAFANA_UNITS = {"reqps", "ops", "short", "percentunit", "s", "flops", "Bps", "bytes"}


def rules() -> list[dict]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return group["rules"]


def panels() -> list[dict]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def queries() -> list[str]:
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    return found + [note["expr"] for note in dashboard()["annotations"]["list"]]


def unknown(query: str) -> set[str]:
    """Return names in a query that are not dynaxx's series, and labels that its metrics do not have."""
    found, labels = set(), set(PROMETHEUS_LABELS)
    for name in re.findall(r"dynaxx_\w+", query):
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        histogram = base in CATALOG and CATALOG[base].kind == "histogram"
        if name not in CATALOG and not (histogram and base != name):
            found.add(name)
        elif CATALOG[base if histogram else name].kind == "histogram" and base == name:
            found.add(f"{name}: a histogram has _bucket, _sum and _count")
        else:
            labels |= set(CATALOG[base if histogram else name].all_labels)
    named = set(re.findall(r'(\w+)\s*(?:=~|!=|!~|=)\s*"', query))
    grouped = {label.strip() for group in re.findall(r"\bby \(([^)]*)\)", query) for label in group.split(",")}
    return found | ((named | grouped) - labels)


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_what_there_is_and_says_what_to_do(rule):
    assert not unknown(rule["expr"])
    assert rule["alert"].startswith("Dynaxx")
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert "{{ $labels." in rule["annotations"]["summary"]
    assert rule["annotations"]["description"].endswith(".")
    tested = [t for test in yaml.safe_load(TESTS.read_text())["tests"] for t in test["alert_rule_test"]]
    fired = {bool(t["exp_alerts"]) for t in tested if t["alertname"] == rule["alert"]}
    assert fired == {True, False}, "a test in which it fires and one in which it does not"


def test_the_limits_are_those_of_watch():
    expressions = {rule["alert"]: rule["expr"].strip() for rule in rules()}
    assert expressions["DynaxxRecallLow"].endswith(f"< {RECALL_LOW}")
    assert expressions["DynaxxOutputErrorHigh"].endswith(f"> {ERROR_HIGH}")
    assert expressions["DynaxxFallbacks"].endswith(f"> {FALLBACKS_HIGH}")
    assert expressions["DynaxxDrift"].endswith(f">= {DRIFTED:g}")


def test_every_alert_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "guides" / "telemetry.md").read_text(encoding="utf-8")
    assert [rule["alert"] for rule in rules() if f"`{rule['alert']}`" not in page] == []


@needs_promtool
def test_promtool_agrees():
    for arguments in (("check", "rules", str(RULES)), ("test", "rules", TESTS.name)):
        done = subprocess.run([PROMTOOL, *arguments], cwd=TESTS.parent, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


# ---- the dashboard ---------------------------------------------------------------------------------------------------


def test_the_dashboard_asks_for_what_there_is():
    assert {query: unknown(query) for query in queries() if unknown(query)} == {}


def test_the_dashboard_shows_every_metric_that_says_something():
    shown = {
        re.sub(r"_(bucket|sum|count)$", "", name) for query in queries() for name in re.findall(r"dynaxx_\w+", query)
    }
    elsewhere = {"dynaxx_policy_loaded_timestamp_seconds", "dynaxx_snapshot_timestamp_seconds", "dynaxx_uptime_seconds"}
    assert set(CATALOG) - shown == elsewhere


def test_the_dashboard_is_well_formed():
    board = dashboard()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    taken = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies over another panel"
        taken |= cells
    for panel in panels():
        assert panel["title"]
        assert panel["type"] in ("stat", "timeseries", "table")
        assert panel["description"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references))
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"] in GRAFANA_UNITS
        values = [step["value"] for step in defaults["thresholds"]["steps"]]
        assert values[0] is None, "Grafana's first step has no value"
        assert values[1:] == sorted(values[1:])
    for note in board["annotations"]["list"]:
        assert note["target"] == {"refId": "Anno", "expr": note["expr"]}
    for variable in board["templating"]["list"]:
        assert {"text", "value"} <= set(variable.get("current", ("text", "value"))), "required by Grafana's schema"
    variables = {variable["name"] for variable in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(board))) - {"__rate_interval", "__all"}
    assert used == variables


# ---- the real thing --------------------------------------------------------------------------------------------------


def ask(port: int, path: str, **parameters: str) -> dict:
    url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)["data"]


def serve_everything(numbers: Recorder) -> None:
    """Serve every series with a plausible value, with the kill switch on and with fallbacks."""
    view = numbers.bind(model_name="smollm2")
    for metric in CATALOG.values():
        labels = {label: {"layer": "3", "route": "sparse", "result": "ok"}.get(label, "x") for label in metric.labels}
        if metric.kind == "counter":
            view.add(metric.name, 5, **labels)
        elif metric.kind == "info":
            view.info(metric.name, **labels)
        elif metric.kind == "histogram":
            view.observe(metric.name, 0.95 if "recall" in metric.name else 0.02, **labels)
        else:
            high = metric.name in ("dynaxx_kill_switch", "dynaxx_layer_recall_ratio")
            view.set(metric.name, time.time() if "timestamp" in metric.name else float(high), **labels)


@pytest.mark.slow
@pytest.mark.skipif(PROMETHEUS is None, reason="needs prometheus: apt-get install prometheus")
def test_prometheus_scrapes_a_process_and_its_alerts_fire(telemetry, tmp_path):
    """Shorten the minutes of the rules to seconds; run every query of the dashboard."""
    prometheus = pytest.importorskip("dynaxx.telemetry.prometheus")
    faster = re.sub(r"\b(\d+)(m|h)\b", lambda found: f"{found[1]}s", RULES.read_text())
    faster = re.sub(r"\[(\d+)s\]", lambda found: f"[{max(5, int(found[1]))}s]", faster)
    (tmp_path / "alerts.yml").write_text(faster)
    with prometheus.serve(0) as server:
        (tmp_path / "prometheus.yml").write_text(
            "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
            "rule_files: [alerts.yml]\n"
            f"scrape_configs: [{{job_name: dynaxx, static_configs: [{{targets: ['127.0.0.1:{server.port}']}}]}}]\n"
        )
        with prometheus.serve(0) as free:
            port = free.port
        log = (tmp_path / "log").open("w")
        process = subprocess.Popen(
            [
                PROMETHEUS,
                f"--config.file={tmp_path / 'prometheus.yml'}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            firing: set[str] = set()
            end = time.monotonic() + 60
            while not {"DynaxxKillSwitchOn", "DynaxxFallbacks"} <= firing:
                assert time.monotonic() < end, (firing, (tmp_path / "log").read_text()[-2000:])
                serve_everything(telemetry)
                time.sleep(0.5)
                try:
                    found = ask(port, "alerts")["alerts"]
                except OSError:  # it starts
                    continue
                firing = {alert["labels"]["alertname"] for alert in found if alert["state"] == "firing"}
            assert not firing & {"DynaxxRecallLow", "DynaxxOutputErrorHigh", "DynaxxDrift", "DynaxxGuardActed"}
            (target,) = ask(port, "targets")["activeTargets"]
            assert target["health"] == "up"
            empty = []
            for query in queries():
                filled = query.replace("$__rate_interval", "20s").replace("$model_name", ".*").replace("$engine", ".*")
                if not ask(port, "query", query=filled)["result"]:
                    empty.append(filled)
            assert empty == []
        finally:
            process.terminate()
            process.wait(30)
            log.close()
