# SPDX-License-Identifier: Apache-2.0
"""Attention over blocks that a rule selects, with the sequence split and the keys of all ranks gathered.

The kv heads are processed in stages: while the blocks of one stage are selected and computed, the keys and values of
the next are in transit. A rank's queries form runs of neighbouring queries, and each run has its own selection. A
run that sees only own keys, such as the first one of a zigzag, does not wait for them.

The files:

    attention  the public function, what its calls of one form share, and the stages of both passes
    settings   the arguments of a call other than its tensors; the selection for one run
"""
