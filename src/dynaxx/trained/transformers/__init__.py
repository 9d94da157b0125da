# SPDX-License-Identifier: Apache-2.0
"""Llamas of transformers with trained sparse attention, and conversion of dense ones."""
