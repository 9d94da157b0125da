# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention on Hopper, in Gluon."""
