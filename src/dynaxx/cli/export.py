# SPDX-License-Identifier: Apache-2.0
"""`dynaxx export`: export a model with its policy to another engine."""

from __future__ import annotations

import importlib
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from dynaxx.cli.options import JsonOption, ModelArgument, QuietOption
from dynaxx.cli.running import progress_of, running

if TYPE_CHECKING:
    from dynaxx.policy import Policy

# The module of `dynaxx.engines` for each format; it defines `export_model(folder, policy, out, options)`.
FORMATS = {
    "onnx": "onnx.export",
    "openvino": "openvino.export",
    "tensorrt": "tensorrt.engines",
    "tensorrt_llm": "tensorrt_llm.checkpoint",
    "triton": "triton_server.repository",
}
Format = StrEnum("Format", {name: name for name in FORMATS})  # type: ignore[misc]


def export(
    model: ModelArgument,
    policy: Annotated[
        Path | None,
        typer.Argument(metavar="[POLICY]", help="Policy for this model. Default: the model's own pattern."),
    ] = None,
    format: Annotated[Format, typer.Option("--format", help="Target engine.")] = ...,  # type: ignore[assignment]
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write to.")] = ...,  # type: ignore[assignment]
    option: Annotated[
        list[str], typer.Option("--option", metavar="NAME=VALUE", help="Option of the format; may be repeated.")
    ] = [],  # noqa: B006  # typer reads it, nothing changes it
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    r"""Export a model and its policy to another engine.

    onnx: graphs for ONNX Runtime and other engines; needs the extra dynaxx[onnx]. Options: form (auto, portable,
    custom), logits (last, all), weights (fp32, int8), and window (W or LEFT,RIGHT) for an encoder.

    openvino: a model for OpenVINO and its policy, with `pip install 'dynaxx[openvino]'`. Options: form (auto, portable,
    custom), logits (last, all), cache (no, yes).

    tensorrt: engines of TensorRT for RTX, built without a GPU. Options: compute_capability (8.9, or several),
    max_batch, max_prompt, max_cache (tokens).

    tensorrt_llm: the model's config.json with `sparse_attention_config`, for TensorRT-LLM and Model-Optimizer. Option:
    seqlen (tokens).

    triton: a model repository for Triton Inference Server. Options: name, stream, max_batch_size, max_batch_tokens,
    queue_delay (microseconds), dtype.

    \b
    Examples:
      dynaxx export smollm2 policy.json --format onnx --out smollm2-onnx
      dynaxx export ./bert --format onnx --out bert-onnx --option window=256
      dynaxx export smollm2 policy.json --format openvino --out smollm2-openvino
      dynaxx export smollm2 policy.json --format triton --out model_repository
      dynaxx export ./llama --format triton --out model_repository --option name=llama --option stream=false
    """
    with running(as_json) as finish:
        from dynaxx.lab.models import resolve_model
        from dynaxx.policy import load_policy

        options = _options(option)
        loaded = None if policy is None else load_policy(policy)
        folder = resolve_model(model, progress=progress_of(quiet))
        result = _exporter(format)(folder, loaded, out, options)
        finish(result, files=[out])


class Exporter(Protocol):
    """The function `export_model` of a format."""

    def __call__(self, folder: Path, policy: Policy | None, out: Path, options: dict[str, str]) -> dict[str, Any]:
        """Write the export of a model's folder to `out`; return what was written."""


def _exporter(format: Format) -> Exporter:
    export_model: Exporter = importlib.import_module(f"dynaxx.engines.{FORMATS[format.value]}").export_model
    return export_model


def _options(given: list[str]) -> dict[str, str]:
    """Return NAME=VALUE arguments as a dict.

    Raises:
        ValueError: an argument has another form, or a name occurs twice.
    """
    options: dict[str, str] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not (name and equals):
            raise ValueError(f"--option must be NAME=VALUE, got {each!r}")
        if name in options:
            raise ValueError(f"--option {name} must be given only once")
        options[name] = value
    return options
