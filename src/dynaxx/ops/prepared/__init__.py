# SPDX-License-Identifier: Apache-2.0
"""Calls that are checked once and then replayed: attention of a layer, and decoding steps."""
