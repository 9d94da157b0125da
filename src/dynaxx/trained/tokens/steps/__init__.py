# SPDX-License-Identifier: Apache-2.0
"""A decoding step over chosen tokens: `choose` them by an indexer, and `attend` to them."""
