# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention in Triton: the portable backend's entry points, and decoding."""
