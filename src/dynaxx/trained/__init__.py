# SPDX-License-Identifier: Apache-2.0
"""Models that are born sparse: native sparse attention, mixture of blocks, chosen tokens and their indexers.

Each operator has a folder with its kernels; `nn` has the modules of models. The core never imports this wing.
"""
