# SPDX-License-Identifier: Apache-2.0
"""Attention calls that equal an earlier one, and therefore skip planning.

The files:

    keys          which calls of a pass are equal
    dense_calls   dense calls that equal layers of a pass repeat
    dense_passes  passes whose calls are all dense, repeated by later passes of the same length
    prepared      sparse calls and decoding steps that equal layers repeat as one recording

The first call of a kind is planned, run and kept. Later layers of the pass find it by their kind, mask and window, and
run it. Anything unusual about a call makes the lookup return None, and the call is planned.
"""
