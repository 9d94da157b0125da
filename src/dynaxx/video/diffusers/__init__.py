# SPDX-License-Identifier: Apache-2.0
"""Policies in the transformers of diffusers.

The files:

    families    where each family's grid and text are
    processors  attention processors whose attention function a policy replaces
    handle      `apply` and `Handle`
"""
