"""Attention modules to train with: a static pattern, Native Sparse Attention, Mixture of Block Attention. Thin."""

from dynaxx.layout.native import NativeSizes
from dynaxx.nn.cache import NativeCache
from dynaxx.nn.compression import MeanCompression, MlpCompression, WeightedCompression
from dynaxx.nn.moba import MixtureOfBlockAttention
from dynaxx.nn.native import NativeSparseAttention
from dynaxx.nn.projection import ProjectedAttention, rotate
from dynaxx.nn.sparse import SparseAttention

__all__ = [
    "MeanCompression",
    "MixtureOfBlockAttention",
    "MlpCompression",
    "NativeCache",
    "NativeSizes",
    "NativeSparseAttention",
    "ProjectedAttention",
    "SparseAttention",
    "WeightedCompression",
    "rotate",
]
