# SPDX-License-Identifier: Apache-2.0
"""Attention over tokens that each query chooses: what both GPU backends share."""
