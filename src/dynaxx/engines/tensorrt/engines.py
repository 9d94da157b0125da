# SPDX-License-Identifier: Apache-2.0
"""Build engines of TensorRT for RTX from the portable ONNX form.

TensorRT's own parser reads `prefill.onnx` and `decode.onnx`. A builder of TensorRT for RTX compiles for the compute
capabilities that it is told, so it needs no GPU; the card finishes the engine when it loads it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dynaxx.arguments import typed
from dynaxx.engines.exporting import NUMBER, Option, imported, read_options
from dynaxx.engines.portable.manifest import MANIFEST, copy_tokenizer, read_manifest
from dynaxx.errors import UnsupportedInputError
from dynaxx.policy import Policy
from dynaxx.storage import check_new_folder, new_folder

INSTALL = "pip install --no-deps tensorrt-rtx-cu13-bindings tensorrt-rtx-cu13-libs"
CARDS = {"7.5": "SM75", "8.0": "SM80", "8.6": "SM86", "8.9": "SM89", "12.0": "SM120", "12.1": "SM121"}


@dataclass(frozen=True)
class EngineSettings:
    """The shapes and cards that engines are built for.

    Attributes:
        compute_capability: of the cards, of `CARDS`. TensorRT for RTX knows no 9.0 (H100).
        max_batch: most sequences.
        max_prompt: most tokens of a prompt.
        max_cache: most tokens in the cache while decoding.

    Raises:
        ValueError: a card that TensorRT for RTX does not know, or a number below 1.
    """

    compute_capability: tuple[str, ...] = ("8.9",)
    max_batch: int = 1
    max_prompt: int = 4096
    max_cache: int = 8192

    def __post_init__(self) -> None:
        """Check the cards and the shapes."""
        cards = self.compute_capability
        if not isinstance(cards, tuple) or not cards or set(cards) - set(CARDS) or len(set(cards)) < len(cards):
            raise ValueError(f"`compute_capability` must be some of {', '.join(CARDS)}, got {cards!r}")
        for name in ("max_batch", "max_prompt", "max_cache"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be a whole number >= 1, got {getattr(self, name)!r}")


@typed
def build_engines(
    onnx: str | os.PathLike[str], out: str | os.PathLike[str], settings: EngineSettings | None = None
) -> dict[str, Any]:
    """Build an engine per graph of a folder that `export_onnx` wrote.

    Args:
        onnx: the folder, with the portable form of a decoder.
        out: an empty or missing folder. It appears only when it is complete.
        settings: shapes and cards.

    Returns:
        "engines": bytes by graph; "compute_capability"; "tensorrt_rtx": its version.

    Raises:
        ImportError: TensorRT for RTX is not installed.
        FileNotFoundError, ValueError: `onnx` is no such folder, or `out` already exists.
        UnsupportedInputError: TensorRT refuses a graph; the error lists its reasons.
    """
    settings, source, target = settings or EngineSettings(), Path(onnx), Path(out)
    manifest = _manifest(source)
    check_new_folder(target)
    trt = imported("tensorrt_rtx_bindings", INSTALL)  # loads the libraries of tensorrt_rtx_libs
    with new_folder(target) as unfinished:
        copy_tokenizer(source if (source / "config.json").exists() else None, unfinished)
        sizes = {}
        for graph in manifest["graphs"]:
            engine = _build(trt, source / f"{graph}.onnx", settings, decodes=graph == "decode")
            (unfinished / f"{graph}.engine").write_bytes(engine)
            sizes[graph] = len(engine)
        result = {"engines": sizes, "compute_capability": list(settings.compute_capability)}
        result["tensorrt_rtx"] = str(trt.__version__)
        shapes = {name: size for name, size in asdict(settings).items() if name != "compute_capability"}
        written = {**manifest, "format": "dynaxx.tensorrt", **result, "shapes": shapes}
        (unfinished / MANIFEST).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return result


def _manifest(folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder, "onnx", 1, {"form": str, "graphs": list})
    if manifest["form"] != "portable" or not manifest.get("causal"):
        raise ValueError(f"{folder} must hold the portable form of a decoder: export it with --option form=portable")
    return manifest


def _build(trt: Any, graph: Path, settings: EngineSettings, *, decodes: bool) -> bytes:
    logger = _log_of(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(graph)):
        reasons = [str(parser.get_error(i)) for i in range(parser.num_errors)] or ["it cannot be read"]
        raise UnsupportedInputError(graph.name, {"tensorrt": reasons})
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        profile.set_shape(tensor.name, *_sizes(tensor.name, tuple(tensor.shape), settings, decodes))
    config.add_optimization_profile(profile)
    config.num_compute_capabilities = len(settings.compute_capability)
    for i, card in enumerate(settings.compute_capability):
        config.set_compute_capability(getattr(trt.ComputeCapability, CARDS[card]), i)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise UnsupportedInputError(graph.name, {"tensorrt": logger.errors or ["it builds no engine and says nothing"]})
    return bytes(engine)


def _sizes(
    name: str, shape: tuple[int, ...], settings: EngineSettings, decodes: bool
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the least, the usual and the largest shape of an input.

    `decode` also takes whole prompts, those below the policy's border; `prefill` starts with an empty cache.
    """
    batch, prompt = settings.max_batch, settings.max_prompt
    if name == "input_ids":
        return (1, 1), (1, 1 if decodes else prompt), (batch, prompt)
    _, heads, _, head_dim = shape
    cache = settings.max_cache if decodes else 0
    return (1, heads, 0, head_dim), (1, heads, cache // 2, head_dim), (batch, heads, cache, head_dim)


def _log_of(trt: Any) -> Any:
    """Return a logger of TensorRT's that keeps its errors for our message."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(message)

    return Log()


OPTIONS = {
    "compute_capability": Option("cards", ".*", lambda text: tuple(text.split(","))),
    **dict.fromkeys(("max_batch", "max_prompt", "max_cache"), NUMBER),
}


def export_model(folder: Path, policy: Policy | None, out: Path, options: Mapping[str, str]) -> dict[str, Any]:
    """Build engines for the model in a folder of Hugging Face's format.

    Raises:
        ValueError: an option that is not there, or has another form; else as `export_onnx` and `build_engines`.
    """
    from dynaxx.engines.onnx.export import export_model as export_onnx_model

    settings = EngineSettings(**read_options(options, OPTIONS))
    with tempfile.TemporaryDirectory() as temporary:
        graphs = Path(temporary) / "onnx"
        export_onnx_model(folder, policy, graphs, {"form": "portable"})
        return build_engines(graphs, out, settings)
