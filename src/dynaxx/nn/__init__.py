# SPDX-License-Identifier: Apache-2.0
"""Attention modules for training: a static pattern, NSA, MoBA, InfLLM-V2, an indexer."""

from dynaxx.layout.nsa import NsaSizes
from dynaxx.lazy import renamed
from dynaxx.nn.cache import LayerCache
from dynaxx.nn.compression import MeanCompression, MlpCompression, WeightedCompression
from dynaxx.nn.indexed import IndexedSparseAttention, Indexer, IndexerOutput
from dynaxx.nn.moba import MixtureOfBlockAttention
from dynaxx.nn.nsa import NativeSparseAttention
from dynaxx.nn.projection import ProjectedAttention, rotate
from dynaxx.nn.sparse import SparseAttention
from dynaxx.nn.switchable import SwitchableAttention

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
