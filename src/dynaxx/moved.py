# SPDX-License-Identifier: Apache-2.0
"""Import paths and names of 0.1.0: each works for one version, with a warning that names the new place."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# New places of the modules of 0.1.0, both relative to `dynaxx`; what lies below them moved along.
MOVED = {
    "integrations.transformers.nsa_cache": "trained.transformers.nsa_llama",
    "integrations.transformers.nsa_llama": "trained.transformers.nsa_llama",
    "layout.nsa": "trained.nsa.spans",
    "nn": "trained.nn",
    "ops.nsa": "trained.nsa.attention",
    "ops.nsa_decode": "trained.nsa.decode",
    "ops.selected": "trained.selected",
}

# Names that `dynaxx` offered in 0.1.0, beside those of `trained`, by the module that offers them now.
NAMES = {
    "layout": ("PackedLayout", "pack_layouts"),
    "layout.paging": ("ExactTokens", "PageSummaries", "quantize_pages"),
    "ops": ("SparseAttentionOutput",),
    "ops.autotune": ("autotune",),
    "ops.buckets": ("Bucket", "Request", "attend_in_buckets", "bucket_by_length"),
    "ops.explain": ("explain_decode", "explain_selection"),
    "patterns": ("content_tokens",),
    "patterns.compressed": ("Compressed",),
    "selection.packed": ("select_packed_blocks",),
    "selection.pages": ("PagePlan",),
}
# Names of 0.1.0 that have changed since.
RENAMED = {
    "NativeSizes": "NsaSizes",
    "native_decode": "nsa_decode",
    "native_spans": "nsa_spans",
    "select_native": "select_nsa",
}
# Names of 0.1.0 that are gone, and what serves in their place.
GONE = {
    "ClusterGlobals": "TopK",
    **dict.fromkeys(("KeyClusters", "LastQueryProbe", "SimHash", "TwoStage"), "MeanQuery"),
}


def moved_name(name: str) -> Any:
    """Return what `dynaxx.NAME` meant, and warn with its new place.

    Raises:
        AttributeError: `dynaxx` never had the name, or has lost it; the message then says what serves instead.
    """
    new = RENAMED.get(name, name)
    names = {**NAMES, "trained": importlib.import_module("dynaxx.trained").__all__}
    module = next((f"dynaxx.{module}" for module, offered in names.items() if new in offered), None)
    if module is None:
        instead = f"; it is gone, use `dynaxx.{GONE[name]}`" if name in GONE else ""
        raise AttributeError(f"module 'dynaxx' has no attribute {name!r}{instead}")
    warnings.warn(f"`dynaxx.{name}` is now `{module}.{new}`", DeprecationWarning, stacklevel=3)
    return getattr(importlib.import_module(module), new)


def new_path(name: str) -> str | None:
    """Return where the module that was called `name` lies now; None if it did not move."""
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        place = MOVED.get(".".join(parts[1:end]))
        if place is not None:
            return ".".join([parts[0], place, *parts[end:]])
    return None


class _Alias(Loader):
    def __init__(self, path: str) -> None:
        self.path = path

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Let the old name stand for the module at its new path."""
        sys.modules[module.__name__] = importlib.import_module(self.path)


class MovedModules(MetaPathFinder):
    """Find modules by their paths of earlier versions. It stands first, because folders that moved have both names."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return a spec for the module at its new path; None for all other modules."""
        new = new_path(name) if name.startswith("dynaxx.") else None
        if new is None:
            return None
        warnings.warn(f"`{name}` is now `{new}`", DeprecationWarning, stacklevel=2)
        return ModuleSpec(name, _Alias(new))
