# SPDX-License-Identifier: Apache-2.0
"""Splitting of long rows and columns into parts, and combination of the parts' results."""
