# SPDX-License-Identifier: Apache-2.0
"""The causal mask for FlashAttention 4: a function in CuTe's language, which must be installed to import this file."""

import cutlass.cute as cute


@cute.jit
def causal_mask(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    """Return whether a query sees a key."""
    return kv_idx <= q_idx
