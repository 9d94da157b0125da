# SPDX-License-Identifier: Apache-2.0
"""Practical sparse attention: measure, choose, prove, run and watch it.

Names are loaded when they are first used, so `import dynaxx` costs little and loads torch alone.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Any

from dynaxx.moved import MovedModules

__version__ = "0.2.0"

_SOURCES = {
    "dynaxx.errors": ("PolicyError", "UnsupportedInputError"),
    "dynaxx.layout": ("BlockLayout", "PackedLayout", "pack_layouts"),
    "dynaxx.trained.nsa.compressed_pages": ("CompressedPages",),
    "dynaxx.layout.paging.exact_tokens": ("ExactTokens",),
    "dynaxx.layout.paging": ("PageSummaries", "PagedCache", "quantize_pages"),
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
        "content_tokens",
        "longformer",
        "streaming",
    ),
    "dynaxx.selection": (
        "AntiDiagonal",
        "ClusterGlobals",
        "Hybrid",
        "KeyClusters",
        "LastQueryProbe",
        "MeanPool",
        "MeanQuery",
        "MinMax",
        "Recall",
        "Selector",
        "SimHash",
        "Threshold",
        "TileQueries",
        "TopK",
        "TopP",
        "TwoStage",
        "recall",
        "select_blocks",
    ),
    "dynaxx.patterns.packed": ("packed_layout",),
    "dynaxx.trained.tokens.choice": ("TopKTokens",),
    "dynaxx.selection.packed": ("select_packed_blocks",),
    "dynaxx.selection.pages": ("PageBudget",),
    "dynaxx.selection.page_plan": ("PagePlan",),
    "dynaxx.ops": ("SparseAttentionOutput", "explain", "merge_states", "sparse_attention"),
    "dynaxx.ops.explain": ("explain_decode", "explain_selection"),
    "dynaxx.ops.autotune": ("autotune",),
    "dynaxx.ops.decode": ("select_pages", "sparse_decode", "summarize_pages"),
    "dynaxx.trained.nsa.spans": ("NsaSizes", "nsa_spans"),
    "dynaxx.patterns.compressed": ("Compressed",),
    "dynaxx.trained.selected": ("explain_selected", "selected_attention"),
    "dynaxx.trained.tokens.steps.attend": ("selected_decode",),
    "dynaxx.trained.tokens.steps.choose": ("index_decode",),
    "dynaxx.trained.tokens.indexer": ("IndexLoss", "index_loss", "index_tokens"),
    "dynaxx.trained.nsa.attention": ("compress", "compression_windows", "native_sparse_attention", "select_nsa"),
    "dynaxx.trained.nsa.decode": ("compress_pages", "nsa_decode"),
    "dynaxx.ops.buckets": ("Bucket", "Request", "attend_in_buckets", "bucket_by_length"),
    "dynaxx.policy": ("Policy", "Rule", "load_policy", "save_policy"),
    "dynaxx.integrations.transformers": ("apply",),
    "dynaxx.integrations.flash_attn": ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"),
    "dynaxx.engines.onnx": ("OnnxModel", "export_onnx"),
}
# Names of 0.1.0: they still work, with a warning, and are not listed.
_OLD_NAMES = {
    "NativeSizes": "NsaSizes",
    "native_decode": "nsa_decode",
    "native_spans": "nsa_spans",
    "select_native": "select_nsa",
}
_SOURCE_OF = {name: source for source, names in _SOURCES.items() for name in names}

__all__ = ["__version__", *_SOURCE_OF]

sys.meta_path.insert(0, MovedModules())


def __getattr__(name: str) -> Any:
    if name == "distributed":  # a room with a `sparse_attention` of its own
        return importlib.import_module("dynaxx.distributed")
    if name in _OLD_NAMES:
        warnings.warn(f"`dynaxx.{name}` is now `dynaxx.{_OLD_NAMES[name]}`", DeprecationWarning, stacklevel=2)
        name = _OLD_NAMES[name]
    if name not in _SOURCE_OF:
        raise AttributeError(f"module 'dynaxx' has no attribute {name!r}")
    value = getattr(importlib.import_module(_SOURCE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
