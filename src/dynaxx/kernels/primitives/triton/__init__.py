# SPDX-License-Identifier: Apache-2.0
"""Device functions that the portable Triton kernels share."""
