# SPDX-License-Identifier: Apache-2.0
"""The definitions of attention over chosen tokens, indexers and their loss, in torch."""
