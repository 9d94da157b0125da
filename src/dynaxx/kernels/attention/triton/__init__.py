# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention in Triton, forward and backward."""
