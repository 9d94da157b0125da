# SPDX-License-Identifier: Apache-2.0
"""Code that the GPU backends share: launching kernels, scheduling long rows, native sparse attention in Triton."""
