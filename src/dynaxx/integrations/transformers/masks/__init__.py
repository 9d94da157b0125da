# SPDX-License-Identifier: Apache-2.0
"""The masks of transformers.

The files:

    rules   reads the rule of a mask from its function
    lazy    a mask that is computed only if it is read
    traced  the parts of a causal mask in code that torch.compile traces
    runs    finds sequences in a mask
"""
