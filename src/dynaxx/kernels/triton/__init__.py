"""The portable GPU backend, in Triton: every block size, head_dim, group and layout, forward and backward."""
