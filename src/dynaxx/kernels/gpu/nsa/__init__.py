"""Native Sparse Attention in Triton, shared by the GPU backends."""
