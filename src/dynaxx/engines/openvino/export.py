# SPDX-License-Identifier: Apache-2.0
"""`dynaxx export --format openvino`: a folder with an OpenVINO model and its policy, and how it is loaded.

portable   the policy's static rules as plain operators in the model: OpenVINO alone runs it
custom     the dense model and the policy beside it: `load_openvino` puts dynaxx inside as it reads them
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from dynaxx.arguments import typed
from dynaxx.engines.exporting import FORM, LOGITS, Option, read_options
from dynaxx.engines.openvino.convert import Prompts, convert_prefill, openvino, to_openvino
from dynaxx.engines.openvino.insert import insert_policy
from dynaxx.engines.openvino.running import OpenVinoHandle
from dynaxx.engines.portable import PortableModel
from dynaxx.engines.portable.attention import CHUNK
from dynaxx.engines.portable.manifest import copy_tokenizer, read_manifest, write_manifest
from dynaxx.errors import UnsupportedInputError
from dynaxx.integrations.transformers.loading import from_folder
from dynaxx.policy import Policy, load_policy
from dynaxx.storage import check_new_folder, new_folder

Form = Literal["auto", "portable", "custom"]
MODEL = "openvino_model.xml"
VERSION = 1
OPTIONS = {"cache": Option("yes or no", "yes|no", lambda text: text == "yes"), "form": FORM, "logits": LOGITS}


class OpenVinoExport(NamedTuple):
    """Result of an export.

    Attributes:
        folder: folder with `openvino_model.xml` and `.bin`, `dynaxx.json` and, for a policy, `policy.json`.
        form: "portable" or "custom".
        bytes: size of all files.
    """

    folder: Path
    form: str
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {**self._asdict(), "folder": str(self.folder)}


class LoadedOpenVino(NamedTuple):
    """A model to compile, and the handle of the policy inside it; None if OpenVINO alone runs it."""

    model: Any
    handle: OpenVinoHandle | None


@typed
def export_openvino(
    model: nn.Module,
    out: str | os.PathLike[str],
    policy: Policy | None = None,
    *,
    form: Form = "auto",
    all_logits: bool = False,
    cache: bool = False,
    tokenizer: str | os.PathLike[str] | None = None,
) -> OpenVinoExport:
    """Write a decoder and its policy for OpenVINO, for prompts of any length.

    Args:
        model: a decoder of transformers, in eval mode, on a CPU.
        out: an empty or missing folder. It appears only when the export is complete.
        policy: policy for a decoder of this shape; see `load_policy`. None exports the dense model.
        form: "portable", "custom", or "auto", which is portable if every rule is static and there is no border, and
            custom otherwise.
        all_logits: return the logits of every token instead of the last one only.
        cache: keep the KV cache in the model's state, so that it generates; see `to_openvino`. Only in the custom form.
        tokenizer: the model's folder in Hugging Face's format; its tokenizer and configs are copied beside the model.

    Returns:
        The files and the form of the export.

    Raises:
        ImportError: openvino is not installed.
        ValueError: `out` already exists, `tokenizer` has none, or the model is in training mode or on a GPU.
        PolicyError: the policy is for another model.
        UnsupportedInputError: this form cannot represent the policy; the error lists the reasons.
        OSError: the folder cannot be written, for example on a full disk. No files remain.
    """
    ov, target = openvino(), Path(out)
    check_new_folder(target)
    converted, chosen = _converted(model, policy, form, all_logits, cache)
    with new_folder(target) as folder:
        copy_tokenizer(tokenizer, folder)
        ov.save_model(converted, folder / MODEL, compress_to_fp16=False)
        size = write_manifest(folder, "openvino", VERSION, policy, [torch, ov], form=chosen, cache=cache)
    return OpenVinoExport(target, chosen, size)


@typed
def load_openvino(folder: str | os.PathLike[str], *, precision: str = "f32", name: str = "openvino") -> LoadedOpenVino:
    """Read a folder that `export_openvino` wrote, and insert the policy into the model if its form is "custom".

    Args:
        folder: the folder of the export.
        precision: precision for which the model will be compiled, as in `insert_policy`.
        name: name of the model in metrics.

    Raises:
        ImportError: openvino is not installed.
        FileNotFoundError: the folder contains no export, or its policy is missing.
        ValueError: the manifest is damaged, or a newer version of dynaxx wrote it.
    """
    manifest = read_manifest(Path(folder), "openvino", VERSION, {"form": str})
    policy = Path(folder) / "policy.json"
    inside = manifest["form"] == "custom" and manifest.get("policy") is not None
    if inside and not policy.is_file():
        raise FileNotFoundError(f"{policy} is missing: restore it, or export the model again")
    model = openvino().Core().read_model(Path(folder) / MODEL)
    if manifest["form"] != "custom" or not policy.is_file():
        return LoadedOpenVino(model, None)
    return LoadedOpenVino(model, insert_policy(model, load_policy(policy), precision=precision, name=name))


def export_model(folder: Path, policy: Policy | None, out: Path, options: Mapping[str, str]) -> OpenVinoExport:
    """Export the model in a folder of Hugging Face's format, for the command line.

    Raises:
        ValueError: an option is unknown or invalid; also see `export_openvino`.
    """
    from transformers import AutoModelForCausalLM

    given = read_options(options, OPTIONS)
    all_logits = given.pop("logits", "last") == "all"
    openvino()
    check_new_folder(out)  # before the model is loaded
    model = from_folder(AutoModelForCausalLM, folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    return export_openvino(model, out, policy, all_logits=all_logits, tokenizer=folder, **given)


def _converted(model: nn.Module, policy: Policy | None, form: Form, all_logits: bool, cache: bool) -> tuple[Any, str]:
    if form == "portable" and cache:
        raise UnsupportedInputError("a portable export", {"openvino": ["it has no cache: use form='custom'"]})
    border = 0 if policy is None else policy.border
    if form == "portable" and border:
        reason = f"one graph has no border, and the policy is dense below {border} tokens: use form='custom'"
        raise UnsupportedInputError("a portable export", {"openvino": [reason]})
    if policy is not None and form != "custom" and not border and not cache:
        try:
            portable = Prompts(PortableModel(model, policy, last_logits=not all_logits))
            return convert_prefill(portable, traced_from=CHUNK + 1), "portable"
        except UnsupportedInputError:
            if form == "portable":
                raise
    converted = to_openvino(model, all_logits=all_logits, cache=cache)
    if policy is not None:
        insert_policy(converted.clone(), policy)  # refuse now what loading would refuse
    return converted, "custom"
