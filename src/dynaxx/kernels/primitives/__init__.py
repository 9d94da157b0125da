# SPDX-License-Identifier: Apache-2.0
"""Device functions that kernels of several operators share."""
