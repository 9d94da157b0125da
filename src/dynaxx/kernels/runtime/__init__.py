# SPDX-License-Identifier: Apache-2.0
"""Launching of compiled kernels with little host time: arguments, launcher, launch cache, recorder."""
