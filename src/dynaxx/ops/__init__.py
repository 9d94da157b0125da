# SPDX-License-Identifier: Apache-2.0
"""Public functions. They document and check their arguments, choose a backend and call it; they contain no math."""

from dynaxx.ops.attention import SparseAttentionOutput, sparse_attention
from dynaxx.ops.explain import explain
from dynaxx.ops.merge import merge_states

__all__ = ["SparseAttentionOutput", "explain", "merge_states", "sparse_attention"]
