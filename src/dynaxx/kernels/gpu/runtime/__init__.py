# SPDX-License-Identifier: Apache-2.0
"""Launch compiled kernels with little host time: arguments, launcher, launch cache, recorder."""
