# SPDX-License-Identifier: Apache-2.0
"""`dynaxx tune` for a pipeline of diffusers."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from dynaxx.cli.options import Dtype, device_of, dtype_of
from dynaxx.cli.running import command_line, echo
from dynaxx.storage import read_regular_file

if TYPE_CHECKING:
    from dynaxx.cli.running import Reportable

MAX_BYTES = 1 << 20  # of a file of prompts

PromptsOption = Annotated[
    str, typer.Option("--prompts", metavar="FILE", help="For a pipeline of diffusers: a prompt per line.")
]
FramesOption = Annotated[int | None, typer.Option("--frames", min=1, help="With --prompts: frames of a video.")]
SizeOption = Annotated[str, typer.Option("--size", metavar="HxW", help="With --prompts: pixels of a frame, 480x832.")]
StepsOption = Annotated[int | None, typer.Option("--steps", min=1, help="With --prompts: steps of denoising.")]
PsnrOption = Annotated[float, typer.Option("--min-psnr", help="With --prompts: least PSNR to the dense run, in dB.")]


class PipelineOptions(NamedTuple):
    """The options of a pipeline."""

    prompts: str
    frames: int | None
    size: str
    steps: int | None
    min_psnr: float


class TunedPipeline(NamedTuple):
    """The result for the end of the command."""

    result: Reportable
    summary: str
    ok: bool
    files: list[Path]


def is_pipeline(model: str, options: PipelineOptions) -> bool:
    """Return whether to tune a pipeline.

    Raises:
        ValueError: the options do not fit the model.
    """
    folder = (Path(model) / "model_index.json").is_file()
    given = bool(options.prompts or options.frames or options.size or options.steps)
    if folder and not options.prompts:
        raise ValueError(f"--prompts must name a file with a prompt per line: {model} is a pipeline of diffusers")
    if given and not folder:
        raise ValueError(
            f"--prompts, --frames, --size and --steps are for pipelines of diffusers, which {model} is not"
        )
    return folder


def tune_pipeline(
    model: str, options: PipelineOptions, out: Path, device: str, dtype: Dtype, seed: int, block_size: Any, quiet: bool
) -> TunedPipeline:
    """Load a pipeline and tune it."""
    run = importlib.import_module("dynaxx.video.tune.run")  # of a wing, which the core does not import
    sampling = importlib.import_module("dynaxx.video.tune.sampling")
    lines = read_regular_file(options.prompts, MAX_BYTES).decode().splitlines()
    prompts = tuple(filter(None, map(str.strip, lines)))
    if not prompts:
        raise ValueError(f"--prompts must name a file with a prompt per line, got {options.prompts}, which has none")
    height, width = _size(options.size)
    place = device_of(device)
    pipe = sampling.load_pipeline(model, place, dtype_of(dtype, place))
    arguments = {"num_frames": options.frames, "height": height, "width": width, "num_inference_steps": options.steps}
    settings = run.Settings(
        Path(model).name, prompts, out, options.min_psnr, seed, block_size or (128 if place != "cpu" else 32),
        command_line(),
    )  # fmt: skip
    say = (lambda line: None) if quiet else (lambda line: echo(line, err=True))
    found = run.tune(sampling.Pipeline(pipe, **arguments), settings, say)
    return TunedPipeline(found, found.summary(), found.ok, found.files)


def _size(text: str) -> tuple[int | None, int | None]:
    if not text:
        return None, None
    height, _, width = text.lower().partition("x")
    if not (height.isdecimal() and width.isdecimal()):
        raise ValueError(f"--size must be height x width in pixels like 480x832, got {text!r}")
    return int(height), int(width)
