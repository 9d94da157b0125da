"""What the GPU backends share: launching kernels and scheduling long rows."""
