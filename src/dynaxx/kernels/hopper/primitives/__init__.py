"""Device functions and descriptors that the Hopper kernels share."""
