"""Device functions that the portable Triton kernels share."""
