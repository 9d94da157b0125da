# SPDX-License-Identifier: Apache-2.0
"""Pure functions on tensors, a folder per operator, which `ops` checks the arguments of and calls.

An operator's `contract` names the functions of a backend, with their parameters and results. They do not check
arguments, keep state or use autograd. Its `reference` defines every result in torch; the other backends are tested
against it. `registry` lists the backends of each operation; asking it why one cannot serve loads no compiler.

Letters of shapes: B batch; N queries, M keys; T queries of all packed sequences; Hq, Hk, Hs query, kv and selection
heads; D head_dim of q and k, E head_dim of v; n slots; L compressed tokens.
"""
