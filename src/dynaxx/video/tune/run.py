# SPDX-License-Identifier: Apache-2.0
"""Tune a pipeline: search on some prompts, validate on others, and write policy, figures and page."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

import dynaxx as dx
import dynaxx.lab.report
from dynaxx.lab.files import write_json, write_text
from dynaxx.lab.machine import machine_facts
from dynaxx.lab.report.charts import Axes, ChartLine, Point, line_chart
from dynaxx.policy import Evidence, MeasuredOn, policy_text
from dynaxx.selection import MeanPool, MeanQuery
from dynaxx.video.policy import VideoPolicy, VideoRule
from dynaxx.video.tune.costs import Case, Space, policy_of, ranges_of, run_with
from dynaxx.video.tune.sampling import Sample, Sampler
from dynaxx.video.tune.search import Search, Trial, compared, trial

SHOWN = 4  # frames
STYLE = Path(dynaxx.lab.report.__file__).parent / "templates" / "report.css"
NAMES = {
    "density": "visited blocks",
    "psnr": "PSNR of the latents, dB",
    "error": "relative error of the latents",
    "frames_psnr": "PSNR of the frames, dB",
    "ssim": "SSIM of the frames",
    "uniform_psnr": "PSNR of the same density without tuning, dB",
}


class Pictures(NamedTuple):
    """Frames of the same prompt and seed, (frames, height, width, 3) in [0, 1]."""

    dense: Tensor
    sparse: Tensor


def page(
    name: str, summary: str, trials: Sequence[Trial], figures: Mapping[str, float], pictures: Pictures | None
) -> str:
    """Return the page as HTML without scripts or links."""
    rows = "".join(f"<tr><td>{NAMES[key]}</td><td>{value:.4g}</td></tr>" for key, value in figures.items())
    parts = [
        f"<h1>{escape(name)}</h1><p>{escape(summary)}</p>",
        "<h2>PSNR against density</h2>" + curve(trials, figures),
        f"<h2>On prompts and seeds that the search did not see</h2><table>{rows}</table>",
    ]
    if pictures is not None:
        for title, frames in (("Dense", pictures.dense), ("Sparse", pictures.sparse)):
            at = [round(step * (len(frames) - 1) / (SHOWN - 1)) for step in range(min(SHOWN, len(frames)))]
            parts.append(f"<h2>{title}</h2><p>{' '.join(image(frames[index]) for index in at)}</p>")
    style = STYLE.read_text(encoding="utf-8")
    head = f'<meta charset="utf-8"><title>{escape(name)}: sparse attention</title><style>{style}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body><main>{"".join(parts)}</main></body></html>\n'


def curve(trials: Sequence[Trial], figures: Mapping[str, float]) -> str:
    """Draw the PSNR of all trials, and of the validation with and without tuning."""
    alone = lambda key: [Point(figures["density"], figures[key])]
    lines = [
        ChartLine("tuned", [Point(each.density, each.psnr) for each in trials], "accent"),
        ChartLine("unseen", alone("psnr"), "ink"),
        ChartLine("not tuned", alone("uniform_psnr")),
    ]
    axes = Axes("visited blocks", "PSNR, dB", x_format=lambda x: f"{x:.0%}", y_format=lambda y: f"{y:g}", width=560)
    return line_chart(lines, axes, alt="PSNR of the latents against the share of visited blocks")


def image(frame: Tensor) -> str:
    """Return a frame as an HTML image."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray((frame.clamp(0, 1) * 255).round().byte().numpy()).save(file, "PNG")
    return f'<img alt="frame" src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}">'


DENSITIES = (0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.5)
MASSES = (0.2, 0.4, 0.6, 0.75, 0.85, 0.92, 0.97)
CANDIDATES = tuple(
    rule
    for scorer in (MeanPool(), MeanQuery())
    for rule in (
        *(dx.TopK(share, scorer, per="head") for share in DENSITIES),
        *(dx.TopP(mass, scorer, per="head") for mass in MASSES),
    )
)
MAX_PROMPTS = 2  # to tune on, and to validate on
OTHER_SEED = 1000  # added to the seed of validation


@dataclass(frozen=True)
class Settings:
    """The settings of a search."""

    name: str  # the pipeline, for the page
    prompts: tuple[str, ...]  # the first half is tuned on, the second half validates
    out: Path  # folder for the files
    min_psnr: float = 25.0  # smallest PSNR of the latents in dB, against the dense run
    seed: int = 0  # seed of the noise
    block_size: int = 64  # tokens per block
    command: str = ""  # the command line, for the evidence
    residuals: bool = True  # whether policies may share residuals between steps


@dataclass
class Result:
    """The result of a search."""

    settings: Settings
    policy: VideoPolicy
    trials: list[Trial]
    figures: dict[str, float]  # on prompts and seeds that the search did not see
    files: list[Path] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Return whether the policy keeps the limit on unseen prompts, and saves anything."""
        return self.figures["psnr"] >= self.settings.min_psnr and self.figures["density"] < 1.0

    def summary(self) -> str:
        """Return the outcome in words."""
        figures = self.figures
        if figures["density"] == 1.0:
            return f"no sparse policy keeps {self.settings.min_psnr:g} dB; the policy is dense"
        seen = f", SSIM {figures['ssim']:.3f}" if "ssim" in figures else ""
        return (
            f"density {figures['density']:.1%} at {figures['psnr']:.1f} dB on unseen prompts{seen}; "
            f"the same density without tuning has {figures['uniform_psnr']:.1f} dB"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        settings = asdict(self.settings) | {"out": str(self.settings.out)}
        trials = [{"density": each.density, "psnr": each.psnr, "error": each.error} for each in self.trials[:-1]]
        return {"settings": settings, "trials": trials, "validation": self.figures, "ok": self.ok}


def tune(sampler: Sampler, settings: Settings, say: Callable[[str], None] = lambda line: None) -> Result:
    """Search, validate, and write policy.json, tuning.json and report.html.

    Args:
        sampler: the pipeline.
        settings: what to tune for.
        say: receives a line per step.
    """
    seen, unseen = cases_of(settings)
    space = Space((*CANDIDATES, None), ranges_of(sampler.switch), settings.block_size)
    space = space if settings.residuals else replace(space, every=())
    say(f"measuring {len(CANDIDATES)} rules in {len(space.ranges)} parts of the denoising")
    search = Search(sampler, space, seen)
    trials = search.sparsest(settings.min_psnr, say=lambda each: say(f"density {each.density:.1%}: {each.psnr:.1f} dB"))
    say("validating on other prompts and seeds")
    dense = [run_with(sampler, policy_of(sampler, space, []), case, decode=True)[0] for case in unseen]
    figures, pictures = validate(sampler, trials[-1].policy, unseen, dense)
    share = 0.999 * figures["density"]  # a share is rounded up to whole blocks
    uniform = [VideoRule.of(dx.TopK(share, MeanPool(), per="head"))]
    figures["uniform_psnr"] = trial(sampler, policy_of(sampler, space, uniform), unseen, dense).psnr
    evidence = Evidence(what="validation", command=settings.command, values=dict(figures))
    of_result = {"measured_on": measured_on(sampler), "evidence": (evidence,)}
    policy = VideoPolicy(**{**dict(trials[-1].policy), **of_result})
    result = Result(settings, policy, trials, figures)
    out = settings.out
    result.files = [
        write_text(out / "policy.json", policy_text(policy)),
        write_json(out / "tuning.json", result.to_dict()),
        write_text(out / "report.html", page(settings.name, result.summary(), trials[:-1], figures, pictures)),
    ]
    return result


def cases_of(settings: Settings) -> tuple[list[Case], list[Case]]:
    """Return prompts with seeds to tune on and to validate on; one prompt alone validates with another seed."""
    half = (len(settings.prompts) + 1) // 2
    seen, unseen = settings.prompts[:half], settings.prompts[half:] or settings.prompts
    with_seed = lambda prompts, seed: [(prompt, seed + at) for at, prompt in enumerate(prompts[:MAX_PROMPTS])]
    return with_seed(seen, settings.seed), with_seed(unseen, settings.seed + OTHER_SEED)


def validate(
    sampler: Sampler, policy: VideoPolicy, cases: Sequence[Case], dense: Sequence[Sample]
) -> tuple[dict[str, float], Pictures | None]:
    """Return means of density, PSNR, error and, of decoded frames, PSNR and SSIM; and the first case's frames."""
    made = [run_with(sampler, policy, case, decode=True) for case in cases]
    first, other = made[0][0].frames, dense[0].frames
    return compared(made, dense), None if first is None or other is None else Pictures(other, first)


def measured_on(sampler: Sampler) -> MeasuredOn:
    """Return the machine on which a pipeline runs."""
    here = machine_facts()
    first = next(sampler.models[0].parameters())
    hardware = here.gpus[0] if first.is_cuda and here.gpus else here.cpu
    return MeasuredOn(device=first.device.type, hardware=hardware, dtype=str(first.dtype).removeprefix("torch."))
