# SPDX-License-Identifier: Apache-2.0
"""Backends: pure functions on tensors, without checks, state or autograd.

`contract` lists the functions of each operation, `registry` finds a backend for a problem, and `problem` describes
problems to backends. `reference` defines every result in torch; `cpu`, `triton` and `hopper` are tested against it;
`gpu` contains the code that `triton` and `hopper` share.
"""
