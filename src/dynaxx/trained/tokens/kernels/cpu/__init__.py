# SPDX-License-Identifier: Apache-2.0
"""Chosen tokens on the C++ core."""
