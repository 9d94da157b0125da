# SPDX-License-Identifier: Apache-2.0
"""What a search found out: a sparse policy, that none is worth it, or nothing yet, and what to do next.

The end of time is no finding. A policy is called dense only where sparse attention was tried and failed: the densest
candidate lost too much, or the sparsest one that passes is faster at no length. Short texts, of which little can be
left out, and a busy machine, which slows sparse attention more than dense, decide neither.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from dynaxx.lab.tune.crossover import LengthTiming, dense_below
from dynaxx.lab.tune.density.guide import CLOSER, Guide, Tried
from dynaxx.lab.tune.density.trials import ERRORS
from dynaxx.lab.tune.options import TuneOptions
from dynaxx.lab.tune.result import Ended, Verdict
from dynaxx.lab.validate.check import decimals
from dynaxx.policy import Policy

ROUND = (60, 120, 180, 300, 600, 900, 1800, 3600)  # seconds that an advised budget is rounded up to


class Outcome(NamedTuple):
    """The end of a search and its verdict."""

    ended: Ended
    verdict: Verdict
    border: int | None  # shortest length from which the policy is faster, among those it was tuned for
    why: str  # one sentence
    advice: str  # what to do next; empty if nothing is left to do


class Timed(NamedTuple):
    """A candidate that passes, its policy, and the times of attention under it."""

    tried: Tried | None = None
    policy: Policy | None = None
    timings: tuple[LengthTiming, ...] = ()
    complete: bool = False  # whether all lengths were timed


def decide(
    timed: Timed, options: TuneOptions, *, ended: Ended, tuned: Guide | None, usual: int, needed: float | None
) -> Outcome:
    """Return the outcome of a search.

    Args:
        timed: the candidate of the policy, if one passed.
        options: the options of the search.
        ended: how the search ended.
        tuned: the search of budgets per head, if it began.
        usual: length of the texts from which sparse attention can be ruled out.
        needed: expected seconds of another run until its search is done; None without a time budget.
    """
    chosen, timings, tokens, tolerance = timed.tried, timed.timings, options.tokens, options.tolerance
    budget = "" if needed is None else f" with --time-budget {budget_of(needed)}"
    longer = f"Longer texts need fewer blocks: --tokens {usual}, and as much text as that takes."
    again = f"Run the same command{budget} again: it continues."
    if needed is not None:
        again = f"Run the same command{budget}: it continues, and on this machine now its search would end."
    digits = decimals(100 * tolerance, 3)
    limit = f"{tolerance:.{digits}%}"
    if chosen is None:
        if tuned is not None and tuned.hopeless:
            densest = max((each for each in tuned.trials if not each.passed), key=lambda each: each.aim)
            worst = max(densest.rows, key=lambda row: math.log(row.ratio) - ERRORS * row.error)
            lost = f"at {densest.density:.1%} of the blocks perplexity changes by {worst.ratio - 1:+.{digits}%}"
            is_noise = math.log(worst.ratio) - ERRORS * worst.error <= math.log1p(tolerance)
            if is_noise and all(task.passed for task in densest.tasks):
                said = f"{lost}, with a standard error of {worst.error:.{digits}%} that is too large for {limit}"
                text = f"A smaller error takes more text: --stretches {3 * options.stretches}, or a longer sample."
                text += "" if ended == "done" else f" The same command{budget} also tries one budget for all heads."
                return Outcome(ended, "undecided", None, said, text)
            said = f"nothing sparse stays within {limit} at {tokens:,} tokens: {lost}"
            return Outcome(ended, _ruled_out(tokens, usual), None, said, longer * (tokens < usual))
        count = len(tuned.tried) if tuned is not None else 0
        tried = f" after {count} trial{'s' * (count > 1)}" if count else " before any trial"
        return Outcome(
            ended, "undecided", None, f"{_ENDS[ended]}{tried}; no density is known to pass or to fail", again
        )
    busy = any(each.busy for each in timings)
    quiet = "Run the same command on a quiet machine: it measures the times again."
    border, longest = dense_below(timings), max((each.seqlen for each in timings), default=0)
    left = "Not everything was measured" if tuned is not None and tuned.is_done() else "Fewer blocks may do"
    more = "" if ended == "done" else f"{left}: the same command{budget} continues."
    found = f"{chosen.trial.density:.1%} of the blocks keep perplexity within {limit} at {tokens:,} tokens"
    if tuned is not None and chosen.candidate.aim * CLOSER <= tuned.candidates.least:
        found += ", where no policy with such blocks has fewer"
        more = more or longer * (tokens < usual)
    if not timings:
        return Outcome(ended, "undecided", None, f"{found}, but {_ENDS[ended]} before attention was timed", again)
    if border is None and not timed.complete:
        said = f"{found}, but sparse attention is not faster here up to {longest:,} tokens"
        said += ", and other lengths were not timed"
        return Outcome(ended, "undecided", None, said, again)
    if border is None and ended != "done":
        said = (
            f"{found}, but that is not faster here up to {longest:,} tokens, and {_ENDS[ended]} before fewer were tried"
        )
        return Outcome(ended, "undecided", None, said, again)
    if border is None:
        said = f"{found}, but that is not faster here at any length up to {longest:,} tokens"
        if busy:
            return Outcome(ended, "undecided", None, f"{said} while the machine is busy", quiet)
        return Outcome(ended, _ruled_out(tokens, usual), None, said, longer * (tokens < usual))
    if border > tokens:
        said = f"the policy was tuned at {tokens:,} tokens, and sparse attention is faster here only from {border:,}"
        if busy:
            return Outcome(ended, "undecided", None, f"{said} while the machine is busy", quiet)
        fits = f"Tune at a length that would run sparse: --tokens {border}"
        return Outcome(ended, "undecided", None, said, fits + (f"; {longer.lower()}" if border < usual else "."))
    return Outcome(ended, "sparse", border, found, more)


def _ruled_out(tokens: int, usual: int) -> Verdict:
    """Return the verdict where nothing sparse does at some length: shorter texts than usual rule nothing out."""
    return "dense" if tokens >= usual else "undecided"


_ENDS = {"done": "the search ended", "time": "time ended", "interrupted": "the search was stopped"}


def budget_of(seconds: float) -> str:
    """Return a time budget of at least so many seconds, as `--time-budget` takes it."""
    whole = next((each for each in ROUND if seconds <= each), 3600 * math.ceil(seconds / 3600))
    return f"{whole // 3600}h" if whole % 3600 == 0 else f"{whole // 60}m"
