# SPDX-License-Identifier: Apache-2.0
"""Attention over tokens that each query chooses, and the indexers that choose them."""
