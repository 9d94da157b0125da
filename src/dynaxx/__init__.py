# SPDX-License-Identifier: Apache-2.0
"""Practical sparse attention: measure, choose, prove, run and watch it.

Names are loaded when they are first used, so `import dynaxx` costs little and loads torch alone.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from dynaxx.moved import MovedModules, moved_name

__version__ = "0.2.0"

WINGS = ("trained", "engines", "distributed", "video")

_SOURCES = {
    "dynaxx.errors": ("PolicyError", "UnsupportedInputError"),
    "dynaxx.layout": ("BlockLayout",),
    "dynaxx.layout.paging": ("PagedCache",),
    "dynaxx.patterns": (
        "Causal",
        "Dilated",
        "Documents",
        "Full",
        "GlobalContent",
        "GlobalTokens",
        "LastQueries",
        "LocalBlocks",
        "Pattern",
        "RandomBlocks",
        "Sink",
        "SlidingWindow",
        "Strided",
        "bigbird",
        "longformer",
        "streaming",
    ),
    "dynaxx.patterns.packed": ("packed_layout",),
    "dynaxx.selection": (
        "AntiDiagonal",
        "Hybrid",
        "MeanPool",
        "MeanQuery",
        "MinMax",
        "Recall",
        "Selector",
        "Threshold",
        "TopK",
        "TopP",
        "recall",
        "select_blocks",
    ),
    "dynaxx.selection.pages": ("PageBudget",),
    "dynaxx.ops": ("explain", "merge_states", "sparse_attention"),
    "dynaxx.ops.position_bias": ("Alibi", "T5Bias"),
    "dynaxx.ops.decode": ("select_pages", "sparse_decode", "summarize_pages"),
    "dynaxx.policy": ("Policy", "Rule", "load_policy", "save_policy"),
    "dynaxx.integrations.transformers": ("apply",),
}
_SOURCE_OF = {name: source for source, names in _SOURCES.items() for name in names}

__all__ = ["__version__", *_SOURCE_OF]

sys.meta_path.insert(0, MovedModules())


def __getattr__(name: str) -> Any:
    if name in WINGS:
        return importlib.import_module(f"dynaxx.{name}")
    source = _SOURCE_OF.get(name)
    if source is None:
        return moved_name(name)
    value = getattr(importlib.import_module(source), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
