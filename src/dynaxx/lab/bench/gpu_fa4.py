"""The causal mask as FlashAttention 4 takes it: a function in CuTe's language, which must be there to import this."""

import cutlass.cute as cute


@cute.jit
def causal_mask(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    """Whether a query sees a key."""
    return kv_idx <= q_idx
