# SPDX-License-Identifier: Apache-2.0
"""Write the verdict at the top of a report from the measurements that exist."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NBSP = "\N{NO-BREAK SPACE}"
FASTER = 1.05  # smallest speed-up that counts


@dataclass(frozen=True)
class Stat:
    """A figure with its name and its baseline."""

    value: str
    label: str
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """The verdict at the top of the page: title, text and figures."""

    mark: str  # "yes", "no", "open"
    headline: str
    sentence: str
    stats: tuple[Stat, ...] = ()


def percent(value: float, digits: int = 0) -> str:
    """Format a share as "21 %" with a no-break space."""
    return f"{100 * value:.{digits}f}{NBSP}%"


def change(ratio: float) -> str:
    """Format a ratio to dense as a signed change: 1.006 gives "+0.6 %"."""
    return f"{100 * (ratio - 1):+.{2 if abs(ratio - 1) < 0.001 else 1}f}{NBSP}%"


def times(factor: float) -> str:
    """Format a factor as "1.6" and a multiplication sign."""
    return f"{factor:.{2 if factor < 1.2 else 1}f}\N{MULTIPLICATION SIGN}"


def duration(seconds: float) -> str:
    """Format seconds to three digits, in milliseconds below one."""
    value, unit = (seconds, "s") if seconds >= 1 else (1e3 * seconds, "ms")
    return f"{value:,.0f}{NBSP}{unit}" if value >= 100 else f"{value:.3g}{NBSP}{unit}"


def verdict(documents: dict[str, Any]) -> Verdict:
    """Return the verdict from the last step that was run.

    Args:
        documents: any of "profile", "analysis", "tuning", "validation", as written by the tools.
    """
    profile, tuning, validation = (documents.get(name) for name in ("profile", "tuning", "validation"))
    stats = _stats(documents)
    sentence = _sentence(documents)
    if validation:
        return _validated(validation, sentence, stats)
    if tuning:
        return _tuned(tuning, sentence, stats)
    if profile:
        best = max(profile["lengths"], key=lambda length: length["attention_share"])
        share = f"{percent(best['attention_share'])} of the prefill at {best['seqlen']:,} tokens"
        if profile.get("refused"):
            return Verdict("no", "No policy can run in this model.", sentence, stats)
        if profile["worth_it"]:
            headline = f"Worth trying: attention is {share}."
            return Verdict("open", headline, f"{sentence} Nothing has been tuned yet.", stats)
        return Verdict("no", f"Not worth it here: attention is only {share}.", sentence, stats)
    if documents.get("analysis"):
        return Verdict("open", "Attention is mapped; nothing has been timed or tuned yet.", sentence, stats)
    return Verdict("open", "Nothing has been measured yet.", "Run dynaxx tune MODEL --out DIR to fill this page.")


def _validated(validation: dict[str, Any], sentence: str, stats: tuple[Stat, ...]) -> Verdict:
    failed = [check["name"].replace("_", " ") for check in validation["checks"] if not check["passed"]]
    density, speedup = validation.get("density"), _speed(validation.get("speed"))
    if not validation["passed"]:
        several = f"{len(failed)} of its {len(validation['checks'])} checks" if failed else "its validation"
        said = " ".join([sentence, f"Failed: {', '.join(failed)}.", *validation.get("advice", ())])
        return Verdict("no", f"Not yet: the policy fails {several}.", said, stats)
    enough = f"{percent(density)} of the attention is enough" if density is not None else "the policy keeps its quality"
    if speedup is None:
        return Verdict("yes", f"Yes: {enough}.", f"{sentence} Speed was not measured.", stats)
    if speedup[1] < FASTER:
        return Verdict("no", f"Quality holds: {enough}. But it is not faster on this machine.", sentence, stats)
    return Verdict("yes", f"Yes: {enough}.", sentence, stats)


def _tuned(tuning: dict[str, Any], sentence: str, stats: tuple[Stat, ...]) -> Verdict:
    if not tuning["chosen"]:
        limit = percent(tuning["tolerance"], 1)
        return Verdict("no", f"No: nothing sparse stayed within {limit} of dense perplexity.", sentence, stats)
    if tuning.get("crossover") and tuning.get("dense_below") is None:
        return Verdict("no", "Quality would hold, but sparse attention is never faster here.", sentence, stats)
    headline = f"Tuned to {percent(tuning['chosen']['density'])} of the attention, not validated yet."
    return Verdict("open", headline, f"{sentence} Validate it before you rely on it.", stats)


def _sentence(documents: dict[str, Any]) -> str:
    """Describe model, density, perplexity and speed in one line, if they are known."""
    model = next((document["model"] for document in documents.values() if document and document.get("model")), "")
    parts = []
    density = _density(documents)
    if density is not None:
        parts.append(f"attention sparse at {percent(density)} density")
    ratio, limit = _perplexity(documents)
    if ratio is not None:
        parts.append(f"perplexity {change(ratio)}" + (f" (limit {percent(limit, 1)})" if limit is not None else ""))
    what, speed = _any_speed(documents)
    if speed is not None:
        words = f"{times(speed[1])} faster" if speed[1] >= 1 else f"{times(1 / speed[1])} slower"
        parts.append(f"{what} at {speed[0]:,} tokens {words}")
    if not parts and documents.get("profile"):
        parts.append(documents["profile"]["verdict"])
    if not parts and documents.get("analysis"):
        totals = documents["analysis"]["summary"]
        parts.append(
            f"{percent(totals['mean_recommended_density'])} of the blocks hold {percent(totals['target_recall'])} "
            f"of the attention, averaged over {totals['heads']} heads"
        )
    return (f"{model}: " if model else "") + "; ".join(parts) + "." if parts else ""


def _stats(documents: dict[str, Any]) -> tuple[Stat, ...]:
    stats = []
    density = _density(documents)
    if density is not None:
        uniform = (documents.get("tuning") or {}).get("best_uniform_density")
        note = f"the best uniform budget needs {percent(uniform)}" if uniform else "of the attention blocks are visited"
        stats.append(Stat(percent(density), "density", note))
    ratio, limit = _perplexity(documents)
    if ratio is not None:
        note = f"limit {percent(limit, 1)}, " if limit is not None else ""
        where = "held-out text" if documents.get("validation") else "tuning text"
        stats.append(Stat(change(ratio), "perplexity", note + where))
    what, speed = _any_speed(documents)
    if speed is not None:
        stats.append(Stat(times(speed[1]), f"{what} speed", f"at {speed[0]:,} tokens, against dense"))
    profile = documents.get("profile")
    if profile and profile["lengths"]:
        longest = max(profile["lengths"], key=lambda length: length["seqlen"])
        note = f"of the prefill at {longest['seqlen']:,} tokens, dense"
        stats.append(Stat(percent(longest["attention_share"]), "attention's share", note))
    return tuple(stats)


def _density(documents: dict[str, Any]) -> float | None:
    validation, tuning = documents.get("validation") or {}, documents.get("tuning") or {}
    density = validation.get("density")
    return density if density is not None else (tuning.get("chosen") or {}).get("density")


def _perplexity(documents: dict[str, Any]) -> tuple[float | None, float | None]:
    """Return the ratio to dense and the tolerance."""
    validation, tuning = documents.get("validation") or {}, documents.get("tuning") or {}
    ratio = (validation.get("perplexity") or tuning.get("chosen") or {}).get("ratio")
    limit = tuning.get("tolerance")
    for check in validation.get("checks") or []:
        if limit is None and "perplexity" in check["name"] and check["limit"] is not None:
            limit = check["limit"] - 1 if check["limit"] > 0.5 else check["limit"]
    return ratio, limit


def _any_speed(documents: dict[str, Any]) -> tuple[str, tuple[int, float] | None]:
    """Return the timing of the whole prefill if it was validated, otherwise of attention alone."""
    validation, tuning = documents.get("validation") or {}, documents.get("tuning") or {}
    if validation.get("speed"):
        return "prefill", _speed(validation["speed"])
    return "attention alone", _speed(tuning.get("crossover"))


def _speed(timings: list[dict[str, Any]] | None) -> tuple[int, float] | None:
    """Return the longest measured length, and dense over sparse seconds there."""
    if not timings:
        return None
    longest = max(timings, key=lambda timing: timing["seqlen"])
    return longest["seqlen"], longest["dense_seconds"] / longest["sparse_seconds"]
