# SPDX-License-Identifier: Apache-2.0
"""`dynaxx export --format tensorrt`: export to ONNX, then build engines from it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynaxx.engines.onnx import command as onnx_command
from dynaxx.engines.tensorrt.engines import EngineSettings, build_engines
from dynaxx.policy import Policy

NUMBERS = ("max_batch", "max_prompt", "max_cache")


def export_model(folder: Path, policy: Policy | None, out: Path, options: Mapping[str, str]) -> dict[str, Any]:
    """Build engines for the model in a folder of Hugging Face's format.

    Raises:
        ValueError: an option that is not there, or has another form; else as `export_onnx` and `build_engines`.
    """
    unknown = sorted(set(options) - {"compute_capability", *NUMBERS})
    if unknown:
        raise ValueError(f"--option {unknown[0]} is not one of {', '.join(('compute_capability', *NUMBERS))}")
    given: dict[str, Any] = {}
    for name, text in options.items():
        if name == "compute_capability":
            given[name] = tuple(text.split(","))
        elif re.fullmatch(r"\d{1,9}", text, flags=re.ASCII):
            given[name] = int(text)
        else:
            raise ValueError(f"--option {name} must be a number, got {text!r}")
    settings = EngineSettings(**given)
    with tempfile.TemporaryDirectory() as temporary:
        graphs = Path(temporary) / "onnx"
        onnx_command.export_model(folder, policy, graphs, {"form": "portable"})
        return build_engines(graphs, out, settings)
