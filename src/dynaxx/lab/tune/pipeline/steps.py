# SPDX-License-Identifier: Apache-2.0
"""`dynaxx tune` as one command: profile, analyze, tune, validate, report, into one folder.

Steps that were completed with the same settings are not repeated. A killed run loses at most the current step, and
`tune` continues within its step.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from dynaxx.lab.about import about
from dynaxx.lab.files import read_json, state_of, write_json, write_result
from dynaxx.lab.kinds import kinds_of, text_of
from dynaxx.lab.machine import machine_facts
from dynaxx.lab.perplexity import measure_pace
from dynaxx.lab.profile.run import default_lengths
from dynaxx.lab.progress import BudgetProgress, Progress, SilentProgress
from dynaxx.lab.texts import check_tokens, split_text
from dynaxx.lab.time_budget import PASS, TimeBudget
from dynaxx.lab.tune.costs import scorers_named
from dynaxx.lab.tune.decode import check_decode
from dynaxx.lab.tune.density.held_tasks import HeldTasks
from dynaxx.lab.tune.density.search_texts import search_texts
from dynaxx.lab.tune.options import TuneOptions
from dynaxx.lab.tune.pipeline.raise_border import validate_tuned
from dynaxx.lab.tune.pipeline.result import PipelineResult
from dynaxx.lab.tune.result import TuneResult
from dynaxx.layout import as_block_size

logger = logging.getLogger("dynaxx")

Result = TypeVar("Result")
SHORTER = (2048, 1024)  # for time budgets too short for longer texts; at 512 tokens little can be left out
PASSES = 8  # passes over a text until a second trial is done, with the costs of heads, timing and validation
RESERVE = 2.5  # passes over a text for the validation, at least: dense and sparse, and some room
ANALYSIS = 4  # passes that the analysis takes about as long as
PROFILE_SECONDS = 5.0  # of the machine's ceilings and a short prompt, at least
REPORT_SECONDS = 5.0


@dataclass(frozen=True)
class TuneSettings(TuneOptions):
    """The options of all steps of a tuning run: those of `tune`, and what the other steps need."""

    lengths: tuple[int, ...] = ()  # lengths to profile and validate at; empty takes defaults
    price_per_hour: float | None = None
    skip: frozenset[str] = frozenset()  # any of "profile", "analyze", "reference", "validate", "report"
    auto_tokens: bool = False  # take shorter texts than `tokens` where the time budget is too short for them


def run(
    model: Any,
    tokenizer: Any,
    text: str,
    plan: TuneSettings,
    *,
    progress: Progress | None = None,
    say_verdict: Callable[[str], object] = lambda line: None,
    time: TimeBudget | None = None,
) -> PipelineResult:
    """Run every step of `plan` that is neither skipped nor done, and write each result at once.

    The analysis comes last, since nothing else needs it. `say_verdict` is called with the verdict of the profile:
    whether sparse attention can be worth it, and by how much. `time` is the time budget, by default that of the plan
    from now on; it covers all steps.

    Raises:
        ValueError: a step refuses the settings or the text.
    """
    time = time or TimeBudget(plan.time_budget)
    progress = BudgetProgress(progress or SilentProgress(), time)
    steps = _Steps(model, tokenizer, text, plan, progress, time)
    seconds = {"start": time.spent}  # until the first step and of each step, close to zero for steps of a previous run

    def timed(name: str, step: Callable[[], Result]) -> Result:
        started = monotonic()
        found = step()
        seconds[name] = monotonic() - started
        return found

    with progress.task(f"Tuning {plan.name}") as task:
        task.advance(0, "profile: where the time goes")
        profiled = timed("profile", steps.profile)
        if profiled is not None:
            say_verdict(profiled["verdict"])
        steps.choose_tokens()
        task.advance(0, "tune: the sparsest policy that keeps quality")
        tuned = timed("tune", steps.tune)
        analyzed: dict[str, Any] | None = None
        validated: dict[str, Any] | None = None
        said, stopped = "", tuned.ended == "interrupted"
        say = lambda line: task.advance(0, line)
        try:
            if not stopped:
                task.advance(0, "validate: on held-out text")
                tuned, validated, said = timed("validate", lambda: steps.validate(tuned, say))
                task.advance(0, "analyze: where the heads attend")
                analyzed = timed("analyze", steps.analyze)
        except KeyboardInterrupt:  # the policy is useful without the later steps
            stopped = True
            if "validate" not in seconds:
                said = "it was stopped; the same command continues with it"
                (plan.out / "validation.json").unlink(missing_ok=True)  # written at the moment of the stop
        task.advance(0, "report")
        timed("report", steps.report)
        task.advance(0, "done")
    found = (profiled, analyzed, tuned.to_dict(), validated, said)
    return PipelineResult(*found, tuple(steps.files), seconds, tuple(steps.left_out), stopped)


class _Steps:
    """The steps of a run and the files written so far. The constructor raises for settings that a step would refuse."""

    def __init__(
        self, model: Any, tokenizer: Any, text: str, plan: TuneSettings, progress: Progress, time: TimeBudget
    ) -> None:
        from dynaxx.lab.tune.run import default_block_size

        block_size = plan.block_size or default_block_size(model)
        self.model, self.tokenizer, self.text = model, tokenizer, text
        self.plan, self.progress, self.time = replace(plan, block_size=block_size), progress, time
        self.lengths = plan.lengths or default_lengths(model)
        self.machine = {**machine_facts().to_dict(), "device": str(model.device)}
        self.files: list[Path] = []
        self.left_out: list[str] = []  # steps for which no time was left
        check_tokens(model, plan.tokens, max(as_block_size(block_size)))
        kinds = {kind: text_of(kind) for kind in kinds_of(plan.kinds)}
        scorers_named(plan.scorers)
        search_texts(tokenizer, text, kinds, plan.tokens, plan.stretches)
        if plan.held_out and not kinds:
            raise ValueError("--held-out needs several kinds of text: give --kinds, for example --kinds all")
        if plan.hold:
            HeldTasks(model, tokenizer, text, plan, lambda name, compute: compute())
        check_decode(model, plan.decode, plan.cuda_graph, plan.page_size)
        self.about = about(model, text)
        self._earlier = read_settings(plan.out / "run.json") if plan.resume else {}
        self._known = self._earlier.get("about") == self.about
        (plan.out / "report.html").unlink(missing_ok=True)  # never outlives its results, also of a run that is killed
        for stale in () if self._known else ("profile.json", "analysis.json", "validation.json"):
            for path in (plan.out / stale, state_of(plan.out / stale)):
                path.unlink(missing_ok=True)

    def profile(self) -> dict[str, Any] | None:
        from dynaxx.lab.profile.run import profile

        plan = self.plan
        options: dict[str, Any] = dict(lengths=self.lengths, name=plan.name, price_per_hour=plan.price_per_hour)
        options |= dict(progress=self.progress, time=self.time, state=state_of(plan.out / "profile.json"))
        make = lambda: profile(self.model, self.tokenizer, self.text, **options)
        return self._document(
            "profile", "profile.json", make, ("lengths", "price_per_hour", "machine"), PROFILE_SECONDS
        )

    def choose_tokens(self) -> None:
        """Take shorter texts if the time is too short for the usual ones, and store the settings of this run.

        A run that continues another one takes its texts, since their results are stored.
        """
        plan, time = self.plan, self.time
        if plan.auto_tokens and time.seconds is not None:
            earlier = self._earlier.get("settings", {}) if self._known else {}
            tokens = earlier.get("tokens") if earlier.get("auto_tokens") else None
            if tokens is None:
                measure_pace(self.model, self.tokenizer, self.text, time)
                fits = lambda tokens: PASSES * time.expects(PASS, tokens) <= time.left
                lengths = [plan.tokens, *(each for each in SHORTER if each < plan.tokens)]
                tokens = next(filter(fits, lengths), lengths[-1])
            self.plan = replace(plan, tokens=tokens)
        settings = {**asdict(self.plan), "out": None, "lengths": list(self.lengths), "skip": sorted(plan.skip)}
        document = {"about": self.about, "settings": settings, "versions": machine_facts().versions}
        write_json(plan.out / "run.json", {"model": plan.name, "command": plan.command, **document})

    def tune(self) -> TuneResult:
        from dynaxx.lab.tune.run import tune

        plan, time = self.plan, self.time
        options = replace(plan, reference="reference" not in plan.skip)
        measure_pace(self.model, self.tokenizer, self.text, time)
        passes = 0.0 if "validate" in plan.skip else RESERVE
        with time.reserving(lambda: passes * time.expects(PASS, plan.tokens) + REPORT_SECONDS):
            tuned = tune(self.model, self.tokenizer, self.text, options, progress=self.progress, time=time)
        self.files += [plan.out / "tuning.json", plan.out / "policy.json"]
        return tuned

    def validate(self, tuned: TuneResult, say: Callable[[str], None]) -> tuple[TuneResult, dict[str, Any] | None, str]:
        """Return the tuned result (with a higher border if only speed failed), the validation, and its checks."""
        plan, path = self.plan, self.plan.out / "validation.json"
        wanted = "validate" not in plan.skip and bool(tuned.policy.rules)
        fits = self.time.allows(2 * self.time.expects(PASS, plan.tokens), urgent=True)
        earlier = _earlier(path) if wanted and not fits else None
        if earlier is not None and earlier.get("about") == {**self.about, **about(policy=tuned.policy)}:
            self.files.append(path)
            return tuned, earlier, "no time was left for another one; that of an earlier run is kept"
        path.unlink(missing_ok=True)  # of an earlier policy, perhaps
        if not wanted:
            return tuned, None, ""
        if not fits:
            self.left_out.append("validate")
            return tuned, None, "no time was left for it; the same command continues with it"
        options: dict[str, Any] = dict(out=plan.out, say=say, lengths=self.lengths, seed=plan.seed, kinds=plan.kinds)
        options |= dict(progress=self.progress, time=self.time, state=state_of(path))
        try:
            with self.time.reserving(lambda: REPORT_SECONDS):
                tuned, found = validate_tuned(self.model, self.tokenizer, tuned, self.text, **options)
        except ValueError as error:  # the policy and the report are useful without a validation
            return tuned, None, str(error)
        digests = {**self.about, **about(policy=tuned.policy)}
        validated = {**found.to_dict(), "about": digests, "command": plan.command}
        self.files.append(write_result(path, validated))
        return tuned, validated, found.summary()

    def analyze(self) -> dict[str, Any] | None:
        from dynaxx.lab.analyze.run import analyze

        block_size = as_block_size(self.plan.block_size or 0)[1]
        options: dict[str, Any] = dict(tokens=self.plan.tokens, block_size=block_size, seed=self.plan.seed)
        text = split_text(self.text).calibration
        make = lambda: analyze(self.model, self.tokenizer, text, **options, progress=self.progress)
        seconds = ANALYSIS * self.time.expects(PASS, self.plan.tokens)
        return self._document("analyze", "analysis.json", make, ("tokens", "block_size", "seed"), seconds)

    def report(self) -> None:
        from dynaxx.lab.report.run import write_report

        if "report" not in self.plan.skip:
            self.files.append(write_report(self.plan.out))

    def _document(
        self, name: str, file: str, make: Callable[[], Any], of: Sequence[str], seconds: float = 0.0
    ) -> dict[str, Any] | None:
        """Return a step's document from a previous run with these settings, or run it.

        What a busy machine measured, or lack of time cut short, is made again, and replaces what is whole only if it is
        whole too. None if the step is skipped, or takes more seconds than are left.
        """
        if name in self.plan.skip:
            return None
        path = self.plan.out / file
        settings = json.loads(
            json.dumps({each: getattr(self if hasattr(self, each) else self.plan, each) for each in of})
        )
        digests = about(**settings) | self.about
        earlier = _earlier(path) if self.plan.resume else None
        fits = self.time.allows(seconds)
        whole = earlier is not None and earlier.get("about") == digests
        if earlier is not None and whole and not (fits and (earlier.get("busy") or earlier.get("left_out"))):
            self.files.append(path)
            return earlier
        if not fits:
            self.left_out.append(name)
            path.unlink(missing_ok=True)
            return None
        document: dict[str, Any] = {**make().to_dict(), "about": digests, "command": self.plan.command}
        document = less_cut(document, earlier if whole else None)
        self.files.append(write_result(path, document))
        return document


def less_cut(made: dict[str, Any], earlier: dict[str, Any] | None) -> dict[str, Any]:
    """Return what was made; if time cut it short, and an earlier document of the same settings is whole, the latter."""
    is_worse = earlier is not None and made.get("left_out") and not earlier.get("left_out")
    return earlier if earlier is not None and is_worse else made


def _earlier(path: Path) -> dict[str, Any] | None:
    """Return the document of a previous run, or None if it is missing or damaged and must be written again."""
    found = _read(path, "running the step again")
    named = ("command", "verdict") if path.name == "profile.json" else ("command",)
    return found if found is not None and all(isinstance(found.get(name), str) for name in named) else None


def read_settings(path: Path) -> dict[str, Any]:
    """Return a folder's run.json; empty if there is none that can be read."""
    return _read(path, "starting over") or {}


def _read(path: Path, otherwise: str) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if there is none, or it cannot be read, which is logged."""
    try:
        found = read_json(path) if path.exists() else None
    except (ValueError, OSError) as error:
        logger.warning("%s; %s", error, otherwise)
        return None
    return found if isinstance(found, dict) else None
