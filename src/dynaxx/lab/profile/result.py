# SPDX-License-Identifier: Apache-2.0
"""The result of `dynaxx profile`: the time by part, the possible savings, and a verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dynaxx.lab.machine import Ceilings, Machine
from dynaxx.lab.report.verdict import NBSP, duration
from dynaxx.lab.results import Result

DENSITIES = (0.5, 0.25, 0.1)  # densities for which savings are estimated


@dataclass(frozen=True)
class Seconds:
    """The parts of one prefill, which sum to `total`."""

    attention: float  # attention function of layers that see the whole prompt, which a policy can make sparse
    projections: float  # the rest of the attention modules: q, k, v, out, rotary embedding, cache
    mlp: float
    rest: float  # embeddings, norms, logits of the last token
    total: float
    windowed: float = 0.0  # attention function of layers with a window, which run exactly under `dynaxx.apply`


@dataclass(frozen=True)
class Decode:
    """One token after a prefill of this length."""

    seconds_per_token: float
    attention_share: float
    gbs: float  # bytes of weights, keys and values (each read once) per second
    of_copy_ceiling: float


@dataclass(frozen=True)
class LengthProfile:
    """Medians at one prompt length, batch 1."""

    seqlen: int
    seconds: Seconds
    repeats: int
    attention_gflops_per_s: float  # useful FLOPs, from visible pairs only
    of_gemm_ceiling: float
    linear_gflops_per_s: float  # rate of projections and MLP if they are plain linear layers
    decode: Decode
    derived: ClassVar[tuple[str, ...]] = ("attention_share", "windowed_share", "max_speedup")

    @property
    def attention_share(self) -> float:
        """The largest share of the prefill that a policy could save."""
        return self.seconds.attention / self.seconds.total

    @property
    def windowed_share(self) -> float:
        """The share of layers with a window, which policies do not change and `dynaxx.apply` makes faster."""
        return self.seconds.windowed / self.seconds.total

    @property
    def max_speedup(self) -> float:
        """The speed-up of the whole prefill if attention took no time."""
        return self.seconds.total / max(self.seconds.total - self.seconds.attention - self.seconds.windowed, 1e-9)


@dataclass(frozen=True)
class Saving:
    """The saving of a density at a length, if attention's time is proportional to density."""

    seqlen: int
    density: float
    speedup: float
    seconds_saved: float  # per prompt
    money_saved_per_1000_prompts: float | None  # in the currency of the price per hour


@dataclass(frozen=True)
class ProfileResult(Result):
    """The time by part at each length, and the verdict."""

    derived = ("ended", "verdict", "worth_it", "savings")

    machine: Machine
    model: str
    ceilings: Ceilings
    lengths: tuple[LengthProfile, ...]
    threshold: float
    price_per_hour: float | None
    load: float | None = None  # load of the machine before the measurement
    refused: str = ""  # why no policy can run in this model; empty if one can
    busy: bool = False  # whether other processes slowed the machine meanwhile
    left_out: tuple[int, ...] = ()  # lengths that did not fit into the time budget

    @property
    def worth_it(self) -> bool | None:
        """Return whether a policy can run in this model and attention's share is large enough at some length.

        None if it is too small at the timed lengths, but longer ones, where it is larger, were not timed, or if the
        machine was busy, which disturbs shares.
        """
        if not self.refused and any(length.attention_share >= self.threshold for length in self.lengths):
            return True
        return None if (self.left_out or self.busy) and not self.refused else False

    @property
    def savings(self) -> tuple[Saving, ...]:
        """Return the predicted saving at each length and density."""
        return tuple(_saving(length, density, self.price_per_hour) for length in self.lengths for density in DENSITIES)

    @property
    def verdict(self) -> str:
        """One sentence, from the shortest length to the longest, with a refusal first."""
        shares = [f"{length.attention_share:.0%} at {length.seqlen:,}" for length in self.lengths]
        windows = "; ".join(f"{each.windowed_share:.0%} at {each.seqlen:,}" for each in self.lengths)
        has_windows = any(length.seconds.windowed for length in self.lengths)
        subject = f"attention's share of prefill{' in layers without a window' * has_windows} is"
        if self.refused:
            return f"no policy can run in this model: {self.refused} ({subject} {'; '.join(shares)})"
        said = []
        for share, length in zip(shares, self.lengths, strict=True):
            worth = length.attention_share >= self.threshold
            little = "not worth a policy" if has_windows else "not worth it"
            little = "too short to tell" if self.left_out else "unclear" if self.busy else little
            said.append(f"{share}: " + (f"up to {length.max_speedup:.1f}x" if worth else little))
        notes = f"; layers with a window take {windows}: dynaxx.apply makes these faster too" * has_windows
        notes += "; longer prompts were not timed" * bool(self.left_out) + "; the machine was busy" * self.busy
        return f"{subject} {'; '.join(said)} (rule of thumb: from {self.threshold:.0%}){notes}"

    @property
    def ended(self) -> str:
        """Why the measurement ended: "time" if lengths were left out."""
        return "time" if self.left_out else "done"

    def summary(self) -> str:
        """Return the text that the command prints."""
        c, left_out = self.ceilings, " and ".join(f"{length:,}" for length in self.left_out)
        lines = [
            f"{self.model} on {self.machine.cpu}" + "".join(f", {gpu}" for gpu in self.machine.gpus),
            f"ceilings measured on {c.device} in {c.dtype}, {c.threads} threads: "
            f"{c.gemm_gflops:,.0f} GFLOP/s, {c.copy_gbs:.1f} GB/s",
            *([f"the machine was busy (load {self.load}), so times are too long"] if self.busy else []),
            *([f"not measured for lack of time: {left_out} tokens"] if self.left_out else []),
            *([f"no policy can run in this model: {self.refused}"] if self.refused else []),
            "",
            "  prompt     prefill  attention  projections     mlp    rest  attention GFLOP/s    decode/token",
        ]
        for x in self.lengths:
            s = x.seconds
            lines.append(
                f"{x.seqlen:8,} {_time(s.total):>11} {s.attention / s.total:9.0%} {s.projections / s.total:12.0%} "
                f"{s.mlp / s.total:7.0%} {s.rest / s.total:7.0%} {x.attention_gflops_per_s:8,.0f} "
                f"({x.of_gemm_ceiling:4.0%} of gemm) {x.decode.seconds_per_token * 1e3:7.1f} ms, "
                f"attention {x.decode.attention_share:.0%}"
            )
        lines += ["", self.verdict]
        lines += [] if self.refused else ["", "if attention's time is proportional to its density:"]
        for saving in () if self.refused else self.savings[-len(DENSITIES) :]:
            money = saving.money_saved_per_1000_prompts
            lines.append(
                f"  {saving.seqlen:,} tokens at {saving.density:.0%}: {saving.speedup:.2f}x, saves "
                f"{_time(saving.seconds_saved)} a prompt"
                + ("" if money is None else f", {money:.2f} per 1,000 prompts")
            )
        if self.worth_it:
            lines += ["", "to find the lowest density for this model and text: dynaxx tune"]
        return "\n".join(lines)


def _time(seconds: float) -> str:
    return duration(seconds).replace(NBSP, " ")


def _saving(length: LengthProfile, density: float, price_per_hour: float | None) -> Saving:
    saved = length.seconds.attention * (1 - density)
    money = None if price_per_hour is None else saved * 1000 * price_per_hour / 3600
    return Saving(length.seqlen, density, length.seconds.total / (length.seconds.total - saved), saved, money)
