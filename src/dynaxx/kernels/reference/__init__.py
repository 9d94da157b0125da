# SPDX-License-Identifier: Apache-2.0
"""The definition of every operation, in torch."""
