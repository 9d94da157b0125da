# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention on Hopper, forward and backward, in Gluon."""
