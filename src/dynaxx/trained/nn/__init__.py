# SPDX-License-Identifier: Apache-2.0
"""Attention modules for training: a static pattern, NSA, MoBA, InfLLM-V2, an indexer."""

from dynaxx.lazy import renamed
from dynaxx.trained.nn.cache import LayerCache
from dynaxx.trained.nn.compression import MeanCompression, MlpCompression, WeightedCompression
from dynaxx.trained.nn.indexed import IndexedSparseAttention, Indexer, IndexerOutput
from dynaxx.trained.nn.nsa import NativeSparseAttention
from dynaxx.trained.nn.projection import ProjectedAttention, rotate
from dynaxx.trained.nn.sparse import MixtureOfBlockAttention, SparseAttention, SwitchableAttention
from dynaxx.trained.nsa.spans import NsaSizes

__all__ = [
    "IndexedSparseAttention",
    "Indexer",
    "IndexerOutput",
    "LayerCache",
    "MeanCompression",
    "MixtureOfBlockAttention",
    "MlpCompression",
    "NativeSparseAttention",
    "NsaSizes",
    "ProjectedAttention",
    "SparseAttention",
    "SwitchableAttention",
    "WeightedCompression",
    "rotate",
]

__getattr__ = renamed(__name__, {"NativeCache": "LayerCache", "NativeSizes": "NsaSizes"})  # names of 0.1.0
