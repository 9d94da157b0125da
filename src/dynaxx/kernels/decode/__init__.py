# SPDX-License-Identifier: Apache-2.0
"""A decode step over a cache: the definition, and a backend for each kind of device."""
