# SPDX-License-Identifier: Apache-2.0
"""The Hopper backend, in Gluon: blocks of 64 and 128, head_dim 64, 128 and 256, bf16 and fp16, by TMA and wgmma."""
