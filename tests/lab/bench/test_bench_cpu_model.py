# SPDX-License-Identifier: Apache-2.0
"""The suite of whole models checks rows before it times them, and names engines that are not installed."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

import dynaxx as dx
from dynaxx.integrations.transformers import model_facts
from dynaxx.lab.bench.cpu_model import run as suite
from dynaxx.lab.bench.cpu_model.engines import EngineRow, Given, NotHereError, Prefill, prefill_of
from dynaxx.lab.bench.cpu_model.libraries import facts_of_torch, libraries_of_torch
from dynaxx.lab.bench.cpu_model.llama_rows import llama_rows
from dynaxx.lab.bench.cpu_model.openvino_rows import openvino_rows
from dynaxx.lab.bench.cpu_model.torch_rows import torch_rows

Rows = Callable[[str], list[EngineRow]]
transformers = pytest.importorskip("transformers")


@pytest.fixture
def given(tmp_path: Path) -> Given:
    config = transformers.LlamaConfig(
        vocab_size=90,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    rules = (dx.Rule.of(dx.SlidingWindow(64) | dx.TopK(0.2)),)
    policy = dx.Policy(model=model_facts(model), block_size=32, rules=rules)
    return Given({"fp32": model}, None, policy, tmp_path, torch.get_num_threads())


PROMPT = torch.arange(600)[None] % 90


def test_rows_are_checked_and_timed(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: None)  # a compiler is not what is tested
    wanted = {f"{row.precision} {row.name}": row for row in torch_rows("fp32")}
    said: list[str] = []
    ready, missing = suite._ready(wanted, given, PROMPT, said.append)
    assert not missing
    assert len(ready) == 5
    turns: list[int] = []

    def turn() -> nullcontext[None]:
        turns.append(1)
        return nullcontext()

    rows = suite._time(ready, PROMPT, 300, 3, turn, said.append)
    assert len(turns) == 3
    assert [row["attention"] for row in rows] == ["dense", "policy", "dense", "exact", "policy"]
    assert all(row["seconds"] > 0 and row["cpu_seconds"] > 0 and row["rounds"] == 3 for row in rows)
    table = suite.table_of(rows, suite.figure_of(1))
    assert [row["300 tokens"] for row in table] == [row["cpu_seconds"] for row in rows]
    targets = suite.targets_of(rows)
    assert [target.workload for target in targets] == ["fp32, 300 tokens"]
    with pytest.raises(ValueError, match="at most 600"):
        suite._time(ready, PROMPT, 601, 1, nullcontext, said.append)


def test_models_share_weights_and_nothing_else(given: Given) -> None:
    first, second = given.model("fp32"), given.model("fp32")
    assert first.lm_head.weight is second.lm_head.weight
    with dx.apply(first, given.policy):
        assert second.config._attn_implementation == "sdpa"


def test_a_wrong_row_gets_no_time(given: Given) -> None:
    def wrong(given: Given) -> Prefill:
        right = prefill_of(given.model("fp32"))
        return lambda ids: right(ids) * 1.01

    row = EngineRow("broken", "dense", "fp32", wrong)
    with pytest.raises(RuntimeError, match="no times: fp32 broken, dense differs by"):
        suite._ready({"fp32 broken": row}, given, PROMPT, lambda line: None)


def test_missing_engines_are_named(given: Given) -> None:
    def absent(given: Given) -> Prefill:
        raise NotHereError("not installed: pip install it")

    said: list[str] = []
    _, missing = suite._ready({"fp32 absent": EngineRow("absent", "dense", "fp32", absent)}, given, PROMPT, said.append)
    assert missing == [{"row": "fp32 absent", "why": "not installed: pip install it"}]
    assert said == ["fp32 absent: not installed: pip install it"]


@pytest.mark.parametrize("rows", [openvino_rows, llama_rows])
def test_engines_that_are_not_here(
    given: Given, rows: Callable[[str], list[EngineRow]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("openvino", "llama_cpp"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    for row in rows("fp32"):
        with pytest.raises(NotHereError, match="not installed: pip install"):
            row.make(given)


def test_bars_hold_the_best_of_each_side() -> None:
    def row(attention: str, seconds: float, seqlen: int = 8192) -> dict[str, object]:
        return {"precision": "fp32", "attention": attention, "seqlen": seqlen, "seconds": seconds}

    rows = [row("dense", 4.0), row("dense", 3.0), row("exact", 2.5), row("policy", 1.5), row("dense", 1.0, 512)]
    (target,) = suite.targets_of(rows)
    assert (target.target, target.value, target.ok) == (1.6, 2.0, True)


def test_only_names_rows() -> None:
    assert all(name.startswith("fp32 OpenVINO") for name in suite._wanted(["fp32 OpenVINO"]))
    with pytest.raises(ValueError, match="`only` must name some of"):
        suite._wanted(["fp64"])


@pytest.mark.slow
def test_torch_says_which_library_ran() -> None:
    found = libraries_of_torch()
    assert [row["operation"] for row in found][:2] == ["linear float32", "sdpa float32"]
    assert all(row["library"] for row in found)
    assert facts_of_torch()["capability"]
    assert isinstance(torch.zeros(1), Tensor)
