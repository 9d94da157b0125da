# SPDX-License-Identifier: Apache-2.0
"""A selection by mean queries that were computed before chooses the blocks of one that gets the queries."""

from unittest import mock

import pytest
import torch

import dynaxx as dx
from dynaxx.distributed import summaries
from dynaxx.distributed.summaries import by_mean_queries, mean_queries
from dynaxx.layout import BlockGrid
from dynaxx.selection.device import select_on_device
from interpreter import DEVICE, run_interpreted, runs_here, starts_interpreter

pytest.importorskip("triton")


@pytest.mark.slow  # fingerprints show that kernels are those that passed
@starts_interpreter
def test_under_the_interpreter():
    run_interpreted(__file__)


@runs_here
@pytest.mark.parametrize("selector", [dx.TopK(0.3), dx.TopK(2, per="head"), dx.TopP(0.7)], ids=str)
def test_the_same_blocks_are_chosen(selector):
    from dynaxx.kernels.selection.triton import query_scores

    torch.manual_seed(0)
    q, k = (torch.randn(1, n, heads, 32, device=DEVICE).half() for n, heads in ((256, 4), (500, 2)))
    grid, scale = BlockGrid(256, 500, (32, 32), True), 0.2
    means = mean_queries(q, selector, 32, scale)
    assert means.shape == (1, 8, 4, 32)
    with mock.patch.object(summaries, "query_kernels", return_value=query_scores):  # also on a CPU
        for some, own in ((slice(0, 4), slice(0, 2)), (slice(2, 4), slice(1, 2))):
            got, wanted = (
                select_on_device(x[:, :, some], k[:, :, own], dx.Sink(32), chooser, grid, scale, 1 << 24)
                for x, chooser in ((means, by_mean_queries(selector)), (q, selector))
            )
            assert torch.equal(got.to_dense(), wanted.to_dense())


def test_other_scores_have_no_mean_queries():
    q = torch.randn(1, 64, 2, 16)
    for scorer in (dx.MeanPool(), dx.MinMax()):
        assert mean_queries(q, dx.TopK(2, scorer), 32, 1.0) is None
