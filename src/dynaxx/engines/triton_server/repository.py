# SPDX-License-Identifier: Apache-2.0
"""Write a model repository for Triton Inference Server.

model_repository/
  NAME/
    config.pbtxt     inputs, outputs, batching, streaming; may be edited
    1/
      model.py       seven lines that load `dynaxx.engines.triton_server.python_model`
      policy.json    the policy; new requests use a replaced file without a restart
      model/         weights and tokenizer in Hugging Face's format
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from dynaxx.engines.exporting import NUMBER, TEXT, Option, read_options
from dynaxx.policy import Policy, save_policy
from dynaxx.storage import new_folder

CONFIG = Template("""\
# Written by dynaxx. Triton's documentation explains each field.
name: "$name"
backend: "python"
max_batch_size: $max_batch_size

# Waiting requests run as one batch. A batch may contain prompts of different lengths.
dynamic_batching { max_queue_delay_microseconds: $queue_delay }

# true: tokens can be streamed; clients use gRPC streams, or generate and generate_stream over HTTP.
# false: one answer per request; clients can also use plain infer over HTTP and gRPC.
model_transaction_policy { decoupled: $stream }

instance_group [ { kind: KIND_AUTO count: 1 } ]

input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] optional: true },
  { name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] optional: true allow_ragged_batch: true },
  { name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
  { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true },
  { name: "temperature" data_type: TYPE_FP32 dims: [ 1 ] optional: true },
  { name: "top_p" data_type: TYPE_FP32 dims: [ 1 ] optional: true },
  { name: "seed" data_type: TYPE_INT64 dims: [ 1 ] optional: true }
]
output [
  { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "output_ids" data_type: TYPE_INT64 dims: [ -1 ] },
  { name: "finish_reason" data_type: TYPE_STRING dims: [ 1 ] }
]

parameters [
  { key: "dtype" value: { string_value: "$dtype" } },
  { key: "max_batch_tokens" value: { string_value: "$max_batch_tokens" } },
  { key: "follow_seconds" value: { string_value: "1" } }
]
""")

MODEL = '''\
# SPDX-License-Identifier: Apache-2.0
"""Load dynaxx's model for Triton. DYNAXX_PYTHONPATH lists package folders, because some servers ignore PYTHONPATH."""

import os
import sys

sys.path[:0] = [folder for folder in os.environ.get("DYNAXX_PYTHONPATH", "").split(os.pathsep) if folder]

from dynaxx.engines.triton_server.python_model import TritonPythonModel  # noqa: E402, F401
'''

OPTIONS = {
    "name": TEXT,
    "stream": Option("true or false", "(?i)true|false", lambda text: text.lower() == "true"),
    **dict.fromkeys(("max_batch_size", "max_batch_tokens", "queue_delay"), NUMBER),
    "dtype": TEXT,
}  # of `RepositorySettings`
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class RepositorySettings:
    """Settings of a repository, all of which are written to its config.pbtxt.

    Attributes:
        name: name of the model in Triton.
        stream: whether tokens can be streamed (Triton's decoupled mode).
        max_batch_size: maximum requests in a batch.
        max_batch_tokens: maximum tokens in a batch, including padding and answers. A larger batch is divided, and its
            shortest requests run first.
        queue_delay: microseconds that a request waits for others.
        dtype: data type of the weights; "auto" is bfloat16 on a GPU and float32 on a CPU.

    Raises:
        ValueError: a field has an invalid value.
    """

    name: str = "dynaxx"
    stream: bool = True
    max_batch_size: int = 16
    max_batch_tokens: int = 65536
    queue_delay: int = 2000
    dtype: str = "auto"

    def __post_init__(self) -> None:
        """Check the settings."""
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", self.name, flags=re.ASCII):
            raise ValueError(f"`name` must be letters, digits, '.', '-' and '_', got {self.name!r}")
        for field, least in (("max_batch_size", 1), ("max_batch_tokens", 1), ("queue_delay", 0)):
            if getattr(self, field) < least:
                raise ValueError(f"`{field}` must be >= {least}, got {getattr(self, field)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}, got {self.dtype!r}")


def write_repository(
    model: Path | str, policy: Policy | None, out: Path | str, settings: RepositorySettings | None = None
) -> dict[str, Any]:
    """Write a model repository for Triton Inference Server, with a Python backend that runs a policy.

    Args:
        model: folder in Hugging Face's format; it is copied.
        policy: policy for this model; None runs the model's own attention pattern on dynaxx's kernels.
        out: the repository's folder; other models in it do not change.
        settings: name, batching and streaming.

    Returns:
        A dict with "model", the model's folder in the repository, "name", "policy", whether it has one, and "stream".

    Raises:
        ValueError: `out` already contains a model of this name, or `model` is not a model folder.
        PolicyError, UnsupportedInputError: see `dynaxx.apply`; nothing is written.
    """
    settings = settings or RepositorySettings()
    source, target = Path(model), Path(out) / settings.name
    if not (source / "config.json").is_file():
        raise ValueError(f"`model` must be a folder with a config.json, as save_pretrained writes it, got {source}")
    if target.exists():
        raise ValueError(f"{target} already exists: remove it, or choose another folder or name")
    _check(source, policy)
    with new_folder(target) as unfinished:
        _fill(unfinished, source, policy, settings)
    return {"model": str(target), "name": settings.name, "policy": policy is not None, "stream": settings.stream}


def export_model(model: Path, policy: Policy | None, out: Path, options: Mapping[str, str]) -> dict[str, Any]:
    """Write a repository for `dynaxx export --format triton`; `options` are fields of `RepositorySettings` as text.

    Raises:
        ValueError: an option does not exist or has an invalid value; also see `write_repository`.
    """
    return write_repository(model, policy, out, RepositorySettings(**read_options(options, OPTIONS)))


def _fill(folder: Path, source: Path, policy: Policy | None, settings: RepositorySettings) -> None:
    version = folder / "1"
    version.mkdir()
    shutil.copytree(source, version / "model")
    if policy is not None:
        save_policy(policy, version / "policy.json")
    (version / "model.py").write_text(MODEL, encoding="utf-8")
    values = {**vars(settings), "stream": str(settings.stream).lower()}
    (folder / "config.pbtxt").write_text(CONFIG.substitute(values), encoding="utf-8")


def _check(folder: Path, policy: Policy | None) -> None:
    """Apply the policy to a model of this shape without weights, so that errors occur before the export."""
    import torch
    import transformers

    from dynaxx.integrations.transformers import apply
    from dynaxx.integrations.transformers.loading import from_config, from_folder

    config = from_folder(transformers.AutoConfig, folder)
    with torch.device("meta"):
        model = from_config(transformers.AutoModelForCausalLM, config, attn_implementation="sdpa")
    apply(model.eval(), policy).remove()
