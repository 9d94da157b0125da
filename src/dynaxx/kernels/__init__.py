# SPDX-License-Identifier: Apache-2.0
"""Backends: pure functions on tensors, without checks, state or autograd.

`contract` names the functions of each operation, `registry` finds the backend that serves a problem, `problem` is what
a backend needs to know. `reference` defines every result in torch; `cpu`, `triton` and `hopper` are tested against it;
`gpu` holds what the last two share.
"""
