# SPDX-License-Identifier: Apache-2.0
"""A tiny model, quick tools, and stand-ins in place of slow ones."""

import pytest
import torch

from command_line import CHECKED, POLICY, Analysis, Result, Validation, stand_in
from dynaxx.lab.doctor import run as doctor
from given_times import give_ceilings
from tiny import TEXT, save_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "text.txt").write_text(TEXT)
    return save_tiny_model(folder / "tiny")


@pytest.fixture(autouse=True)
def calm(monkeypatch):
    """Skip the measured ceilings, which take seconds; use the reference backend only, and one thread."""
    give_ceilings(monkeypatch)
    monkeypatch.setattr(doctor, "BACKENDS", ("reference",))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tools(monkeypatch):
    """Replace the slow tools by stand-ins; return a list of their calls."""
    calls = {}
    monkeypatch.setattr("dynaxx.lab.time_budget.watch_others", lambda: lambda: False)

    def call(name, result):
        def tool(*args, **kwargs):
            calls.setdefault(name, []).append((args, kwargs))
            return result

        return tool

    def tune(model, tokenizer, text, options, *, progress, time):
        calls.setdefault("tune", []).append(((text, options), {}))
        (options.out / "policy.json").write_text("{}")
        chosen = {"density": 0.2, "ratio": 1.004}
        found = dict(chosen=chosen, best_uniform_density=0.3, sparse_from=512, crossover=(), tokens=256, policy=POLICY)
        return Result(**found, ended="done", verdict="sparse", why="20% keep perplexity")

    def write_report(run_dir):
        (run_dir / "report.html").write_text("<html>")
        return run_dir / "report.html"

    analysis = Analysis(tokens=256)
    stand_in(monkeypatch, "analyze.run", analyze=call("analyze", analysis))
    stand_in(monkeypatch, "analyze.bertviz_view", write_bertviz=call("bertviz", None))
    stand_in(monkeypatch, "tune.run", tune=tune, default_block_size=lambda model: 32)
    stand_in(monkeypatch, "validate.run", **CHECKED, validate=call("validate", Validation(passed=True)))
    stand_in(monkeypatch, "report.run", write_report=write_report, FILES={"policy": "policy.json"})
    stand_in(monkeypatch, "bench", run_bench=call("bench", {"rows": []}))
    return calls
