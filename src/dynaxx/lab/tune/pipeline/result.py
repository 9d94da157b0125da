# SPDX-License-Identifier: Apache-2.0
"""The result of `dynaxx tune`, step by step, and its summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynaxx.lab.kinds import label
from dynaxx.lab.progress import clock
from dynaxx.lab.results import Result
from dynaxx.lab.tune.result import no_reference

_HEADLINES = {"sparse": "tuned", "dense": "dense is right here", "undecided": "undecided"}


@dataclass(frozen=True)
class PipelineResult(Result):
    """The documents of each step, from this or a previous run."""

    derived = ("ok",)

    profile: dict[str, Any] | None
    analysis: dict[str, Any] | None
    tuning: dict[str, Any]
    validation: dict[str, Any] | None
    validation_summary: str  # its checks, or why there was none; empty if it was skipped or nothing is sparse
    files: tuple[Path, ...]
    seconds: dict[str, float] = field(default_factory=dict)  # of each step of this run
    left_out: tuple[str, ...] = ()  # steps for which no time was left
    interrupted: bool = False  # whether a step was stopped

    @property
    def ok(self) -> bool:
        """Return whether the policy passed its validation, or validation was skipped."""
        if self.undecided:
            return False
        return not self.validation_summary if self.validation is None else bool(self.validation["passed"])

    @property
    def undecided(self) -> bool:
        """Return whether time ended before a policy was found and validated, or the lack of one was found."""
        return self.tuning.get("verdict") == "undecided" or "validate" in self.left_out

    def summary(self) -> str:
        """Return the text that the command prints."""
        lines = [self.profile["verdict"]] if self.profile else []
        lines += _of_search(self.tuning)
        if self.tuning.get("decode"):
            lines.append(f"decoding: {self.tuning['decode']['said']}")
        if self.tuning.get("verdict") == "sparse" and self.tuning.get("reference") and not no_reference(self.tuning):
            lines.append(f"reference for drift: {self.tuning['reference']}")
        if self.validation is not None:
            lines.append("the policy passes its validation:" if self.ok else "the policy FAILS its validation:")
        elif self.validation_summary:
            lines.append("the policy could not be validated:")
        lines += [self.validation_summary] if self.validation_summary else []
        if self.interrupted and self.tuning.get("ended") != "interrupted":
            lines.append("stopped; run the same command again to continue")
        if self.left_out:
            lines.append(f"left out for lack of time: {', '.join(self.left_out)}")
        if self.seconds:
            said = ", ".join(f"{step} {clock(seconds)}" for step, seconds in self.seconds.items())
            lines.append(f"took {clock(sum(self.seconds.values()))}: {said}")
        policy = next((file for file in self.files if file.name == "policy.json"), None)
        if self.ok and self.tuning.get("verdict") == "sparse" and policy is not None:
            lines.append(f'run it: dynaxx.apply(model, dynaxx.load_policy("{policy}"))')
        return "\n".join(lines)


def _one_budget(passed: float | None, trials: Sequence[dict[str, Any]]) -> str:
    """Return where one budget for all heads passes, or how far it was from passing where it was tried."""
    if passed:
        return f"one budget for all heads passes at {passed:.1%}"
    if not trials:
        return "one budget for all heads was not tried"
    best = max(trials, key=lambda each: each["density"])
    return f"one budget for all heads fails at {best['density']:.1%}, with perplexity {best['ratio'] - 1:+.2%}"


def _of_search(tuning: dict[str, Any]) -> list[str]:
    """Return the verdict of the search, and the figures of its policy if there is one."""
    chosen, verdict = tuning.get("chosen"), tuning.get("verdict")
    lines = [f"{_HEADLINES.get(str(verdict), 'tuned')}: {tuning.get('why')}"]
    lines[0] += f". {no_reference(tuning)}" if no_reference(tuning) else ""
    if chosen:
        tuned = f"{chosen['density']:.1%} of the blocks, perplexity {chosen['ratio'] - 1:+.2%}"
        lines.append(f"{tuned}; {_one_budget(tuning.get('best_uniform_density'), tuning.get('uniform') or ())}")
        lines += _by_kind(chosen, tuning.get("held_out") or ())
    if verdict == "sparse":
        start = tuning.get("sparse_from") or tuning.get("dense_below")  # older files have the second alone
        lines.append(f"prompts run sparse from {start:,} tokens, shorter ones dense")
    for raised in tuning.get("raised", ())[-1:]:
        lines.append(
            f"attention alone is faster from {tuning['raised'][0]['before']:,} tokens, but the whole "
            f"prefill of {raised['seqlen']:,} tokens took {1e3 * raised['sparse_seconds']:.3g} ms, dense "
            f"{1e3 * raised['dense_seconds']:.3g}"
        )
    if tuning.get("busy"):
        lines.append("the machine was busy while attention was timed; the same command measures the times again")
    return lines + ([tuning["advice"]] if tuning.get("advice") else [])


def _by_kind(chosen: dict[str, Any], held_out: Sequence[dict[str, Any]]) -> list[str]:
    """Return lines with the results of the chosen budgets by kind of text and task, and the worst held-out kind."""
    lines = []
    if chosen.get("kinds"):
        said = ", ".join(f"{label(each['kind'])} {each['ratio'] - 1:+.2%}" for each in chosen["kinds"])
        lines.append(f"by kind of text: {said}")
    if chosen.get("tasks"):
        said = ", ".join(
            f"{each['task']} {each['drop']:+.2f}" if each["informative"] else f"{each['task']} not informative"
            for each in chosen["tasks"]
        )
        lines.append(f"nats lost per answer token: {said}")
    measured = [each for each in held_out if each["density"] is not None]
    if measured:
        worst = max(measured, key=lambda each: each["ratio"])
        said = f"worst kind that tuning did not see: {label(worst['kind'])} {worst['ratio'] - 1:+.2%}"
        lines.append(f"{said} at {worst['density']:.1%} of the blocks")
    missing = ", ".join(label(each["kind"]) for each in held_out if each["density"] is None)
    if missing:
        lines.append(f"no budgets were found without these kinds, so they were not measured: {missing}")
    return lines
