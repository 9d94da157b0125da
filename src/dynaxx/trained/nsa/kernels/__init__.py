# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention: the definition, and a backend for each kind of device."""
