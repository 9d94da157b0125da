# SPDX-License-Identifier: Apache-2.0
"""The Hopper backend, in Gluon with TMA and wgmma: blocks of 64 and 128, head_dim up to 256, bf16 and fp16."""
