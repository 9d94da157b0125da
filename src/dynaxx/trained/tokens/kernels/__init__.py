# SPDX-License-Identifier: Apache-2.0
"""Attention over chosen tokens, indexers and their loss: the definitions, and a backend for each kind of device."""
