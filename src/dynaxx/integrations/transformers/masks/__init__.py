# SPDX-License-Identifier: Apache-2.0
"""The masks of transformers: `rules` reads their rules, `lazy` computes them only if needed, `runs` finds sequences."""
