# SPDX-License-Identifier: Apache-2.0
"""`dynaxx export --format openvino`: a folder with an OpenVINO model and its policy, and how it is loaded.

portable   the policy's static rules as plain operators in the model: OpenVINO alone runs it
custom     the dense model and the policy beside it: `load_openvino` puts dynaxx inside as it reads them
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import dynaxx
from dynaxx.arguments import typed
from dynaxx.errors import UnsupportedInputError
from dynaxx.integrations.openvino.convert import convert_prefill, to_openvino
from dynaxx.integrations.openvino.insert import insert_policy
from dynaxx.integrations.openvino.packages import openvino
from dynaxx.integrations.openvino.running import OpenVinoHandle
from dynaxx.integrations.portable import PortableModel
from dynaxx.integrations.portable.attention import CHUNK
from dynaxx.policy import Policy, load_policy, policy_digest, save_policy

Form = Literal["auto", "portable", "custom"]
MANIFEST = "dynaxx.json"
MODEL = "openvino_model.xml"
VERSION = 1
OPTIONS = ("cache", "form", "logits")


class OpenVinoExport(NamedTuple):
    """The files of an export, and its form.

    Attributes:
        folder: with `openvino_model.xml` and `.bin`, `dynaxx.json` and, for a policy, `policy.json`.
        form: "portable" or "custom".
        bytes: of all files.
    """

    folder: Path
    form: str
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {**self._asdict(), "folder": str(self.folder)}


class LoadedOpenVino(NamedTuple):
    """A model to compile, and the policy at work in it, None where OpenVINO alone runs it."""

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
) -> OpenVinoExport:
    """Write a decoder and its policy for OpenVINO, for prompts of any length.

    Args:
        model: a decoder of transformers, in eval mode, on a CPU.
        out: a folder that does not exist yet, or is empty; it appears when it is whole.
        policy: for this model. None exports it dense.
        form: "portable", "custom", or "auto": portable where every rule is static and there is no border, else custom.
        all_logits: return the logits of every token, and not of the last one alone.
        cache: keep the KV cache in the model's state, so that it generates; see `to_openvino`. Only in the custom form.

    Returns:
        What was written.

    Raises:
        ImportError: openvino is not installed.
        ValueError: there is something at `out`, or the model is in training mode or on a GPU.
        PolicyError: the policy was made for another model.
        UnsupportedInputError: this form cannot hold the policy rightly; with the reasons.
    """
    ov, target = openvino(), Path(out)
    check_target(target)
    converted, chosen = _converted(model, policy, form, all_logits, cache)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        ov.save_model(converted, temporary / MODEL, compress_to_fp16=False)
        if policy is not None:
            save_policy(policy, temporary / "policy.json")
        manifest = {
            "format": "dynaxx.openvino",
            "version": VERSION,
            "form": chosen,
            "cache": cache,
            "policy": None if policy is None else policy_digest(policy),
            "versions": {"dynaxx": dynaxx.__version__, "torch": torch.__version__, "openvino": ov.__version__},
        }
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        size = sum(file.stat().st_size for file in temporary.iterdir())
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return OpenVinoExport(target, chosen, size)


@typed
def load_openvino(folder: str | os.PathLike[str], *, precision: str = "f32", name: str = "openvino") -> LoadedOpenVino:
    """Read what `export_openvino` wrote, and put the policy inside where its form is "custom".

    Args:
        folder: of the export.
        precision: that it will be compiled for, as for `insert_policy`.
        name: of the model in metrics.

    Raises:
        ImportError: openvino is not installed.
        FileNotFoundError: this is no such folder.
        ValueError: a newer dynaxx wrote it.
    """
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: give a folder that dynaxx export --format openvino wrote")
    manifest = json.loads(path.read_text(encoding="utf-8"))
    if manifest.get("format") != "dynaxx.openvino" or manifest.get("version", 0) > VERSION:
        raise ValueError(f"{path} is of a newer dynaxx, or no export to OpenVINO: upgrade dynaxx, or export again")
    model, policy = openvino().Core().read_model(Path(folder) / MODEL), Path(folder) / "policy.json"
    if manifest["form"] != "custom" or not policy.is_file():
        return LoadedOpenVino(model, None)
    return LoadedOpenVino(model, insert_policy(model, load_policy(policy), precision=precision, name=name))


def export_model(folder: Path, policy: Policy | None, out: Path, options: Mapping[str, str]) -> OpenVinoExport:
    """Export the model in a folder of Hugging Face's format, for the command line.

    Raises:
        ValueError: an option that is not there, or has another form; and as `export_openvino`.
    """
    from transformers import AutoModelForCausalLM

    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise ValueError(f"--option {unknown[0]} is not one of {', '.join(OPTIONS)}")
    form, logits, cache = options.get("form", "auto"), options.get("logits", "last"), options.get("cache", "no")
    if form not in ("auto", "portable", "custom"):
        raise ValueError(f"--option form must be auto, portable or custom, got {form!r}")
    if logits not in ("last", "all"):
        raise ValueError(f"--option logits must be last or all, got {logits!r}")
    if cache not in ("no", "yes"):
        raise ValueError(f"--option cache must be yes or no, got {cache!r}")
    openvino()
    check_target(out)  # before the model is loaded
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    return export_openvino(
        model,
        out,
        policy,
        form=form,  # type: ignore[arg-type]
        all_logits=logits == "all",
        cache=cache == "yes",
    )


def check_target(path: Path) -> None:
    """Refuse a folder that holds something, before any work is done.

    Raises:
        ValueError: there is something.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"{path} is there already: remove it, or choose another folder")


class _Portable(nn.Module):
    """Logits of a prompt, its attention in plain operators."""

    def __init__(self, portable: PortableModel) -> None:
        super().__init__()
        self.portable = portable

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.portable(input_ids, [])[0]
        return logits


def _converted(model: nn.Module, policy: Policy | None, form: Form, all_logits: bool, cache: bool) -> tuple[Any, str]:
    if form == "portable" and cache:
        raise UnsupportedInputError("a portable export", {"openvino": ["it has no cache: use form='custom'"]})
    border = 0 if policy is None else max(policy.dense_below, policy.sparse_from or 0)
    if form == "portable" and border:
        reason = f"one graph has no border, and the policy is dense below {border} tokens: use form='custom'"
        raise UnsupportedInputError("a portable export", {"openvino": [reason]})
    if policy is not None and form != "custom" and not border and not cache:
        try:
            portable = _Portable(PortableModel(model, policy, last_logits=not all_logits))
            return convert_prefill(portable, traced_from=CHUNK + 1), "portable"
        except UnsupportedInputError:
            if form == "portable":
                raise
    converted = to_openvino(model, all_logits=all_logits, cache=cache)
    if policy is not None:
        insert_policy(converted.clone(), policy)  # refuse now what loading would refuse
    return converted, "custom"
