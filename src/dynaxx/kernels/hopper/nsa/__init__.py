"""Native Sparse Attention on Hopper, in Gluon."""
