# SPDX-License-Identifier: Apache-2.0
"""Decoding over paged caches in Triton: select pages, attend, merge."""
