# SPDX-License-Identifier: Apache-2.0
"""The page about a tuned pipeline: the outcome, PSNR against density, and frames side by side."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

import dynaxx.lab.report
from dynaxx.lab.report.charts import Axes, ChartLine, Point, line_chart
from dynaxx.video.tune.search import Trial

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
