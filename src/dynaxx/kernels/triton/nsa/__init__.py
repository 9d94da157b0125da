"""Native Sparse Attention in Triton: the portable backend's entry points, and decoding."""
