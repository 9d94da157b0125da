# SPDX-License-Identifier: Apache-2.0
"""Adapters to other libraries, through their official extension points only."""
