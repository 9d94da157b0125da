"""Decoding over paged caches in Triton: choose pages, attend, merge."""
