# SPDX-License-Identifier: Apache-2.0
"""Time the prefill of one model in every engine that a CPU user could pick, dense and sparse, in turns.

    rows: transformers | torch at its best | OpenVINO | ONNX Runtime | llama.cpp,  dense, exact or by the policy
    for each length and precision: every row once per round; all in one process; the median of the rounds

A row is checked before it is timed: its last logits against those of transformers, dense or under the same policy.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from benchmarks.cpu_engines.engines import EngineRow, Given, NotHereError, Precision, Prefill
from benchmarks.cpu_engines.libraries import facts_of_torch, libraries_of_torch
from benchmarks.cpu_engines.llama_rows import llama_rows
from benchmarks.cpu_engines.onnx_rows import onnx_rows
from benchmarks.cpu_engines.openvino_rows import openvino_rows
from benchmarks.cpu_engines.torch_rows import torch_rows
from benchmarks.suites.rows import Report, rows_named
from benchmarks.targets import Target
from torch import Tensor

from dynaxx.integrations.transformers import apply, model_facts
from dynaxx.lab.machine import load_average
from dynaxx.lab.models import PACKAGES, load_model
from dynaxx.lab.texts import load_text
from dynaxx.policy import Policy, Rule, load_policy, to_spec
from dynaxx.selection import TopK

LENGTHS = (512, 1024, 2048, 4096, 8192)
QUICK_LENGTHS = (512, 2048)
CHECKED = 512  # tokens of the check; with a policy, all of them sparse
DENSITY = 0.3  # of the policy where none is given: the density that the demo's tuned policy has at 4,096 tokens
BORDER = 1024  # keys from which that policy is sparse
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Largest difference of logits over the largest logit. llama.cpp keeps its cache in fp16.
TOLERANCES: dict[Precision, float] = {"fp32": 2e-3, "bf16": 0.1, "int8": 0.1}
LLAMA_TOLERANCE = 2e-2
LONG_ROUND = 30.0  # seconds; a longer round runs twice
WARMED = 2048  # tokens up to which a first run, which is slower, is left out

Turn = Callable[[], AbstractContextManager[Any]]
Known = dict[bool, tuple[Tensor, Tensor]]


def run_suite(
    model: str = "smollm2",
    *,
    policy: str | Path | None = None,
    lengths: Sequence[int] = (),
    quick: bool = False,
    threads: int | None = None,
    only: Sequence[str] = (),
    rounds: int = 3,
    work: str | Path | None = None,
    turn: Turn = nullcontext,
    progress: Report | None = None,
) -> dict[str, Any]:
    """Time whole prefills, in fp32, in bf16 where the processor multiplies bf16, and with 8-bit weights.

    Args:
        model: a name or path as `load_model` takes.
        policy: a policy file; by default all heads keep 30 % of their blocks of 32, from 1,024 tokens on.
        lengths: prompt lengths, ascending.
        quick: two lengths.
        threads: of every engine, default what torch has.
        only: rows whose names start so, such as "fp32" or "bf16 OpenVINO".
        rounds: of which the median counts; rounds of more than 30 seconds run twice.
        work: a folder that keeps converted models for the next time.
        turn: entered around each round, for example to wait until a shared machine is quiet.
        progress: receives lines of text.

    Returns:
        "rows" (one per engine, attention, precision and length: seconds, cpu_seconds, tokens_per_second), "table"
        (the same, a column per length: seconds, on one thread those of CPU time), "missing"
        (rows that could not run, with the reason), "libraries" and "torch" (what computes torch's products), "policy",
        "threads", "load" and "targets".

    Raises:
        RuntimeError: a row is wrong; then it has no time.
        ValueError: `only` names nothing, or the policy is for another model.
    """
    say = progress or (lambda line: None)
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(work or temporary)
            folder.mkdir(parents=True, exist_ok=True)
            wanted = _wanted(only)
            given, prompt = _given(model, policy, folder, wanted)
            for line in libraries_of_torch():
                say(f"torch, {line['operation']}: {line['library']} {line['onednn_kernel']}")
            ready, missing = _ready(wanted, given, prompt, say)
            chosen = tuple(lengths) or (QUICK_LENGTHS if quick else LENGTHS)
            rows = [row for seqlen in chosen for row in _time(ready, prompt, seqlen, rounds, turn, say)]
    finally:
        torch.set_num_threads(before)
    figure = figure_of(threads or before)
    targets = targets_of(rows, figure)
    for target in targets:
        say(str(target))
    return {
        "model": model,
        "policy": "30 % of the blocks, all heads" if policy is None else str(policy),
        "threads": threads or before,
        "load": load_average(),
        "torch": facts_of_torch(),
        "libraries": libraries_of_torch(),
        "rows": rows,
        "table": table_of(rows, figure),
        "missing": missing,
        "targets": [target.as_dict() for target in targets],
    }


def precisions() -> list[Precision]:
    """Return what this processor computes fast: bf16 only where it multiplies it."""
    facts = facts_of_torch()
    return ["fp32", "bf16"] if facts["avx512_bf16"] or facts["amx"] else ["fp32"]


def _wanted(only: Sequence[str]) -> dict[str, EngineRow]:
    rows: list[EngineRow] = []
    for precision in precisions():
        rows += [*torch_rows(precision), *openvino_rows(precision), *onnx_rows(precision), *llama_rows(precision)]
    rows += llama_rows("int8")
    named = {f"{row.precision} {row.name}": row for row in rows}
    return {name: named[name] for name in (rows_named("only", only, list(named)) if only else named)}


def _given(model: str, policy: str | Path | None, folder: Path, wanted: dict[str, EngineRow]) -> tuple[Given, Tensor]:
    needed = {"fp32", *(row.precision for row in wanted.values())}
    loaded = {name: load_model(model, dtype=dtype) for name, dtype in DTYPES.items() if name in needed}
    facts = model_facts(loaded["fp32"].model)
    if policy is None:
        rules = (Rule(layers="all", heads="all", attention=to_spec(TopK(DENSITY))),)
        chosen = Policy(model=facts, block_size=32, dense_below=BORDER, rules=rules)
    else:
        chosen = load_policy(policy)
    ids = loaded["fp32"].tokenizer(load_text("pydoc"), return_tensors="pt").input_ids[:, : max(LENGTHS)]
    models = {name: each.model for name, each in loaded.items()}
    return Given(models, _source(model), chosen, folder, torch.get_num_threads()), ids


def _source(model: str) -> Path | None:
    """Return the GGUF file of a model that comes from one."""
    if Path(model).suffix == ".gguf":
        return Path(model)
    import importlib.util

    entry = PACKAGES.get(model)
    spec = importlib.util.find_spec(entry.module) if entry is not None and entry.file else None
    if entry is None or spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / entry.file


def _ready(
    wanted: dict[str, EngineRow], given: Given, prompt: Tensor, say: Report
) -> tuple[list[tuple[EngineRow, Prefill]], list[dict[str, Any]]]:
    """Make each engine and check it; also say which are not here."""
    ready: list[tuple[EngineRow, Prefill]] = []
    missing = []
    known: Known = {}
    for name, row in wanted.items():
        try:
            run = row.make(given)
        except NotHereError as missed:
            say(f"{name}: {missed}")
            missing.append({"row": name, "why": str(missed)})
            continue
        error = check(row, run, given, prompt, known)
        say(f"{name}: ready, logits within {error:.1e} of transformers'")
        ready.append((row, run))
    return ready, missing


def check(row: EngineRow, run: Prefill, given: Given, prompt: Tensor, known: Known) -> float:
    """Compare a row's last logits with transformers', dense or under the policy; return the relative difference.

    Args:
        row: what was asked for.
        run: its prefill.
        given: what it was made from.
        prompt: (1, seqlen) of which the first tokens are used.
        known: what transformers found before, by whether it ran under the policy; filled here.

    Raises:
        RuntimeError: it is above what the precision explains.
    """
    ids, expected = _expected(row.attention == "policy", given, prompt, known)
    error = float((run(ids) - expected).abs().max() / expected.abs().max())
    limit = LLAMA_TOLERANCE if row.engine == "llama.cpp" and row.precision == "fp32" else TOLERANCES[row.precision]
    if not error <= limit:
        raise RuntimeError(
            f"no times: {row.precision} {row.name} differs by {error:.2g} of the largest logit, allowed {limit:g}"
        )
    return error


def _expected(by_policy: bool, given: Given, prompt: Tensor, known: Known) -> tuple[Tensor, Tensor]:
    """Return the prompt of the check and the last logits that transformers computes for it, in fp32."""
    if by_policy not in known:
        sparse_from = given.policy.border if by_policy else 0
        ids, model = prompt[:, : max(CHECKED, sparse_from)], given.models["fp32"]
        with torch.inference_mode(), apply(model, given.policy) if by_policy else nullcontext():
            known[by_policy] = ids, model(ids, logits_to_keep=1).logits[0, -1].float()
    return known[by_policy]


def _time(
    ready: list[tuple[EngineRow, Prefill]], prompt: Tensor, seqlen: int, rounds: int, turn: Turn, say: Report
) -> list[dict[str, Any]]:
    """Time the rows of each precision in turns."""
    if seqlen > prompt.shape[1]:
        raise ValueError(f"`lengths` must be at most {prompt.shape[1]}, the tokens of the text, got {seqlen}")
    ids = prompt[:, :seqlen].contiguous()
    walls: dict[str, list[float]] = {}
    cpus: dict[str, list[float]] = {}
    for precision in dict.fromkeys(row.precision for row, _ in ready):
        group = [(f"{row.precision} {row.name}", run) for row, run in ready if row.precision == precision]
        for number in range(rounds):
            with turn():
                started = time.perf_counter()
                for name, run in group:
                    if number == 0 and seqlen <= WARMED:
                        run(ids)
                    begin, spent = time.perf_counter(), time.process_time()
                    run(ids)
                    walls.setdefault(name, []).append(time.perf_counter() - begin)
                    cpus.setdefault(name, []).append(time.process_time() - spent)
                took = time.perf_counter() - started
            if took > LONG_ROUND and number == 1:
                break
    found = []
    for row, _ in ready:
        wall, cpu = walls[f"{row.precision} {row.name}"], cpus[f"{row.precision} {row.name}"]
        found.append(
            {
                "precision": row.precision,
                "engine": row.engine,
                "attention": row.attention,
                "weights": row.weights or row.precision,
                "seqlen": seqlen,
                "seconds": median(wall),
                "cpu_seconds": median(cpu),
                "best_seconds": min(wall),
                "tokens_per_second": seqlen / median(wall),
                "rounds": len(wall),
                "load": load_average(),
            }
        )
        say(f"{seqlen:>6} {row.precision} {row.name:<28} {median(wall):7.2f} s, CPU {median(cpu):7.2f} s")
    return found


def figure_of(threads: int) -> str:
    """Return which figure counts: on one thread CPU time, which other work on the machine disturbs least."""
    return "cpu_seconds" if threads == 1 else "seconds"


def table_of(rows: list[dict[str, Any]], figure: str) -> list[dict[str, Any]]:
    """Return one row per engine, attention and precision, with a column per length."""
    lengths = sorted({row["seqlen"] for row in rows})
    table: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    for row in rows:
        key = (row["precision"], row["engine"], row["attention"], row["weights"])
        names = {"precision": row["precision"], "engine": row["engine"], "attention": row["attention"]}
        if row["weights"] != row["precision"]:
            names["engine"] += f", {row['weights']}"
        empty = dict.fromkeys(f"{seqlen:,} tokens" for seqlen in lengths)
        table.setdefault(key, {**names, **empty})[f"{row['seqlen']:,} tokens"] = row[figure]
    return list(table.values())


def targets_of(rows: list[dict[str, Any]], figure: str = "seconds") -> list[Target]:
    """Hold dynaxx's best row of each precision against the best dense engine."""
    targets = []
    for precision in ("fp32", "bf16"):
        for seqlen in sorted({row["seqlen"] for row in rows}):
            here = [row for row in rows if row["precision"] == precision and row["seqlen"] == seqlen]
            dense = [row[figure] for row in here if row["attention"] == "dense"]
            ours = [row[figure] for row in here if row["attention"] != "dense"]
            target = 1.6 if seqlen >= 8192 else 1.1 if seqlen >= 2048 else 1.0
            if dense and ours:
                where = f"{precision}, {seqlen} tokens"
                targets.append(Target("times faster than the best dense engine", target, min(dense) / min(ours), where))
    return targets
