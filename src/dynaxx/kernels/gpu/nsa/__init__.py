# SPDX-License-Identifier: Apache-2.0
"""Native Sparse Attention in Triton, shared by the GPU backends."""
