# SPDX-License-Identifier: Apache-2.0
"""Attention calls that equal an earlier one, and therefore skip planning: dense calls, and prepared sparse calls.

    first call of a kind --> planned, run, and kept --> later layers of the pass: one lookup, then the call itself

`keys` says which calls are equal. Within a pass a call is found by its kind of layer, mask and window. Anything unusual
about a call makes the lookup return None, and the call is planned.
"""
