"""Launch compiled kernels with little host time: arguments, launcher, launch cache, recorder."""
