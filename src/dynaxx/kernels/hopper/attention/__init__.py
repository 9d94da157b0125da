"""Block-sparse attention on Hopper, forward and backward, in Gluon."""
