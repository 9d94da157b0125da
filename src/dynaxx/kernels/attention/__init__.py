# SPDX-License-Identifier: Apache-2.0
"""Attention over a layout: the definition, and a backend for each kind of device."""
