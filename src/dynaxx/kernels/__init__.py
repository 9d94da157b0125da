"""Backends. Each is a package with the same functions, pure on tensors: no checks, no state, no autograd.

`unsupported_reasons(problem)`            why it cannot serve; an empty list means it can
`attention_forward(q, k, v, layout, scale)`  -> (out, lse)
`attention_backward(do, dlse, q, k, v, out, lse, layout, scale)` -> (dq, dk, dv), where the backend has one

`dlse` is None where there is no gradient of lse. Both take `softcap=` last,
where the backend serves it; it is given only where there is one.

`reference` defines them; every other backend is tested against it.
"""
