# SPDX-License-Identifier: Apache-2.0
"""Code that all engine adapters share: routing, paged layers, counting, the guard, background work."""
