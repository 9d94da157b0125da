# SPDX-License-Identifier: Apache-2.0
"""Generation with a step of one length, of which this file plays the engine."""

import numpy as np
import pytest

from dynaxx.engines.portable.greedy import Greedy


class Counting(Greedy):
    """The next token of a sequence is its last plus one."""

    def _start(self):
        return lambda tokens: np.eye(100)[tokens + 1]


greedy = Counting().generate


def test_a_sequence_that_has_ended_stays_ended():
    ids = np.array([[3, 4], [0, 2], [7, 1]])
    mask = np.array([[1, 1], [0, 1], [1, 1]])
    found = list(greedy(ids, 9, attention_mask=mask, eos=6))
    assert np.stack(found, 1).tolist() == [[5, 6, 6, 6, 6], [3, 4, 5, 6, 6], [2, 3, 4, 5, 6]]
    assert [row.tolist() for row in greedy(ids[:1], 3)] == [[5], [6], [7]]
    assert list(greedy(ids, 0)) == []
    assert [row.shape for row in greedy(ids[:0], 2)] == [(0,)]


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        (np.array([1, 2]), None, r"`input_ids` must be \(batch, seqlen\), got \(2,\)"),
        (np.array([[1, 2]]), np.ones((1, 3)), "`attention_mask` must have the shape"),
        (np.array([[1, 2], [3, 4]]), np.array([[1, 1], [0, 0]]), "show a token of each prompt"),
    ],
)
def test_prompts_that_are_none_are_refused(ids, mask, message):
    with pytest.raises(ValueError, match=message):
        next(greedy(ids, 2, attention_mask=mask))
