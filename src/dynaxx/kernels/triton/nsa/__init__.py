# SPDX-License-Identifier: Apache-2.0
"""Native Sparse Attention in Triton: the portable backend's entry points, and decoding."""
