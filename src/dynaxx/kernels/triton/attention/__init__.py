"""Block-sparse attention in Triton, forward and backward."""
