# SPDX-License-Identifier: Apache-2.0
"""Attention calls that equal an earlier one, and therefore skip planning.

`calls/interface.py:attention` and `calls/layer.py:Layer` try these steps in order, until one serves the call:

    1  the pass is a `DensePass`            the model's original attention runs, without a lookup
    2  an equal layer of this pass ran      its `DenseCall`, `RepeatedCall` or `RepeatedStep` runs again
    3  an equal call of a dense pass ran    a new `DenseCall` runs; only its mask is made
    4  an equal call was prepared           the call is planned; its recording is replayed
    5  nothing equal is known               the call is planned and run, and kept for steps 1 to 4

Steps 2 and 3 find a call by its `Signature` (`calls/arguments.py`), as all caches of a pass do. What else matters, such
as measurements and failures, is asked by `run`, which returns None if the call must be planned. No step changes a
result.

The files:

    keep          where a pass keeps its calls
    dense_calls   dense calls that equal layers of a pass repeat
    dense_passes  passes whose calls are all dense, repeated by later passes of the same length
    prepared      sparse calls and decoding steps that equal layers repeat as one recording
"""
