# SPDX-License-Identifier: Apache-2.0
"""Block scores and block selection in Triton."""
