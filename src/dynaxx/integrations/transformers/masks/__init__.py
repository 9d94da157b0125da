# SPDX-License-Identifier: Apache-2.0
"""The masks of transformers.

The files:

    rules   reads the rule of a mask from its function
    lazy    a mask that is computed only if it is read, and its parts in traced code
    runs    finds sequences in a mask
"""
