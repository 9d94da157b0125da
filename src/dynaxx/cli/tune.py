# SPDX-License-Identifier: Apache-2.0
"""`dynaxx tune`: find the sparsest policy that keeps quality."""

from __future__ import annotations

import importlib
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from dynaxx.cli import options
from dynaxx.cli.options import Dtype, HelpAllOption, device_of, dtype_of
from dynaxx.cli.running import (
    INTERRUPTED,
    UNDECIDED,
    check_targets,
    command_line,
    echo,
    load,
    progress_of,
    read_text,
    running,
    seconds_since_start,
)
from dynaxx.storage import read_regular_file

if TYPE_CHECKING:
    pass


MAX_BYTES = 1 << 20  # of a file of prompts

PromptsOption = Annotated[
    str, typer.Option("--prompts", metavar="FILE", help="For a pipeline of diffusers: a prompt per line.")
]
FramesOption = Annotated[int | None, typer.Option("--frames", min=1, help="With --prompts: frames of a video.")]
SizeOption = Annotated[str, typer.Option("--size", metavar="HxW", help="With --prompts: pixels of a frame, 480x832.")]
StepsOption = Annotated[int | None, typer.Option("--steps", min=1, help="With --prompts: steps of denoising.")]
PsnrOption = Annotated[float, typer.Option("--min-psnr", help="With --prompts: least PSNR to the dense run, in dB.")]

ResidualsOption = Annotated[
    bool,
    typer.Option(
        "--residuals/--no-residuals", help="With --prompts: steps may share residuals, which takes memory per layer."
    ),
]


class PipelineOptions(NamedTuple):
    """The options of a pipeline."""

    prompts: str
    frames: int | None
    size: str
    steps: int | None
    min_psnr: float
    residuals: bool


def is_pipeline(model: str, options: PipelineOptions) -> bool:
    """Return whether to tune a pipeline.

    Raises:
        ValueError: the options do not fit the model.
    """
    folder = (Path(model) / "model_index.json").is_file()
    given = bool(options.prompts or options.frames or options.size or options.steps or not options.residuals)
    if folder and not options.prompts:
        raise ValueError(f"--prompts must name a file with a prompt per line: {model} is a pipeline of diffusers")
    if given and not folder:
        raise ValueError(
            f"--prompts, --frames, --size, --steps and --no-residuals are for pipelines of diffusers, not for {model}"
        )
    return folder


def tune_pipeline(
    model: str, options: PipelineOptions, out: Path, device: str, dtype: Dtype, seed: int, block_size: Any, quiet: bool
) -> Any:
    """Load a pipeline and tune it; return the result of `dynaxx.video.tune.run.tune`."""
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
        command_line(), options.residuals,
    )  # fmt: skip
    say = (lambda line: None) if quiet else (lambda line: echo(line, err=True))
    return run.tune(sampling.Pipeline(pipe, **arguments), settings, say)


def _size(text: str) -> tuple[int | None, int | None]:
    if not text:
        return None, None
    height, _, width = text.lower().partition("x")
    if not (height.isdecimal() and width.isdecimal()):
        raise ValueError(f"--size must be height x width in pixels like 480x832, got {text!r}")
    return int(height), int(width)


TOKENS = 4096  # tokens per sample, if time and model allow
MAIN_OPTIONS = ("text", "out", "tolerance", "effort", "time_budget", "with_decode", "device", "as_json")


class Effort(StrEnum):
    """How much a search tries."""

    fast = "fast"
    normal = "normal"
    thorough = "thorough"


class Search(NamedTuple):
    """The options that an effort stands for."""

    scorers: str
    stretches: int
    held_out: bool  # if there are several kinds of text


SEARCHES = {
    Effort.fast: Search("mean", 1, False),
    Effort.normal: Search("mean,bounds", 1, False),
    Effort.thorough: Search("mean,bounds,tiles", 2, True),
}


def tune(
    model: options.ModelArgument,
    text: options.TextOption = "pydoc",
    out: options.OutOption = Path("dynaxx-run"),
    tolerance: Annotated[float, typer.Option(min=0, help="Allowed rise of perplexity, as a share.")] = 0.01,
    effort: Annotated[
        Effort,
        typer.Option(help="How much to try; sets --scorers, --stretches and --held-out where they are not given."),
    ] = Effort.normal,
    tokens: Annotated[
        int | None,
        typer.Option(min=2, help="Length of the samples to tune on: 4,096, or less if the time budget is short."),
    ] = None,
    time_budget: Annotated[
        str, typer.Option(metavar="TIME", help="Time limit for the whole command: 90, 10m or 2h. None by default.")
    ] = "",
    kinds: options.KindsOption = "",
    hold: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME,...",
            help="Long-context tasks that must pass, and that budgets suit: ruler, long, or tasks by name.",
        ),
    ] = "",
    held_out: Annotated[
        bool | None,
        typer.Option(
            "--held-out/--no-held-out",
            help="Also tune without each kind of text in turn, and report the worst loss on it.",
        ),
    ] = None,
    scorers: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME,...",
            help="Scorers of blocks to try: mean, bounds, tiles (a mean query per 8 tokens; fewer blocks, on CPUs).",
        ),
    ] = "",
    stretches: Annotated[
        int | None,
        typer.Option(
            min=1, help="Stretches of each text for costs, up to 3 times as many for trials; more permit fewer blocks."
        ),
    ] = None,
    lengths: options.LengthsOption = "",
    block_size: Annotated[
        str,
        typer.Option(
            "--block-size",
            metavar="N|NxN",
            help="Tokens per block, or queries x keys, such as 64x32; by default 32 on a CPU, 64 on a GPU.",
        ),
    ] = "",
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, help="Price of the machine per hour, to report savings in money.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--restart", help="Continue from what DIR holds, or start over.")
    ] = True,
    with_profile: Annotated[bool, typer.Option("--profile/--no-profile", help="Profile first.")] = True,
    with_analysis: Annotated[bool, typer.Option("--analysis/--no-analysis", help="Analyze the heads first.")] = True,
    with_decode: Annotated[
        bool, typer.Option("--decode/--no-decode", help="Also search decode rules, and write those that save time.")
    ] = False,
    page_size: Annotated[
        int | None,
        typer.Option(
            help="With --decode: tokens per page, 8 to 128, by default as --block-size. Small pages read fewer tokens.",
        ),
    ] = None,
    cuda_graph: Annotated[
        bool,
        typer.Option(
            "--cuda-graph/--no-cuda-graph",
            help="With --decode on a GPU: time steps captured in a CUDA graph, as engines run them.",
        ),
    ] = False,
    with_reference: Annotated[
        bool, typer.Option("--reference/--no-reference", help="Record the reference that drift is measured against.")
    ] = True,
    with_validation: Annotated[bool, typer.Option("--validation/--no-validation", help="Validate afterwards.")] = True,
    with_report: Annotated[bool, typer.Option("--report/--no-report", help="Write report.html at the end.")] = True,
    prompts: PromptsOption = "",
    frames: FramesOption = None,
    size: SizeOption = "",
    steps: StepsOption = None,
    min_psnr: PsnrOption = 25.0,
    residuals: ResidualsOption = True,
    device: options.DeviceOption = "auto",
    search_on: Annotated[
        str,
        typer.Option(
            "--search-on",
            metavar="DEVICE",
            help="Search on another device: cuda tunes for --device cpu in minutes. Speed and validation stay there.",
        ),
    ] = "",
    dtype: options.DtypeOption = options.Dtype.auto,
    threads: options.ThreadsOption = None,
    seed: options.SeedOption = 0,
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
    help_all: HelpAllOption = False,
) -> None:
    r"""Find the sparsest policy that keeps the model's quality. Writes DIR/policy.json and DIR/report.html.

    Profiles the model, analyzes its attention maps, tunes heads and layers, records attention statistics of the text
    (the reference for drift), validates the policy on held-out text, and writes the report. You can stop it at any
    time; the same command continues. Exit code 1 if the policy fails its validation, 3 if time ended before a
    verdict or its validation.

    \b
    Examples:
      dynaxx tune smollm2 --out run
      dynaxx tune ./my-model --text prompts.txt --out run --tolerance 0.005 --time-budget 30m
      dynaxx tune smollm2 --out run --decode --page-size 8
      dynaxx tune smollm2 --out run --kinds all --effort thorough
      dynaxx tune smollm2 --out run --hold niah_single_2,vt
      dynaxx tune smollm2 --out run --tokens 8192 --block-size 32x16 --scorers mean,tiles --stretches 2
      dynaxx tune smollm2 --out run --device cpu --search-on cuda
      dynaxx tune smollm2 --out run --no-profile --no-analysis
      dynaxx tune ./wan --prompts prompts.txt --frames 81 --size 480x832 --out run
    """
    with running(as_json, threads, seed, resumes=resume) as finish:
        of_pipeline = PipelineOptions(prompts, frames, size, steps, min_psnr, residuals)
        if is_pipeline(model, of_pipeline):
            check_targets(out / "policy.json", out / "tuning.json", out / "report.html")
            block = options.block_size_of("--block-size", block_size)
            tuned = tune_pipeline(model, of_pipeline, out, device, dtype, seed, block, quiet)
            finish(tuned, tuned.summary(), ok=tuned.ok, files=tuned.files)
            return
        from dynaxx.lab.files import alone_in
        from dynaxx.lab.kinds import kinds_of
        from dynaxx.lab.models import longest_prompt, model_name
        from dynaxx.lab.tasks.suite import named_tasks
        from dynaxx.lab.time_budget import TimeBudget
        from dynaxx.lab.tune.pipeline.steps import TuneSettings, run

        progress = progress_of(quiet)
        check_targets(out / "run.json", out / "policy.json", out / "report.html")
        source, others, held = read_text(text), kinds_of(options.names(kinds)), options.names(hold)
        named_tasks(held)
        search = SEARCHES[effort]
        profiled, block = options.numbers("--lengths", lengths), options.block_size_of("--block-size", block_size)
        searched_on = options.device_of(search_on, "--search-on") if search_on else None
        time = TimeBudget(options.seconds("--time-budget", time_budget), spent=seconds_since_start())
        loaded = load(model, device, dtype, progress)
        wanted = {"profile": with_profile, "analyze": with_analysis, "reference": with_reference}
        wanted |= {"validate": with_validation, "report": with_report}
        plan = TuneSettings(
            name=model_name(model),
            out=out,
            tolerance=tolerance,
            tokens=tokens or min(TOKENS, longest_prompt(loaded.model)),
            auto_tokens=tokens is None,
            time_budget=time.seconds,
            lengths=profiled,
            block_size=block,
            price_per_hour=price_per_hour,
            seed=seed,
            command=command_line(),
            resume=resume,
            decode=with_decode,
            cuda_graph=cuda_graph,
            page_size=page_size,
            kinds=others,
            hold=held,
            held_out=search.held_out and bool(others) if held_out is None else held_out,
            scorers=options.names(scorers or search.scorers),
            stretches=search.stretches if stretches is None else stretches,
            search_on=searched_on,
            skip=frozenset(step for step, is_wanted in wanted.items() if not is_wanted),
        )
        after = lambda: f"first verdict, {seconds_since_start():.0f} s after the start"
        say_verdict = (lambda verdict: None) if quiet else (lambda verdict: echo(f"{after()}: {verdict}", err=True))
        with alone_in(out):
            found = run(*loaded, source, plan, progress=progress, say_verdict=say_verdict, time=time)
        code = INTERRUPTED if found.interrupted else UNDECIDED if found.undecided else 0
        finish(found, found.summary(), ok=found.ok, code=code, files=found.files)
