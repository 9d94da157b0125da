# SPDX-License-Identifier: Apache-2.0
"""An unproven Triton is tried once against the oracle, in another process, and used or refused with the reason."""

import json
import logging
from dataclasses import replace

import pytest
import torch

from dynaxx.kernels import trials
from dynaxx.kernels.attention.contract import AttentionProblem
from dynaxx.kernels.registry import ATTENTION, QUERY_SCORES
from dynaxx.kernels.selection.contract import QueryScoresProblem
from dynaxx.kernels.trials import INSIDE, LAUNCHES
from dynaxx.lab.doctor.trial import reason_against
from dynaxx.trained.registry import INDEXER, NSA, TOKENS
from dynaxx.trained.support.hopper import token_reasons
from dynaxx.trained.testing.trial import tokens
from dynaxx.trained.tokens.kernels.contract import IndexerProblem
from interpreter import on_hopper

CUDA = torch.device("cuda", 0)
PROBLEM = AttentionProblem(CUDA, torch.bfloat16, 1, 512, 512, 8, 2, 128, 128, (128, 128), False)
LATENT = replace(PROBLEM, needs_grad=True, q_heads=128, kv_heads=1, head_dim=576, head_dim_v=512, block_size=(1, 1))
KIND = ("attention", "hopper", ("bfloat16", 128, 128, (128, 128), 4, False, False))


@pytest.fixture
def unproven(monkeypatch, tmp_path):
    """Make the installed Triton one that nobody proved; verdicts go to a folder of the test's own."""
    monkeypatch.setattr(trials, "PROVEN", ())
    monkeypatch.delenv(INSIDE, raising=False)
    monkeypatch.setenv("DYNAXX_CACHE", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache" / "trials"
    monkeypatch.undo()
    forget()


def forget():
    trials.is_proven.cache_clear()
    trials.verdict.cache_clear()


@pytest.fixture
def worker(unproven, monkeypatch, tmp_path):
    """Replace the process of a trial; return a function that sets what it runs."""
    stand_in = trials.TRIED["attention"]._replace(worker="stand_in_worker")
    monkeypatch.setitem(trials.TRIED, "attention", stand_in)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H300")
    monkeypatch.syspath_prepend(str(tmp_path))
    count = tmp_path / "runs"

    def runs(code):
        header = f"import json, os, sys, time\nopen({str(count)!r}, 'a').write(sys.argv[1] + chr(10))\n"
        (tmp_path / "stand_in_worker.py").write_text(header + code)
        return lambda: len(count.read_text().splitlines()) if count.exists() else 0

    return runs


def test_proven_versions_are_not_tried(worker, monkeypatch):
    count = worker("print(json.dumps({'reason': 'never asked'}))")
    release = ".".join(trials.triton_version().split(".")[:2])
    monkeypatch.setattr(trials, "PROVEN", (release,))
    forget()
    assert trials.reasons("attention", "hopper", PROBLEM) == []
    assert trials.launches_directly()
    assert count() == 0


def test_a_kind_that_passes_is_tried_once_and_used(worker, unproven, caplog):
    count = worker("print('noise'); print(json.dumps({'reason': ''}))")
    with caplog.at_level(logging.WARNING, "dynaxx"):
        for _ in range(3):
            assert trials.reasons("attention", "hopper", PROBLEM) == []
    assert count() == 1
    (line,) = caplog.messages
    assert "not a proven version" in line
    assert "head_dim 128" in line
    assert line.endswith("and are used")
    trials.verdict.cache_clear()  # another process reads the verdict from the disk
    assert trials.reasons("attention", "hopper", PROBLEM) == []
    assert count() == 1
    assert trials.reasons("attention", "hopper", replace(PROBLEM, head_dim=64)) == []
    assert trials.reasons("attention", "hopper", replace(PROBLEM, needs_grad=True)) == []
    assert count() == 3
    assert len([*unproven.glob("*/*.json")]) == 3


def test_a_kind_that_fails_is_refused_with_the_reason(worker):
    count = worker("print(json.dumps({'reason': 'it disagrees with the oracle: out: error 3'}))")
    (reason,) = trials.reasons("attention", "hopper", PROBLEM)
    assert "is not a proven version, and it disagrees with the oracle: out: error 3" in reason
    assert count() == 1
    assert not trials.launches_directly()  # on a GPU by a trial of its own
    tried = count()
    trials.verdict.cache_clear()
    assert trials.reasons("attention", "hopper", PROBLEM) == [reason]
    assert count() == tried


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("sys.exit('no room left')", "ended with: no room left"),
        ("os.kill(os.getpid(), 11)", "ended with: exit code -11"),
        ("print('[1]')", "ended with: exit code 0"),
        ("time.sleep(600)", "did not end within 3 s"),
        ("sys.exit('torch.AcceleratorError: CUDA error: out of memory\\nCompile with `X`')", "had no memory left"),
    ],
)
def test_trials_that_end_without_a_verdict_refuse_for_this_process(worker, unproven, monkeypatch, code, said):
    monkeypatch.setattr(trials, "MAX_SECONDS", 3.0 if "sleep" in code else 60.0)
    count = worker(code)
    for _ in range(2):
        (reason,) = trials.reasons("attention", "hopper", PROBLEM)
        assert said in reason
    assert count() == 1  # once in this process
    assert not [*unproven.glob("*/*.json")]


@pytest.mark.parametrize("content", ["", "[]", '{"reason": 1, "kind": []}', '{"reason": ""}', "[" * 100000])
def test_stored_verdicts_that_are_no_verdicts_are_replaced(worker, unproven, content):
    count = worker("print(json.dumps({'reason': ''}))")
    trials.reasons("attention", "hopper", PROBLEM)
    (path,) = unproven.glob("*/*.json")
    whole = path.read_text()
    path.write_text(content)
    trials.verdict.cache_clear()
    assert trials.reasons("attention", "hopper", PROBLEM) == []
    assert count() == 2
    assert path.read_text() == whole


def test_versions_and_source_are_part_of_the_place(worker, unproven, monkeypatch):
    worker("print(json.dumps({'reason': ''}))")
    trials.reasons("attention", "hopper", PROBLEM)
    (folder,) = unproven.iterdir()
    assert folder.name.startswith(f"NVIDIA-H300-triton{trials.triton_version()}-torch{torch.__version__}".split("+")[0])
    monkeypatch.setattr(trials, "triton_version", lambda: "3.99.0")
    trials.verdict.cache_clear()
    trials.reasons("attention", "hopper", PROBLEM)
    assert len([*unproven.iterdir()]) == 2


def test_what_is_not_tried(worker):
    count = worker("print(json.dumps({'reason': 'no'}))")
    assert trials.reasons("selection", "triton", PROBLEM) == []
    assert trials.reasons("attention", "cpu", PROBLEM) == []
    assert trials.reasons("attention", "hopper", replace(PROBLEM, device=torch.device("cpu"))) == []
    assert count() == 0


def test_the_registry_asks(worker, monkeypatch):
    worker("print(json.dumps({'reason': 'it disagrees with the oracle'}))")
    monkeypatch.setattr("dynaxx.kernels.support.hopper.device_reasons", lambda device: [])
    assert "disagrees" in ATTENTION.reasons("hopper", PROBLEM)[0]
    explained = ATTENTION.explain(PROBLEM)
    assert "disagrees" in explained["hopper"][0]
    assert explained["reference"] == []


def test_a_trial_takes_the_fields_of_its_problem(worker, tmp_path):
    worker("print(json.dumps({'reason': ''}))")
    trials.reasons("attention", "hopper", replace(PROBLEM, softcap=3.5))
    (given,) = (tmp_path / "runs").read_text().splitlines()
    assert json.loads(given) == ["attention", "hopper", ["bfloat16", 128, 128, [128, 128], 4, True, False], 0]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(""), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")], ids=str)
def test_full_memory_is_no_finding_about_kernels(error):
    def trial(*_, **__):
        raise error

    with pytest.raises(type(error)):
        reason_against({"attention": trial}, *KIND, 0)


@pytest.mark.parametrize("dims", [(128, 128), (576, 512)], ids=str)
def test_the_trial_of_tokens_draws_what_the_kernels_serve(monkeypatch, dims):
    """The reference takes the place of Hopper's kernels, and sees the problems that they would see."""
    asked = []
    serving = lambda problem, backend: asked.append(problem) or "reference"
    monkeypatch.setattr("dynaxx.trained.tokens.attention._serving", serving)
    monkeypatch.setattr("dynaxx.trained.support.hopper.unsupported_reasons", lambda problem: [])
    of = {"head_dim": dims[0], "head_dim_v": dims[1], "group_size": 8, "needs_grad": False}
    reports = tokens(torch.device("cpu"), "hopper", torch.bfloat16, **of)
    assert [str(report) for report in reports if not report.ok] == []
    assert asked
    assert [reason for problem in asked for reason in token_reasons(problem) if problem.dtype != torch.float64] == []


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    ("operation", "problem"),
    [
        (ATTENTION, replace(PROBLEM, needs_grad=True)),
        (NSA, replace(PROBLEM, needs_grad=True, q_heads=32, block_size=(1, 64))),
        (TOKENS, replace(PROBLEM, needs_grad=True, block_size=(1, 1))),
        (TOKENS, LATENT),
        (INDEXER, IndexerProblem(CUDA, torch.bfloat16, 4096, 4, 64, 1, 100)),
        (QUERY_SCORES, QueryScoresProblem(CUDA, torch.bfloat16, 128, 128, True)),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_the_kernels_of_this_gpu_pass_their_trials(unproven, operation, problem):
    assert operation.reasons("hopper", problem) == []
    assert len([*unproven.glob("*/*.json")]) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_launchers_of_this_gpu_pass_their_trial(unproven):
    assert trials.verdict(LAUNCHES, 0) == ""
