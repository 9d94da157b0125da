# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention in Triton, shared by the GPU backends."""
