# SPDX-License-Identifier: Apache-2.0
"""Continuous batching of transformers: its layers, the state of a step, and decoding under a policy."""
