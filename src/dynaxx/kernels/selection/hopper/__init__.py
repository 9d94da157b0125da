# SPDX-License-Identifier: Apache-2.0
"""Scores of blocks on Hopper, in Gluon."""
