# SPDX-License-Identifier: Apache-2.0
"""The order in which Hopper's indexer reads keys; needs no GPU."""

import pytest
import torch

choose = pytest.importorskip("dynaxx.trained.tokens.kernels.hopper.choose")
TokenSpans = pytest.importorskip("dynaxx.trained.tokens.spans").TokenSpans
COLUMN = torch.arange(64)
PLACE = COLUMN // 2 % 4 * 16 + COLUMN // 8 * 2 + COLUMN % 2  # as `indexer.keys_in_threads`


@pytest.mark.parametrize(
    ("ends_q", "ends_k"),
    [
        ((0, 9), (0, 64)),
        ((0, 9), (0, 200)),
        ((0, 3), (0, 1)),
        ((0, 5, 5, 9), (0, 100, 100, 165)),
        ((0, 4, 6), (0, 0, 9)),
    ],
)
def test_threads_have_neighbouring_keys(ends_q, ends_k):
    keys = torch.arange(ends_k[-1], dtype=torch.float32)
    k, scale, first = choose.keys_in_threads(keys[:, None].expand(-1, 8), keys, TokenSpans(ends_q, ends_k))
    assert torch.equal(k[:, 0], scale)
    assert len(scale) % 64 == 0
    for query, row in enumerate(first.tolist()):
        i = next(i for i in range(len(ends_q)) if ends_q[i] <= query < ends_q[i + 1])
        for start in range(0, ends_k[i + 1] - ends_k[i], 64):
            tile = scale[row + start : row + start + 64]
            key = ends_k[i] + start + PLACE
            assert torch.equal(tile[key < ends_k[i + 1]].long(), key[key < ends_k[i + 1]])
