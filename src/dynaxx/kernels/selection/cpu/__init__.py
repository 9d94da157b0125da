# SPDX-License-Identifier: Apache-2.0
"""Scores and choices of blocks on the C++ core."""
