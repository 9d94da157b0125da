"""Native Sparse Attention in Triton."""
