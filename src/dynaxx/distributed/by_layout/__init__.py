# SPDX-License-Identifier: Apache-2.0
"""One rank's computation of attention over a layout whose sequence is split, stage by stage.

The files:

    forward   the forward pass: inner rows and own tokens in transit; edge rows, which visit blocks of other ranks
    backward  the backward pass, which also returns gradients to the owners of keys and values
"""
