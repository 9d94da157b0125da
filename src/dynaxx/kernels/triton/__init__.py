# SPDX-License-Identifier: Apache-2.0
"""The portable GPU backend, in Triton: every block size, head_dim, group size and layout, forward and backward."""
