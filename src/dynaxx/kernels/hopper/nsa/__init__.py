# SPDX-License-Identifier: Apache-2.0
"""Native Sparse Attention on Hopper, in Gluon."""
