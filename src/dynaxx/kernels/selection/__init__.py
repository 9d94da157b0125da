# SPDX-License-Identifier: Apache-2.0
"""Scores and choices of blocks: kernels of each backend; torch serves the rest."""
