# SPDX-License-Identifier: Apache-2.0
"""Calls that are checked once and then replayed: attention of a layer, and decoding steps.

A call gets faster with each repetition, by checking less:

    first      checked, backend chosen, launches computed          `sparse_attention`, `sparse_decode`
    prepared   form compared, recording found by strides           `Prepared`, `PreparedStep`
    replayed   form compared, addresses passed to the recording    `LayerReplay`, `StepReplay`: other layers of one pass

The files:

    layer  attention by a rule or over a layout
    step   a decoding step over a contiguous cache
"""
