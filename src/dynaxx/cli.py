"""One command per tool of `dynaxx.lab`. Results go to stdout, everything else to stderr.

Exit codes: 0 done, 1 a check failed, 2 wrong use or input (the message says how to fix it), 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shlex
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import dynaxx

if TYPE_CHECKING:
    from dynaxx.lab.models import LoadedModel

EXTRAS = {
    "cli": ("typer", "rich", "jinja2", "matplotlib", "psutil"),
    "transformers": ("transformers", "gguf", "accelerate", "tokenizers", "safetensors"),
    "metrics": ("prometheus_client",),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
}

MOST_IN_A_RANGE = 10_000  # as many layers or heads as anyone has
BERTVIZ_CHARS = 400  # BertViz draws every pair of tokens

app = typer.Typer(
    help="Practical sparse attention: measure a model, choose a policy, prove it, run it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


class Dtype(StrEnum):
    """What a model computes in."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Suite(StrEnum):
    """What to benchmark."""

    cpu = "cpu"
    gpu = "gpu"


ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A folder in Hugging Face's format, a .gguf file, or smollm2, gemma3-270m."),
]
TextOption = Annotated[
    str, typer.Option("--text", metavar="FILE", help="Sample of the workload: a text file, '-' for stdin, or 'pydoc'.")
]
OutOption = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the results.")]
LengthsOption = Annotated[str, typer.Option("--lengths", metavar="N,N,...", help="Prompt lengths in tokens.")]
BlockSizeOption = Annotated[int, typer.Option("--block-size", help="Tokens per block: 16, 32, 64 or 128.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else, on stdout.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Where anything is drawn at random.")]
DeviceOption = Annotated[
    str, typer.Option("--device", help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one.")
]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="auto: bfloat16 on a GPU, float32 on a CPU.")]
ThreadsOption = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; all cores by default.")]


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(dynaxx.__version__)
        raise typer.Exit


@app.command()
def doctor(
    q_heads: Annotated[int, typer.Option(help="Query heads of your model.")] = 8,
    kv_heads: Annotated[int, typer.Option(help="Key-value heads.")] = 2,
    head_dim: Annotated[int, typer.Option(help="Size of a head.")] = 64,
    seqlen: Annotated[int, typer.Option(help="Prompt length.")] = 1024,
    dtype: DtypeOption = Dtype.auto,
    block_size: BlockSizeOption = 64,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    fuzz: Annotated[
        str, typer.Option("--fuzz", metavar="TIME", help="Check random problems instead, for so long: 90, 10m or 2h.")
    ] = "",
    fuzz_seed: Annotated[int | None, typer.Option("--fuzz-seed", help="Check this one random problem again.")] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Say what this machine can serve, and check it against an oracle.

    Lists machine and versions, which backends can serve your shapes and why the others cannot, and compares each that
    can, forward and gradients, with attention computed in fp64. With --fuzz, random patterns, selectors, shapes and
    dtypes are checked; a failing one prints the line that shows it again. Exit code 1 if a backend is wrong.

    \b
    Examples:
      dynaxx doctor
      dynaxx doctor --q-heads 32 --kv-heads 8 --head-dim 128 --seqlen 8192 --dtype bfloat16
      dynaxx doctor --json | jq .chosen
      dynaxx doctor --fuzz 10m
    """
    with _running(as_json, threads) as finish:
        if fuzz or fuzz_seed is not None:
            result = _tool("fuzz").fuzz(
                _seconds(fuzz) or 0.0,
                seed=seed if fuzz_seed is None else fuzz_seed,
                cases=None if fuzz_seed is None else 1,
                device=_device(device),
                progress=_progress(quiet),
            )
            finish(result, result.summary(), ok=result.ok)
            return
        found = _tool("doctor").diagnose(
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            seqlen=seqlen,
            dtype=_dtype(dtype, _device(device)),
            block_size=block_size,
            device=_device(device),
            seed=seed,
            progress=_progress(quiet),
        )
        finish(found, found.summary(), ok=found.ok)


@app.command()
def profile(
    model: ModelArgument,
    text: TextOption = "pydoc",
    lengths: LengthsOption = "",
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Also write DIR/profile.json.")] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, help="Of the machine: puts savings into money.")
    ] = None,
    threshold: Annotated[float, typer.Option(min=0, max=1, help="Share of time from which it is worth it.")] = 0.2,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a trace of PyTorch's profiler.")] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = Dtype.auto,
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Say where a model's time goes, and whether sparse attention is worth it.

    Measures the ceilings of the machine, then at each length the time in attention, projections, MLP and the rest.

    \b
    Examples:
      dynaxx profile smollm2
      dynaxx profile ./my-model --text prompts.txt --lengths 2048,8192,32768 --price-per-hour 2.50
      dynaxx profile smollm2 --lengths 4096 --trace trace.json
    """
    with _running(as_json, threads, seed) as finish:
        tool, progress = _tool("profile"), _progress(quiet)
        loaded = _load(model, device, dtype, progress)
        found = tool.profile(
            *loaded,
            _text(text),
            lengths=_numbers("--lengths", lengths) or tool.default_lengths(loaded.model),
            name=_tool("models").model_name(model),
            threshold=threshold,
            price_per_hour=price_per_hour,
            trace=trace,
            progress=progress,
        )
        files = [_tool("files").write_json(out / "profile.json", found.to_dict())] if out else []
        finish(found, found.summary(), files=[*files, *([trace] if trace else [])])


@app.command()
def analyze(
    model: ModelArgument,
    text: TextOption = "pydoc",
    out: OutOption = Path("dynaxx-run"),
    tokens: Annotated[int, typer.Option(min=2, help="Length of the sample.")] = 4096,
    layers: Annotated[str, typer.Option(metavar="N,N-M,...", help="Which layers; all by default.")] = "",
    heads: Annotated[str, typer.Option(metavar="N,N-M,...", help="Which heads; all by default.")] = "",
    block_size: BlockSizeOption = 64,
    bertviz: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a BertViz page of a short excerpt.")
    ] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = Dtype.auto,
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Say where each head attends, and which pattern would keep it. Writes DIR/analysis.json.

    \b
    Examples:
      dynaxx analyze smollm2 --out run
      dynaxx analyze ./my-model --text prompts.txt --tokens 16384 --layers 0,8-11 --out run
      dynaxx analyze smollm2 --layers 3 --bertviz heads.html
    """
    with _running(as_json, threads, seed) as finish:
        tool, progress = _tool("analyze"), _progress(quiet)
        sample = _tool("texts").split_text(_text(text)).calibration
        loaded = _load(model, device, dtype, progress)
        found = tool.analyze(
            *loaded,
            sample,
            tokens=tokens,
            layers=_numbers("--layers", layers) or None,
            heads=_numbers("--heads", heads) or None,
            block_size=block_size,
            seed=seed,
            progress=progress,
        )
        files = [_tool("files").write_json(out / "analysis.json", found.to_dict())]
        if bertviz:
            tool.write_bertviz(*loaded, sample[:BERTVIZ_CHARS], bertviz)
            files.append(bertviz)
        finish(found, _summary(found), files=files)


@app.command()
def tune(
    model: ModelArgument,
    text: TextOption = "pydoc",
    out: OutOption = Path("dynaxx-run"),
    tolerance: Annotated[float, typer.Option(min=0, help="Perplexity may rise by this share.")] = 0.01,
    tokens: Annotated[int, typer.Option(min=2, help="Length of the samples it tunes on.")] = 4096,
    time_budget: Annotated[
        str, typer.Option(metavar="TIME", help="For tuning: 90, 10m or 2h. No limit by default.")
    ] = "",
    lengths: LengthsOption = "",
    block_size: Annotated[
        int | None, typer.Option("--block-size", help="Tokens per block; by default 32 on a CPU, 64 on a GPU.")
    ] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, help="Of the machine: puts savings into money.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--restart", help="Go on with what DIR holds, or begin anew.")
    ] = True,
    with_profile: Annotated[bool, typer.Option("--profile/--no-profile", help="Profile first.")] = True,
    with_analysis: Annotated[bool, typer.Option("--analysis/--no-analysis", help="Analyze the heads first.")] = True,
    with_validation: Annotated[bool, typer.Option("--validation/--no-validation", help="Validate afterwards.")] = True,
    with_report: Annotated[bool, typer.Option("--report/--no-report", help="Write report.html at the end.")] = True,
    device: DeviceOption = "auto",
    dtype: DtypeOption = Dtype.auto,
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Find the sparsest policy that keeps the model's quality. Writes DIR/policy.json and DIR/report.html.

    Profiles the model, reads its attention maps, tunes heads and layers, validates the policy on text it was not tuned
    on, and writes the report. Stop it when you like: the same command goes on where it was. Exit code 1 if the policy
    does not pass its validation.

    \b
    Examples:
      dynaxx tune smollm2 --out run
      dynaxx tune ./my-model --text prompts.txt --out run --tolerance 0.005 --time-budget 30m
      dynaxx tune smollm2 --out run --no-profile --no-analysis
    """
    with _running(as_json, threads, seed) as finish:
        pipeline, progress = _tool("pipeline"), _progress(quiet)
        source = _text(text)
        plan = pipeline.Plan(
            name=_tool("models").model_name(model),
            out=out,
            tolerance=tolerance,
            tokens=tokens,
            time_budget=_seconds(time_budget),
            lengths=_numbers("--lengths", lengths),
            block_size=block_size,
            price_per_hour=price_per_hour,
            seed=seed,
            command=_command(),
            resume=resume,
            skip=frozenset(
                step
                for step, wanted in zip(
                    ("profile", "analyze", "validate", "report"),
                    (with_profile, with_analysis, with_validation, with_report),
                    strict=True,
                )
                if not wanted
            ),
        )
        found = pipeline.run(*_load(model, device, dtype, progress), source, plan, progress=progress)
        finish(found, found.summary(), ok=found.ok, files=found.files)


@app.command()
def validate(
    model: ModelArgument,
    policy: Annotated[Path, typer.Argument(metavar="POLICY", help="A policy file, as tune writes it.")],
    text: TextOption = "pydoc",
    out: OutOption = Path("dynaxx-run"),
    lengths: LengthsOption = "512,2048,8192",
    tokens: Annotated[int | None, typer.Option(min=2, help="Length of the held-out samples. [default: 4096]")] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = Dtype.auto,
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Compare a policy with the dense model on held-out text. Writes DIR/validation.json; exit code 1 on fail.

    Logits, perplexity, retrieval tasks, repetition, speed and memory, against the policy's own tolerances.

    \b
    Examples:
      dynaxx validate smollm2 run/policy.json --out run
      dynaxx validate ./my-model run/policy.json --text prompts.txt --lengths 2048,8192 --json
    """
    with _running(as_json, threads, seed) as finish:
        document = importlib.import_module("dynaxx.policy").load_policy(policy)
        tool, progress = _tool("validate"), _progress(quiet)
        found = tool.validate(
            *_load(model, device, dtype, progress),
            document,
            _text(text),
            lengths=_numbers("--lengths", lengths),
            tokens=tokens,
            seed=seed,
            progress=progress,
        )
        files = [_tool("files").write_json(out / "validation.json", found.to_dict())]
        finish(found, found.summary(), ok=found.passed, files=files)


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with the JSON files of other commands.")],
    as_json: JsonOption = False,
) -> None:
    """Write DIR/report.html, one page that needs no network, from the results in DIR.

    \b
    Example:
      dynaxx report run
    """
    with _running(as_json) as finish:
        if not run_dir.is_dir():
            raise ValueError(f"DIR must be a folder with results of dynaxx tune or others, got {run_dir}")
        path = _tool("report").write_report(run_dir)
        finish({"report": str(path)}, "", files=[path])


@app.command()
def bench(
    suite: Annotated[Suite, typer.Option(help="Which kernels.")] = Suite.cpu,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and smaller shapes.")] = False,
    threads: ThreadsOption = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also write the figures as JSON.")] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Test the kernels, then time them beside dense attention.

    A kernel that is wrong gives no figures. Exit code 1 if one is, or if a figure misses its bar.

    \b
    Examples:
      dynaxx bench --suite cpu --quick
      dynaxx bench --suite gpu --out gpu.json
    """
    stdout = sys.stdout  # results are said as they come

    def say(line: str) -> None:
        if not (as_json and quiet):
            print(line, file=sys.stderr if as_json else stdout, flush=True)

    with _running(as_json, threads, seed) as finish:
        tool = _tool(f"bench_{suite}")
        _device("cuda" if suite is Suite.gpu else "cpu")
        try:
            if suite is Suite.cpu:
                found = tool.run_cpu_suite(quick=quick, threads=threads, seed=seed, progress=say)
            else:
                found = tool.run_gpu_suite(quick=quick, seed=seed)
                say(_table(found["rows"]))
        except RuntimeError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None
        files = [_tool("files").write_json(out, found)] if out else []
        finish(found, ok=all(bar["ok"] for bar in found.get("bars", ())), files=files)


@contextlib.contextmanager
def _running(as_json: bool, threads: int | None = None, seed: int | None = None) -> Iterator[Any]:
    """Turn what can go wrong into a message and an exit code; keep stdout for the result.

    Yields `finish(result, summary, ok=, files=)`, which the command calls last. DYNAXX_DEBUG=1 shows tracebacks.
    """
    outcome: dict[str, Any] = {}
    try:
        with contextlib.redirect_stdout(sys.stderr):
            _prepare(threads, seed)
            yield lambda result, summary="", ok=True, files=(): outcome.update(
                result=result, summary=summary, ok=ok, files=files
            )
    except KeyboardInterrupt:
        typer.echo("stopped; run the same command again to go on", err=True)
        raise typer.Exit(130) from None
    except (ValueError, TypeError, ImportError, OSError) as error:
        raise _refusal(error, str(error)) from None
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, typer.Exit) or "memory" not in f"{type(error).__name__}: {error}".lower():
            raise
        raise _refusal(error, f"out of memory; try shorter lengths or a smaller model ({error})") from None
    if as_json:
        result = outcome["result"]
        typer.echo(json.dumps(result if isinstance(result, dict) else result.to_dict(), allow_nan=False))
    else:
        for line in (outcome["summary"], *(f"wrote {file}" for file in outcome["files"])):
            if line:
                typer.echo(line)
    if not outcome["ok"]:
        raise typer.Exit(1)


def _refusal(error: BaseException, message: str) -> typer.Exit:
    """Say what is wrong and give exit code 2; under DYNAXX_DEBUG=1 raise the error itself."""
    if os.environ.get("DYNAXX_DEBUG") == "1":
        raise error
    typer.echo(f"error: {message}", err=True)
    return typer.Exit(2)


def _prepare(threads: int | None, seed: int | None) -> None:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    if seed is not None:
        torch.manual_seed(seed)


def _tool(name: str) -> Any:
    """A module of `dynaxx.lab`, loaded when its command runs.

    Raises:
        ImportError: it needs something that is not installed; the message says what to install.
    """
    try:
        return importlib.import_module(f"dynaxx.lab.{name}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if error.name == f"dynaxx.lab.{name}":
            raise ImportError(f"this version of dynaxx has no `{name}`") from error
        extra = next((extra for extra, names in EXTRAS.items() if missing in names), "")
        fix = f"'dynaxx[{extra}]'" if extra else missing
        raise ImportError(f"`dynaxx {name}` needs {missing}: pip install {fix}") from error


def _load(model: str, device: str, dtype: Dtype, progress: Any) -> LoadedModel:
    place = _device(device)
    loaded: LoadedModel = _tool("models").load_model(model, dtype=_dtype(dtype, place), device=place, progress=progress)
    return loaded


def _text(source: str) -> str:
    text: str = _tool("texts").load_text(source)
    return text


def _progress(quiet: bool) -> Any:
    return _tool("progress").make_progress(quiet)


def _device(device: str) -> str:
    """Resolve "auto", and refuse a device that is not there before anything is loaded."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f"--device must be auto, cpu or cuda, got {device!r}") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {device} needs a GPU that torch can use; torch {torch.__version__} sees none")
    return device


def _dtype(dtype: Dtype, device: str) -> Any:
    import torch

    if dtype is Dtype.auto:
        return torch.float32 if device == "cpu" else torch.bfloat16
    return getattr(torch, dtype.value)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """ "0,4-6" -> (0, 4, 5, 6); empty -> ()."""
    found: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()) or int(last or 0) > int(first) + MOST_IN_A_RANGE:
            raise ValueError(f"{option} must be numbers and ranges like 0,4-6, got {text!r}")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _seconds(text: str) -> float | None:
    """ "90", "90s", "10m", "2h" -> seconds; empty -> None."""
    if not text:
        return None
    units = {"s": 1, "m": 60, "h": 3600}
    number, unit = (text[:-1], units[text[-1]]) if text[-1] in units else (text, 1)
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"--time-budget must be a time like 90, 10m or 2h, got {text!r}")
    return seconds


def _command() -> str:
    """The command line as it was given, for the evidence."""
    return shlex.join(["dynaxx", *sys.argv[1:]])


def _summary(result: Any) -> str:
    """A result's own words: a method or property `summary`, as text or as a few named values."""
    summary = getattr(result, "summary", "")
    summary = summary() if callable(summary) else summary
    if isinstance(summary, dict):
        return "\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in summary.items())
    return str(summary)


def _table(rows: list[dict[str, Any]]) -> str:
    """Rows under the names of their columns, numbers short."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    short = lambda value: f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
    cells = [columns, *([short(row.get(name)) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(f"{x:<{w}}" for x, w in zip(line, widths, strict=True)).rstrip() for line in cells)
