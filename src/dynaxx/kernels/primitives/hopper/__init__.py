# SPDX-License-Identifier: Apache-2.0
"""Device functions and descriptors that the Hopper kernels share."""
