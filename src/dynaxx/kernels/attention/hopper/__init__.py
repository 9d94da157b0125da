# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention on Hopper, forward and backward, in Gluon.

To serve another head_dim, add it to `HEAD_DIMS` in `kernels/support/hopper.py`, set its tiles and stages in
`config.py`, and compile it with `tests/kernels/test_compiled.py`, which shows spilled registers without a GPU.
`forward.py` and `backward.py` choose the kernels; `*_produce.py` and `*_consume.py` are the roles of their warps.
"""
