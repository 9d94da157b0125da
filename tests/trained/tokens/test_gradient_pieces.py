# SPDX-License-Identifier: Apache-2.0
"""Which tiles write their rows of gradients in one launch, and where the rows lie."""

from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton")

from dynaxx.trained.tokens.kernels.gpu.gradients import _pieces_by_bytes, _row_begins
from dynaxx.trained.tokens.kernels.gpu.plan import list_rooms, query_tiles
from dynaxx.trained.tokens.spans import TokenSpans


@pytest.mark.parametrize("most", [1, 50, 1000, 10**6])
@pytest.mark.parametrize("tiles", [1, 3, 40, 300])
@pytest.mark.parametrize("wave", [1, 7, 132])
def test_pieces_cover_all_tiles_in_order(tiles, wave, most):
    before = [0]
    for i in range(tiles):
        before.append(before[-1] + i % 50)
    pieces = _pieces_by_bytes(before, most, 8, wave)
    assert [tile for some, _ in pieces for tile in some] == list(range(tiles))
    for place, (some, heads) in enumerate(pieces):
        used = before[some.stop] - before[some.start]
        assert len(some) == 1 or used * heads <= most
        assert 1 <= heads <= 8
        assert place == 0 or len(some) % wave == 0 or len(some) < wave


def test_no_tiles_make_no_pieces():
    assert _pieces_by_bytes([0], 100, 8, 4) == []


@pytest.mark.parametrize("own", [1, 3])
def test_rows_of_a_tile_begin_behind_those_of_the_tile_before(own):
    spans = TokenSpans((0, 70, 70, 100, 103), (0, 90, 95, 105, 400), 1)
    rooms = list_rooms(spans, 8, 20, torch.device("cpu"))
    tiles = query_tiles(spans, 8)
    for (first, count), (start, stop) in zip(tiles.tolist(), pairwise(rooms.before), strict=True):
        seen = int(spans.position[first + count - 1]) + 1
        assert stop - start == max(0, min(seen, 20 * count))
    some = range(2, 6)
    plan = type("Plan", (), {"rooms": rooms})
    want, total = [], 0
    for tile in some:
        for _ in range(own):
            want.append(total)
            total += rooms.before[tile + 1] - rooms.before[tile]
    assert _row_begins(plan, some, own).tolist() == want
