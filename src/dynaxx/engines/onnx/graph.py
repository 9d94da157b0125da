# SPDX-License-Identifier: Apache-2.0
"""Convert a torch module to an ONNX graph, and write graphs with shared weights to a folder."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

OPSET = 20  # operator set of the portable form; supported by ONNX Runtime >= 1.17 and OpenVINO >= 2024.3
SAMPLE = 160  # tokens of a traced call
WEIGHTS = "weights.bin"
SMALL = 1024  # bytes; smaller constants stay in the graph
ALIGNMENT = 4096  # bytes; alignment of a weight in the file, for mapping it into memory


def decoder_graph(module: nn.Module, cache: Sequence[Tensor]) -> Any:
    """Return the ONNX graph, an `onnx_ir.Model`, of a decoder with its cache in and out.

    Batch, prompt length and cache length are dynamic; `cache` gives the shapes of two tensors per layer.
    """
    ids = torch.zeros(2, SAMPLE, dtype=torch.int64, device="cpu")
    past = [torch.zeros(2, each.shape[1], 48, each.shape[3], dtype=each.dtype, device="cpu") for each in cache]
    names = [f"past_{'key' if i % 2 == 0 else 'value'}.{i // 2}" for i in range(len(past))]
    shapes = ({0: "batch", 1: "seqlen"}, [{0: "batch", 2: "past"}] * len(past))
    outputs = ["logits", *(f"present_{name.removeprefix('past_')}" for name in names)]
    return trace(module, (ids, past), shapes, ["input_ids", *names], outputs)


def encoder_graph(module: nn.Module) -> Any:
    """Return the ONNX graph of an encoder; batch and length are dynamic."""
    ids = torch.zeros(2, SAMPLE, dtype=torch.int64, device="cpu")
    shapes = ({0: "batch", 1: "seqlen"}, [{0: "batch", 1: "seqlen"}])
    names = ["input_ids", "attention_mask"]
    return trace(module, (ids, [torch.ones_like(ids)]), shapes, names, ["last_hidden_state"])


def trace(module: nn.Module, args: Any, shapes: Any, inputs: list[str], outputs: list[str]) -> Any:
    """Return the graph of a module, an `onnx_ir.Model`, from sample arguments and the names of their dimensions."""
    with torch.no_grad(), _quiet():
        program = torch.onnx.export(
            module,
            args,
            dynamo=True,
            dynamic_shapes=shapes,
            input_names=inputs,
            output_names=outputs,
            opset_version=OPSET,
            verbose=False,
        )
    assert program is not None, "the exporter that follows torch.export returns a program"
    return program.model


def save_graphs(graphs: Mapping[str, Any], folder: Path) -> None:
    """Write graphs as `<name>.onnx`, and each weight once to a shared `weights.bin`.

    Raises:
        OSError: the folder cannot be written to.
    """
    import onnx_ir as ir

    places: dict[Any, tuple[int, int]] = {}
    with (folder / WEIGHTS).open("wb") as file:
        for graph in graphs.values():
            for value in graph.graph.initializers.values():
                tensor = value.const_value
                if tensor is None or tensor.nbytes < SMALL:
                    continue
                data = tensor.tobytes()
                key = (tensor.dtype, tuple(tensor.shape), hashlib.blake2b(data).digest())
                if key not in places:
                    places[key] = _append(file, data), len(data)
                offset, length = places[key]
                value.const_value = ir.ExternalTensor(
                    WEIGHTS, offset, length, tensor.dtype, shape=tensor.shape, name=value.name, base_dir=folder
                )
    for name, graph in graphs.items():
        ir.save(graph, folder / f"{name}.onnx")


def check_graph(path: Path) -> None:
    """Run ONNX's checker with full shape inference over a file.

    Raises:
        RuntimeError: the file is invalid, which is a bug of the exporter.
    """
    import onnx

    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:  # ONNX's errors have no common base
        raise RuntimeError(f"{path.name} does not pass ONNX's checker: {error}") from error


def _append(file: IO[bytes], data: bytes) -> int:
    file.write(b"\0" * (-file.tell() % ALIGNMENT))
    offset = file.tell()
    file.write(data)
    return offset


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporter's messages about torchvision, deprecations and progress."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
