# SPDX-License-Identifier: Apache-2.0
"""NaN and infinity in q, k or scores reach the output of attention, as in dense attention; no row becomes zero."""

import pytest
import torch

import dynaxx as dx
from dynaxx.selection.scorers import Scorer

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SCORERS = [
    dx.MeanPool(), dx.MeanQuery(), dx.AntiDiagonal(), dx.LastQueryProbe(), dx.TileQueries(), dx.SimHash(), dx.MinMax(),
]  # fmt: skip
BUDGETS = [lambda scorer, per: dx.TopK(0.3, scorer=scorer, per=per), lambda scorer, per: dx.TopP(0.8, scorer, per),
           lambda scorer, per: dx.Threshold(0.1, scorer=scorer, per=per)]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scorer", SCORERS, ids=lambda scorer: type(scorer).__name__)
@pytest.mark.parametrize("budget", BUDGETS, ids=["top_k", "top_p", "threshold"])
@pytest.mark.parametrize(("of_q", "at", "value"), [(True, 130, torch.nan), (True, 130, torch.inf),
                                                   (False, 70, torch.nan), (False, 70, torch.inf),
                                                   (True, slice(None), torch.nan)])  # fmt: skip
def test_no_row_becomes_zero(budget, scorer, of_q, at, value, device):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 256, heads, 32, device=device) for heads in (4, 2, 2))
    (q if of_q else k)[0, at] = value
    for per in ("group", "head"):
        layout = dx.select_blocks(q, k, budget(scorer, per), block_size=32)
        out = dx.sparse_attention(q, k, v, layout)
        assert not (out == 0).all(-1).any()
        if of_q:
            assert out[0, at].isnan().any(-1).all()


class Broken(Scorer):
    """Scores of NaN for one q block."""

    def prepare(self, q, k, grid, scale, *, memory_budget=0):
        scores = torch.zeros(q.shape[0], q.shape[2], grid.q_blocks, grid.kv_blocks, device=q.device)
        scores[:, :, 5] = torch.nan
        return lambda start, stop: scores[:, :, start:stop].clone()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("budget", BUDGETS, ids=["top_k", "top_p", "threshold"])
def test_a_scorer_that_returns_nan_leaves_no_row_empty(budget, device):
    q = torch.randn(1, 256, 2, 32, device=device)
    layout = dx.select_blocks(q, q, budget(Broken(), "head"), block_size=32)
    assert (layout.kv_indptr.diff(dim=-1)[..., : layout.q_blocks] > 0).all()
