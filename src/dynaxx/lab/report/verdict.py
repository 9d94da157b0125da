# SPDX-License-Identifier: Apache-2.0
"""Write the verdict at the top of a report. Every sentence repeats what a document says; nothing is concluded here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dynaxx.lab.tune.result import no_reference
from dynaxx.lab.validate.check import apart, decimals

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

    mark: str  # "yes", "no", "open": the colour of the badge
    badge: str
    headline: str
    sentence: str
    stats: tuple[Stat, ...] = ()


def percent(value: float, digits: int = 0) -> str:
    """Format a share as "21 %" with a no-break space."""
    return f"{100 * value:.{digits}f}{NBSP}%"


def limit(value: float, digits: int = 1) -> str:
    """Format a limit as a percentage with at least so many digits, and three of a small one."""
    return percent(value, decimals(100 * value, digits))


def change(ratio: float, digits: int = 2) -> str:
    """Format a ratio to dense as a signed change: 1.006 gives "+0.60 %"."""
    return f"{100 * (ratio - 1):+.{digits}f}{NBSP}%"


def times(factor: float) -> str:
    """Format a factor as "1.60" and a multiplication sign."""
    return f"{factor:.{2 if factor < 10 else 1}f}\N{MULTIPLICATION SIGN}"


def duration(seconds: float) -> str:
    """Format seconds to three digits, in milliseconds below one."""
    value, unit = (seconds, "s") if seconds >= 1 else (1e3 * seconds, "ms")
    return f"{value:,.0f}{NBSP}{unit}" if value >= 100 else f"{value:.3g}{NBSP}{unit}"


def verdict(documents: dict[str, Any]) -> Verdict:
    """Return the verdict of the last step that was run.

    Args:
        documents: any of "profile", "analysis", "tuning", "policy", "validation", as the tools write them, about one
            policy.
    """
    profile, tuning, validation = (documents.get(name) for name in ("profile", "tuning", "validation"))
    model = next((document["model"] for document in documents.values() if document and document.get("model")), "")
    said, stats = f"{model}: " if model else "", _stats(documents)
    if validation:
        return _validated(validation, tuning, said, stats)
    if tuning:
        return _tuned(tuning, said, stats)
    if documents.get("policy"):
        return _unproven(documents["policy"], stats)
    if profile:
        return _profiled(profile, said, stats)
    if documents.get("analysis"):
        totals = documents["analysis"]["summary"]
        said += (
            f"{percent(totals['mean_recommended_density'])} of the blocks hold {percent(totals['target_recall'])} of "
            f"the attention, averaged over {totals['heads']} heads."
        )
        return Verdict("open", "Open", "Attention is mapped; nothing has been timed or tuned yet.", said, stats)
    return Verdict("open", "Open", "Nothing has been measured yet.", "")


def _validated(
    validation: dict[str, Any], tuning: dict[str, Any] | None, model: str, stats: tuple[Stat, ...]
) -> Verdict:
    checks, density = validation["checks"], validation["density"]
    where = f"at {validation['window_tokens']:,} tokens"
    kept = f"{percent(density, 1)} of the attention is enough {where}"
    failed = [check["said"] for check in checks if not check["passed"]]
    unclear = [check["said"] for check in checks if check.get("unclear")]
    row = _longest(validation)
    quality = max((c for c in checks if c["name"] == "perplexity_ratio"), key=lambda c: c["value"], default=None)
    parts = [f"{model}{percent(density, 1)} of the attention blocks are visited {where}"]
    parts[0] += f"; {quality['said']}." if quality and quality["passed"] else "."
    parts += [f"Failed: {'; '.join(failed)}."] if failed else []
    parts += [f"Unclear: {'; '.join(unclear)}."] if unclear else []
    if row is None:
        parts.append("Speed was not measured.")
    else:
        said = f"at {row['speedup']:.2f} times the speed of dense ({_measured(row)})"
        parts.append(f"A prefill of {row['seqlen']:,} tokens runs {said}.")
    if row is not None and (validation.get("layer_calls") or {}).get("own_pattern_calls"):
        parts.append("Layers with a window of their own run on dynaxx's kernels too, which is part of the speed.")
    sparse, short = validation["sparse_from"] is not None, row is None or row["seqlen"] < validation["window_tokens"]
    least = max(validation["sparse_from"] or 0, row["seqlen"] + 1 if row else 0)
    parts += [_attention_alone(tuning, least, validation["window_tokens"])] if short and sparse and tuning else []
    parts += validation["advice"]
    parts += [validation["busy"]] if validation["busy"] else []
    if tuning and tuning["about"].get("text") != validation["about"].get("text"):
        parts.append("It was validated on another text than it was tuned on.")
    parts += (
        [f"Not measured for lack of time: {', '.join(validation['skipped'])}."] if validation.get("skipped") else []
    )
    if not validation["passed"]:
        headline = f"The policy fails {len(failed)} of its {len(checks)} checks."
        return Verdict("no", "\N{BALLOT X} Failed", headline, " ".join(parts), stats)
    parts += [tuning["advice"]] if tuning and tuning["advice"] else []
    parts += filter(None, [no_reference(tuning or {})])
    if not sparse:
        headline = "Yes: decoding under the policy keeps quality. Prompts run dense."
    elif row is None:
        headline = f"Quality holds: {kept}. The speed was not measured."
    elif short:
        headline = f"Quality holds: {kept}. The speed is known up to {row['seqlen']:,} tokens."
    elif row["high"] < 1 and row["pairs"] > 1:
        headline = f"Quality holds: {kept}. But {row['seqlen']:,} tokens are slower than dense on this machine."
    elif row["low"] <= 1 or row["speedup"] < FASTER:
        headline = f"Quality holds: {kept}. But {row['seqlen']:,} tokens are not clearly faster on this machine."
    else:
        headline = f"Yes: {kept}."
    return Verdict("yes", "\N{CHECK MARK} Passed", headline, " ".join(parts), stats)


def _attention_alone(tuning: dict[str, Any], least: int, tokens: int) -> str:
    """Return a sentence with the time of attention alone at the longest length from `least` to `tokens`."""
    timed = [each for each in tuning["crossover"] if least <= each["seqlen"] <= tokens]
    timing = max(timed, key=lambda each: each["seqlen"], default=None)
    if timing is None:
        return f"Prompts of {tokens:,} tokens were not timed."
    faster = timing["dense_seconds"] / timing["sparse_seconds"]
    said = f"Attention alone, with the choice of blocks, runs at {faster:.2f} times the speed of dense at "
    said += f"{timing['seqlen']:,} tokens{', on a busy machine' * bool(timing.get('busy'))}"
    return f"{said}; the whole prefill was not timed there."


def _tuned(tuning: dict[str, Any], model: str, stats: tuple[Stat, ...]) -> Verdict:
    why = tuning["why"][:1].upper() + tuning["why"][1:]
    sentence = " ".join(part for part in (f"{model}{why}.", tuning["advice"]) if part)
    sentence += f" Decoding: {tuning['decode']['said']}." if tuning.get("decode") else ""
    sentence += " The machine was busy while attention was timed." if tuning.get("busy") else ""
    if tuning["verdict"] == "dense":
        what = "Dense attention is right here" + (" for prompts" if tuning.get("decode") else "")
        return Verdict("no", "Dense", f"{what}.", sentence, stats)
    if tuning["verdict"] == "undecided":
        ends = {"time": "time ended first", "interrupted": "the search was stopped"}
        headline = f"Undecided: {ends.get(tuning['ended'], 'more has to be measured')}."
        return Verdict("open", "Undecided", headline, sentence, stats)
    density = f"{percent(tuning['chosen']['density'], 1)} of the attention at {tuning['tokens']:,} tokens"
    sentence = f"{sentence} {no_reference(tuning)}".rstrip() + " Validate it before you rely on it."
    return Verdict("open", "Not validated", f"Tuned to {density}, not validated yet.", sentence, stats)


def _unproven(policy: dict[str, Any], stats: tuple[Stat, ...]) -> Verdict:
    count = len(policy["rules"])
    if not count:
        return Verdict("open", "Dense", "The policy runs everything dense.", "No result here says why.", stats)
    sentence = f"It has {count} rule{'' if count == 1 else 's'}. Validate it before you rely on it."
    return Verdict("open", "Not validated", "No result here is about this policy.", sentence, stats)


def _profiled(profile: dict[str, Any], model: str, stats: tuple[Stat, ...]) -> Verdict:
    best = max(profile["lengths"], key=lambda length: length["attention_share"])
    share = f"{percent(best['attention_share'])} of the prefill at {best['seqlen']:,} tokens"
    windows = _windows(profile)
    sentence = f"{model}{profile['verdict']}." + (f" {BUSY}" if is_busy(profile) else "")
    if profile.get("refused"):
        return Verdict("no", "Not here", "No policy can run in this model.", sentence, stats)
    if profile["worth_it"]:
        sentence += " Nothing has been tuned yet."
        return Verdict("open", "Open", f"Worth trying: attention{windows} is {share}.", sentence, stats)
    if profile["worth_it"] is None:
        why = "longer prompts were not timed" if profile.get("left_out") else "the machine was busy"
        headline = f"Attention{windows} is {share}; {why}."
        return Verdict("open", "Open", headline, sentence, stats)
    headline = f"{'A policy is not' if windows else 'Not'} worth it here: attention{windows} is only {share}."
    return Verdict("no", "Not here", headline, sentence, stats)


def _windows(profile: dict[str, Any]) -> str:
    """Return words that tell the attention of a policy's layers from that of layers with a window, if there are any."""
    return " in layers without a window" * any(each.get("windowed_share") for each in profile["lengths"])


BUSY = "The machine was busy while this was timed."


def is_busy(document: dict[str, Any]) -> bool:
    """Return whether a document says that other processes disturbed its times."""
    rows = [row for name in ("lengths", "crossover", "speed") for row in document.get(name) or []]
    return bool(document.get("busy")) or any(row.get("busy") for row in rows)


def _stats(documents: dict[str, Any]) -> tuple[Stat, ...]:
    """Return the figures of the policy, each with its length and its text, and attention's share of the time."""
    tuning, validation, stats = documents.get("tuning") or {}, documents.get("validation") or {}, []
    chosen = tuning.get("chosen") if tuning.get("verdict") == "sparse" else None
    if validation:
        note = f"of the blocks at {validation['window_tokens']:,} tokens"
        stats.append(Stat(percent(validation["density"], 1), "density", note))
    elif chosen:
        note, uniform = f"of the blocks at {tuning['tokens']:,} tokens", tuning.get("best_uniform_density")
        note += f"; one budget for all heads passes at {percent(uniform, 1)}" if uniform else ""
        stats.append(Stat(percent(chosen["density"], 1), "density", note))
    perplexity = [check for check in validation.get("checks", ()) if check["name"] == "perplexity_ratio"]
    if perplexity:
        worst = max(perplexity, key=lambda check: check["value"])
        stats.append(_perplexity(worst["value"], worst["limit"], worst["where"]))
    elif chosen:
        stats.append(_perplexity(chosen["ratio"], 1 + tuning["tolerance"], "the tuning text"))
    row = _longest(validation)
    if row is not None:
        note = f"of dense at {row['seqlen']:,} tokens, {_measured(row)}"
        stats.append(Stat(times(row["speedup"]), "prefill speed", note + (", machine busy" if row["busy"] else "")))
    profile = documents.get("profile")
    if profile and profile["lengths"]:
        longest = max(profile["lengths"], key=lambda length: length["seqlen"])
        note = f"of the prefill at {longest['seqlen']:,} tokens{_windows(profile)}, dense"
        note += ", machine busy" if is_busy(profile) else ""
        stats.append(Stat(percent(longest["attention_share"]), "attention's share", note))
    return tuple(stats)


def _perplexity(ratio: float, limit: float, where: str) -> Stat:
    value, most = apart(100 * (ratio - 1), 100 * (limit - 1), 1)
    sign = "" if value.startswith("-") else "+"
    return Stat(f"{sign}{value}{NBSP}%", "perplexity", f"limit {most}{NBSP}%, on {where}")


def _measured(row: dict[str, Any]) -> str:
    """Return the interval of the pairs of runs; a single pair has none."""
    return f"{row['low']:.2f} to {row['high']:.2f} measured" if row["pairs"] > 1 else "one pair of runs"


def _longest(validation: dict[str, Any]) -> dict[str, Any] | None:
    """Return the timing of the longest prompt."""
    return max(validation.get("speed") or (), key=lambda row: row["seqlen"], default=None)
