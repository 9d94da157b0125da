# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention (arXiv 2502.11089): sizes and spans, attention, decode steps and kernels."""
