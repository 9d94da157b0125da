# SPDX-License-Identifier: Apache-2.0
"""Public functions. They document and check their arguments, choose a backend and call it; they contain no math.

The files:

    attention                         `sparse_attention`; `checks`, `dispatch` and `autograd` are its steps
    position_bias                     biases of its scores by position
    decode                            `sparse_decode`; `decode_checks` checks and dispatches
    buckets, autotune, explain        requests, tile sizes and backends
    library, flops                    compilers, tracers and counters
    prepared/                         calls that are checked once and replayed
"""

from dynaxx.ops.attention import SparseAttentionOutput, column_sums, merge_states, sparse_attention
from dynaxx.ops.explain import explain

__all__ = ["SparseAttentionOutput", "column_sums", "explain", "merge_states", "sparse_attention"]
