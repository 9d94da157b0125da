# SPDX-License-Identifier: Apache-2.0
"""`export_onnx`: write a model and its policy as ONNX files that ONNX Runtime and others run."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import nn

import dynaxx
from dynaxx.arguments import typed
from dynaxx.errors import UnsupportedInputError
from dynaxx.integrations.onnx.graph import OPSET, check_graph, decoder_graph, encoder_graph, save_graphs
from dynaxx.integrations.onnx.packages import require
from dynaxx.integrations.portable import PortableModel
from dynaxx.policy import Policy, policy_digest, save_policy

Form = Literal["auto", "portable", "custom"]
MANIFEST = "dynaxx.json"
VERSION = 1  # of the manifest


class OnnxExport(NamedTuple):
    """What an export wrote.

    Attributes:
        folder: with the graphs, `weights.bin`, `dynaxx.json` and, for a policy, `policy.json`.
        form: "portable" or "custom".
        graphs: names of the graphs: "prefill" and "decode", or "model".
        opset: of ONNX's own operators.
        bytes: of all files.
    """

    folder: Path
    form: str
    graphs: tuple[str, ...]
    opset: int
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {**self._asdict(), "folder": str(self.folder), "graphs": list(self.graphs)}


@typed
def export_onnx(
    model: nn.Module,
    out: str | os.PathLike[str],
    policy: Policy | None = None,
    *,
    form: Form = "auto",
    window: int | tuple[int, int] | None = None,
    all_logits: bool = False,
) -> OnnxExport:
    """Write a model of transformers and its policy as ONNX, with its KV cache in and out.

    The portable form is plain ONNX operators, for static rules and for the windows that a model has by itself:
    `prefill.onnx` gathers the keys of each block of queries, and `decode.onnx` sees all keys, for prompts below the
    policy's border and for the steps of decoding. An encoder is one `model.onnx`. Batch and lengths are dynamic.

    Args:
        model: a decoder or an encoder of transformers, in eval mode, on a CPU.
        out: a folder that does not exist yet, or is empty; it appears when it is whole.
        policy: for a decoder of this shape; see `load_policy`. None exports the model's own windows alone.
        form: "portable", "custom", or "auto": portable where every rule is static, else custom.
        window: for an encoder, as for `dynaxx.apply`.
        all_logits: return the logits of every token, and not of the last one alone.

    Returns:
        What was written.

    Raises:
        ImportError: a package of the extra `[onnx]` is missing.
        ValueError: there is something at `out`, or the model is in training mode or on a GPU.
        PolicyError: the policy was made for another model.
        UnsupportedInputError: this form cannot hold the policy rightly; with the reasons.
        OSError: the folder cannot be written, as on a full disk; nothing is left behind.
    """
    require("onnx", "onnxscript", "onnx_ir")
    check_target(Path(out))
    _check_model(model)
    if form == "custom":
        raise UnsupportedInputError(
            "an export with the custom op", {"onnx": ["it is not there yet: use form='portable'"]}
        )
    sparse = PortableModel(model, policy, window=window, last_logits=not all_logits)
    with _new_folder(Path(out)) as folder:
        if not sparse.causal:
            graphs = {"model": encoder_graph(sparse)}
        else:
            dense = PortableModel(model, dense=True, last_logits=not all_logits)
            cache = sparse.empty_cache(dtype=next(model.parameters()).dtype)
            graphs = {"prefill": decoder_graph(sparse, cache), "decode": decoder_graph(dense, cache)}
        save_graphs(graphs, folder)
        for name in graphs:
            check_graph(folder / f"{name}.onnx")
        if policy is not None:
            save_policy(policy, folder / "policy.json")
        manifest = {
            "format": "dynaxx.onnx",
            "version": VERSION,
            "form": "portable",
            "opset": OPSET,
            "graphs": list(graphs),
            "model_type": str(sparse.config.model_type),
            "layers": sparse.layers,
            "causal": sparse.causal,
            "all_logits": all_logits,
            "dense_below": 0 if policy is None else policy.dense_below,
            "policy": None if policy is None else policy_digest(policy),
            "versions": _versions(),
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        size = sum(file.stat().st_size for file in folder.iterdir())
    return OnnxExport(Path(out), "portable", tuple(graphs), OPSET, size)


def check_target(path: Path) -> None:
    """Refuse a path where something is already.

    Raises:
        ValueError: with the fix.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"{path} is there already: remove it, or choose another folder")


def _check_model(model: nn.Module) -> None:
    if model.training:
        raise ValueError("`model` must be in eval mode, or dropout would be exported: call model.eval()")
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    if device != "cpu":
        raise ValueError(f"`model` must be on the CPU to be exported, got {device}: call model.cpu()")


def _versions() -> dict[str, str]:
    import onnx
    import onnxscript
    import torch
    import transformers

    packages = (torch, transformers, onnx, onnxscript)
    return {"dynaxx": dynaxx.__version__, **{each.__name__: str(each.__version__) for each in packages}}


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder that becomes `path` in one step, and is removed if filling it fails."""
    check_target(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        yield temporary
        temporary.rename(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"no space left to write {path}; free some, or choose another folder"
            raise OSError(error.errno, message) from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
