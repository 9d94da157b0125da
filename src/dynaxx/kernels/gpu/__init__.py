# SPDX-License-Identifier: Apache-2.0
"""Shared by the GPU backends: launching kernels, scheduling long rows, Native Sparse Attention in Triton."""
