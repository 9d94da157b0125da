"""`dynaxx tune` as one command: profile, analyze, tune, validate, report, into one folder.

Steps that were done before, with the same settings, are not done again; a kill loses the step under way at most, and
`tune` itself continues within it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynaxx.lab.files import read_json, write_json
from dynaxx.lab.machine import machine_facts
from dynaxx.lab.profile import default_lengths, profile
from dynaxx.lab.progress import Progress, SilentProgress
from dynaxx.lab.texts import check_tokens, split_text

SHARES = {"profile": 10, "analyze": 10, "tune": 60, "validate": 19, "report": 1}  # of the time, about


@dataclass(frozen=True)
class Plan:
    """What to do to a model, and where its results go."""

    name: str
    out: Path
    tolerance: float = 0.01  # perplexity may rise by this share
    tokens: int = 4096
    time_budget: float | None = None  # seconds for tuning
    lengths: tuple[int, ...] = ()  # to profile and validate at; empty takes defaults
    block_size: int | None = None  # None takes what suits the device
    price_per_hour: float | None = None
    seed: int = 0
    command: str = "dynaxx tune"  # how to get these results again; kept as evidence
    resume: bool = True
    decode: bool = False  # look for decode rules, too
    cuda_graph: bool = False  # these decide by captured steps
    skip: frozenset[str] = frozenset()  # of "profile", "analyze", "reference", "validate", "report"


@dataclass(frozen=True)
class PipelineResult:
    """The documents that were made or found, by step."""

    profile: dict[str, Any] | None
    analysis: dict[str, Any] | None
    tuning: dict[str, Any]
    validation: dict[str, Any] | None
    validation_summary: str  # its checks, or why there was none; empty where none was wanted or nothing is sparse
    files: tuple[Path, ...]

    @property
    def ok(self) -> bool:
        """Whether the policy passed its validation, or none was wanted."""
        return not self.validation_summary if self.validation is None else bool(self.validation["passed"])

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "profile": self.profile,
            "analysis": self.analysis,
            "tuning": self.tuning,
            "validation": self.validation,
            "files": [str(file) for file in self.files],
        }

    def summary(self) -> str:
        """What the command prints."""
        lines = [self.profile["verdict"]] if self.profile else []
        chosen, uniform = self.tuning.get("chosen"), self.tuning.get("best_uniform_density")
        border = self.tuning.get("dense_below")
        if chosen:
            lines.append(
                f"tuned: {chosen['density']:.1%} of the blocks, perplexity {chosen['ratio'] - 1:+.2%}; "
                + (f"one budget for all heads needs {uniform:.1%}" if uniform else "no one budget for all heads passes")
            )
            if border is None:
                longest = max((timing["seqlen"] for timing in self.tuning.get("crossover") or ()), default=0)
                lines.append(f"sparse was not faster here at any length up to {longest:,} tokens; prompts run dense")
            else:
                start = self.tuning.get("sparse_from") or border
                lines.append(f"sparse is faster here: prompts run sparse from {start:,} tokens, shorter ones dense")
            for raised in self.tuning.get("raised", ())[-1:]:
                lines.append(
                    f"that is later than attention alone would say ({self.tuning['raised'][0]['before']:,}): the whole "
                    f"prefill of {raised['seqlen']:,} tokens took {1e3 * raised['sparse_seconds']:.3g} ms, dense "
                    f"{1e3 * raised['dense_seconds']:.3g}"
                )
        else:
            lines.append("tuned: nothing sparse stays within the tolerance; the policy is dense")
        if self.tuning.get("decode"):
            lines.append(f"decoding: {self.tuning['decode']['said']}")
        if self.tuning.get("reference"):
            lines.append(f"reference for drift: {self.tuning['reference']}")
        if self.validation is not None:
            lines.append("the policy passes its validation:" if self.ok else "the policy FAILS its validation:")
        elif self.validation_summary:
            lines.append("the policy could not be validated:")
        lines += [self.validation_summary] if self.validation_summary else []
        policy = next((file for file in self.files if file.name == "policy.json"), None)
        if self.ok and border is not None and policy is not None:
            lines.append(f'run it: dynaxx.apply(model, dynaxx.load_policy("{policy}"))')
        return "\n".join(lines)


def run(model: Any, tokenizer: Any, text: str, plan: Plan, *, progress: Progress | None = None) -> PipelineResult:
    """Do every step of `plan` that is not skipped or done; write each result as it is there.

    Raises:
        ValueError: settings or a text that a step refuses.
    """
    from dynaxx.lab.analyze import analyze
    from dynaxx.lab.later import validate_tuned
    from dynaxx.lab.report import write_report
    from dynaxx.lab.tune import calibration_ids, default_block_size, tune
    from dynaxx.lab.tune_decode import check_cuda_graph

    progress = progress or SilentProgress()
    lengths = plan.lengths or default_lengths(model)
    block_size = plan.block_size or default_block_size(model)
    check_tokens(model, plan.tokens, block_size)  # what cannot be tuned on is refused now, not after the profile
    calibration_ids(tokenizer, text, plan.tokens)
    check_cuda_graph(model, plan.decode, plan.cuda_graph)
    known = _begin(model, text, plan, lengths)
    files: list[Path] = []

    def step(name: str, file: str, make: Callable[[], Any]) -> dict[str, Any] | None:
        """Take a step's document from its file if an earlier run with these settings wrote it, else make it."""
        if name in plan.skip:
            return None
        path = plan.out / file
        files.append(path)
        if known and path.exists():
            earlier: dict[str, Any] = read_json(path)
            return earlier
        document: dict[str, Any] = {**make().to_dict(), "command": plan.command}
        write_json(path, document)
        return document

    with progress.task(f"Tuning {plan.name}", sum(SHARES.values())) as task:
        task.advance(0, "profile: where the time goes")
        profiled = step(
            "profile",
            "profile.json",
            lambda: profile(
                model,
                tokenizer,
                text,
                lengths=lengths,
                name=plan.name,
                price_per_hour=plan.price_per_hour,
                progress=progress,
            ),
        )
        task.advance(SHARES["profile"], "analyze: where the heads attend")
        analyzed = step(
            "analyze",
            "analysis.json",
            lambda: analyze(
                model,
                tokenizer,
                split_text(text).calibration,
                tokens=plan.tokens,
                block_size=block_size,
                seed=plan.seed,
                progress=progress,
            ),
        )
        task.advance(SHARES["analyze"], "tune: the sparsest that keeps quality")
        tuned = tune(
            model,
            tokenizer,
            text,
            out=plan.out,
            tolerance=plan.tolerance,
            tokens=plan.tokens,
            time_budget=plan.time_budget,
            block_size=block_size,
            seed=plan.seed,
            resume=plan.resume,
            with_decode=plan.decode,
            cuda_graph=plan.cuda_graph,
            with_reference="reference" not in plan.skip,
            progress=progress,
            command=plan.command,
            name=plan.name,
        )
        files += [plan.out / "tuning.json", plan.out / "policy.json"]
        task.advance(SHARES["tune"], "validate: on text it has not seen")
        validated, said = None, ""
        if "validate" not in plan.skip and _has_rules(tuned.to_dict()):
            try:
                tuned, found = validate_tuned(
                    model,
                    tokenizer,
                    tuned,
                    text,
                    out=plan.out,
                    say=lambda line: task.advance(0, line),
                    lengths=lengths,
                    seed=plan.seed,
                    progress=progress,
                )
                validated, said = {**found.to_dict(), "command": plan.command}, found.summary()
                files.append(write_json(plan.out / "validation.json", validated))
            except ValueError as error:  # the policy and the report are worth having all the same
                said = str(error)
        task.advance(SHARES["validate"], "report")
        if "report" not in plan.skip:
            files.append(write_report(plan.out))
        task.advance(SHARES["report"], "done")
    return PipelineResult(profiled, analyzed, tuned.to_dict(), validated, said, tuple(files))


def _has_rules(tuning: dict[str, Any]) -> bool:
    """Whether tuning found something that keeps quality and pays, for prompts or for decoding."""
    prompts = tuning.get("chosen") and tuning.get("dense_below") is not None
    return bool(prompts) or (tuning.get("decode") or {}).get("dense_below") is not None


def _begin(model: Any, text: str, plan: Plan, lengths: tuple[int, ...]) -> bool:
    """Whether the folder holds a run of exactly these settings to go on with; if not, begin one.

    `tune` keeps its own state in the folder and checks it itself.
    """
    settings = {
        "model": plan.name,
        "parameters": sum(tensor.numel() for tensor in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "tokens": plan.tokens,
        "lengths": list(lengths),
        "block_size": plan.block_size,
        "price_per_hour": plan.price_per_hour,
        "seed": plan.seed,
        "versions": machine_facts().versions,
    }
    path = plan.out / "run.json"
    if plan.resume and path.exists() and read_json(path) == settings:
        return True
    for stale in ("profile.json", "analysis.json", "validation.json", "report.html"):
        (plan.out / stale).unlink(missing_ok=True)
    write_json(path, settings)
    return False
