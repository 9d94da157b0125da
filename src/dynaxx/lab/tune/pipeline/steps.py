# SPDX-License-Identifier: Apache-2.0
"""`dynaxx tune` as one command: profile, analyze, tune, validate, report, into one folder.

Steps that were completed with the same settings are not repeated. A killed run loses at most the current step, and
`tune` continues within its step.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dynaxx.lab.files import read_json, write_json
from dynaxx.lab.kinds import kinds_of, text_of
from dynaxx.lab.machine import machine_facts
from dynaxx.lab.profile.run import default_lengths
from dynaxx.lab.progress import Progress, SilentProgress
from dynaxx.lab.texts import check_tokens, split_text
from dynaxx.lab.tune.costs import scorers_named
from dynaxx.lab.tune.options import TuneOptions
from dynaxx.lab.tune.pipeline.result import PipelineResult
from dynaxx.layout import as_block_size

if TYPE_CHECKING:
    from dynaxx.lab.tune.result import TuneResult

logger = logging.getLogger("dynaxx")

Result = TypeVar("Result")
SHARES = {"profile": 10, "analyze": 10, "tune": 60, "validate": 19, "report": 1}  # approximate shares of the time


@dataclass(frozen=True)
class TuneSettings(TuneOptions):
    """The options of all steps of a tuning run: those of `tune`, and what the other steps need."""

    lengths: tuple[int, ...] = ()  # lengths to profile and validate at; empty takes defaults
    price_per_hour: float | None = None
    skip: frozenset[str] = frozenset()  # any of "profile", "analyze", "reference", "validate", "report"


def run(
    model: Any,
    tokenizer: Any,
    text: str,
    plan: TuneSettings,
    *,
    progress: Progress | None = None,
    say_verdict: Callable[[str], object] = lambda line: None,
) -> PipelineResult:
    """Run every step of `plan` that is neither skipped nor done, and write each result at once.

    `say_verdict` is called with the verdict of the profile: whether sparse attention can be worth it, and by how much.

    Raises:
        ValueError: a step refuses the settings or the text.
    """
    steps, clock = _Steps(model, tokenizer, text, plan, progress or SilentProgress()), StepClock()
    with steps.progress.task(f"Tuning {plan.name}", sum(SHARES.values())) as task:
        task.advance(0, "profile: where the time goes")
        profiled = clock.timed("profile", steps.profile)
        if profiled is not None:
            say_verdict(profiled["verdict"])
        task.advance(SHARES["profile"], "analyze: where the heads attend")
        analyzed = clock.timed("analyze", steps.analyze)
        task.advance(SHARES["analyze"], "tune: the sparsest policy that keeps quality")
        tuned = clock.timed("tune", steps.tune)
        task.advance(SHARES["tune"], "validate: on held-out text")
        say = lambda line: task.advance(0, line)
        tuned, validated, said = clock.timed("validate", lambda: steps.validate(tuned, say=say))
        task.advance(SHARES["validate"], "report")
        clock.timed("report", steps.report)
        task.advance(SHARES["report"], "done")
    return PipelineResult(profiled, analyzed, tuned.to_dict(), validated, said, tuple(steps.files), clock.seconds)


class StepClock:
    """Seconds of each step of a run, close to zero for steps of a previous run."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, step: Callable[[], Result]) -> Result:
        """Run a step and store its seconds."""
        started = time.monotonic()
        found = step()
        self.seconds[name] = time.monotonic() - started
        return found


class _Steps:
    """The steps of a run and the files written so far. The constructor raises for settings that a step would refuse."""

    def __init__(self, model: Any, tokenizer: Any, text: str, plan: TuneSettings, progress: Progress) -> None:
        from dynaxx.lab.tune.decode import check_decode
        from dynaxx.lab.tune.density.held_tasks import HeldTasks
        from dynaxx.lab.tune.density.search_texts import search_texts
        from dynaxx.lab.tune.run import default_block_size

        self.model, self.tokenizer, self.text = model, tokenizer, text
        self.plan, self.progress = plan, progress
        self.lengths = plan.lengths or default_lengths(model)
        self.block_size = plan.block_size or default_block_size(model)
        self.files: list[Path] = []
        check_tokens(model, plan.tokens, max(as_block_size(self.block_size)))
        kinds = {kind: text_of(kind) for kind in kinds_of(plan.kinds)}
        scorers_named(plan.scorers)
        search_texts(tokenizer, text, kinds, plan.tokens, plan.stretches)
        if plan.held_out and not kinds:
            raise ValueError("--held-out needs several kinds of text: give --kinds, for example --kinds all")
        if plan.hold:
            HeldTasks(model, tokenizer, text, plan.hold, plan.tokens, plan.seed, lambda name, compute: compute())
        check_decode(model, plan.decode, plan.cuda_graph, plan.page_size)
        self._known = _begin(model, text, plan, self.lengths)

    def profile(self) -> dict[str, Any] | None:
        from dynaxx.lab.profile.run import profile

        plan = self.plan
        options: dict[str, Any] = dict(lengths=self.lengths, name=plan.name, price_per_hour=plan.price_per_hour)
        make = lambda: profile(self.model, self.tokenizer, self.text, **options, progress=self.progress)
        return self._document("profile", "profile.json", make)

    def analyze(self) -> dict[str, Any] | None:
        from dynaxx.lab.analyze.run import analyze

        block_size = as_block_size(self.block_size)[1]
        options: dict[str, Any] = dict(tokens=self.plan.tokens, block_size=block_size, seed=self.plan.seed)
        text = split_text(self.text).calibration
        make = lambda: analyze(self.model, self.tokenizer, text, **options, progress=self.progress)
        return self._document("analyze", "analysis.json", make)

    def tune(self) -> TuneResult:
        from dynaxx.lab.tune.run import tune

        plan = self.plan
        options = replace(plan, block_size=self.block_size, reference="reference" not in plan.skip)
        tuned = tune(self.model, self.tokenizer, self.text, options, progress=self.progress)
        self.files += [plan.out / "tuning.json", plan.out / "policy.json"]
        return tuned

    def validate(self, tuned: TuneResult, say: Callable[[str], None]) -> tuple[TuneResult, dict[str, Any] | None, str]:
        """Return the tuned result (with a higher border if only speed failed), the validation, and its checks."""
        from dynaxx.lab.tune.pipeline.raise_border import validate_tuned

        plan = self.plan
        if "validate" in plan.skip or not _has_rules(tuned.to_dict()):
            return tuned, None, ""
        options: dict[str, Any] = dict(out=plan.out, say=say, lengths=self.lengths, seed=plan.seed, kinds=plan.kinds)
        try:
            tuned, found = validate_tuned(
                self.model, self.tokenizer, tuned, self.text, **options, progress=self.progress
            )
        except ValueError as error:  # the policy and the report are useful without a validation
            return tuned, None, str(error)
        validated = {**found.to_dict(), "command": plan.command}
        self.files.append(write_json(plan.out / "validation.json", validated))
        return tuned, validated, found.summary()

    def report(self) -> None:
        from dynaxx.lab.report.run import write_report

        if "report" not in self.plan.skip:
            self.files.append(write_report(self.plan.out))

    def _document(self, name: str, file: str, make: Callable[[], Any]) -> dict[str, Any] | None:
        """Return a step's document from a previous run with these settings, or run it. None if it is skipped."""
        if name in self.plan.skip:
            return None
        path = self.plan.out / file
        self.files.append(path)
        if self._known and (earlier := _earlier(path)) is not None:
            return earlier
        document: dict[str, Any] = {**make().to_dict(), "command": self.plan.command}
        write_json(path, document)
        return document


def _earlier(path: Path) -> dict[str, Any] | None:
    """Return the document of a previous run, or None if it is missing or damaged and must be written again."""
    try:
        found = read_json(path) if path.exists() else None
    except (ValueError, OSError) as error:
        logger.warning("%s; running the step again", error)
        return None
    whole = isinstance(found, dict) and isinstance(found.get("command"), str)
    if whole and path.name == "profile.json":
        whole = isinstance(found.get("verdict"), str)  # type: ignore[union-attr]
    return found if whole else None


def _has_rules(tuning: dict[str, Any]) -> bool:
    """Return whether tuning found rules that keep quality and save time, for prompts or for decoding."""
    prompts = tuning.get("chosen") and tuning.get("dense_below") is not None
    return bool(prompts) or (tuning.get("decode") or {}).get("dense_below") is not None


def _begin(model: Any, text: str, plan: TuneSettings, lengths: tuple[int, ...]) -> bool:
    """Return whether the folder holds a run of exactly these settings to continue; if not, begin one.

    `tune` stores its state in the folder separately and checks it itself.
    """
    settings = {
        "model": plan.name,
        "parameters": sum(tensor.numel() for tensor in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "tokens": plan.tokens,
        "lengths": list(lengths),
        "block_size": list(plan.block_size) if isinstance(plan.block_size, tuple) else plan.block_size,
        "price_per_hour": plan.price_per_hour,
        "seed": plan.seed,
        "versions": machine_facts().versions,
    }
    path = plan.out / "run.json"
    if plan.resume and _is_of(path, settings):
        return True
    for stale in ("profile.json", "analysis.json", "validation.json", "report.html"):
        (plan.out / stale).unlink(missing_ok=True)
    write_json(path, settings)
    return False


def _is_of(path: Path, settings: dict[str, Any]) -> bool:
    """Return whether a folder's run.json has these settings. An unreadable file has none."""
    try:
        return path.exists() and bool(read_json(path) == settings)
    except (ValueError, OSError) as error:
        logger.warning("%s; starting over", error)
        return False
