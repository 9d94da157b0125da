# SPDX-License-Identifier: Apache-2.0
"""NaN and infinity in q, k or scores reach the output of attention, as in dense attention; no row becomes zero."""

import pytest
import torch

import dynaxx as dx
from dynaxx.selection import TileQueries
from dynaxx.selection.scorers import Scorer

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SCORERS = [
    dx.MeanPool(), dx.MeanQuery(), dx.AntiDiagonal(), TileQueries(), dx.MinMax(),
]  # fmt: skip
BUDGETS = [lambda scorer, per: dx.TopK(0.3, scorer=scorer, per=per), lambda scorer, per: dx.TopP(0.8, scorer, per),
           lambda scorer, per: dx.Threshold(0.1, scorer=scorer, per=per)]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scorer", SCORERS, ids=lambda scorer: type(scorer).__name__)
@pytest.mark.parametrize("budget", BUDGETS, ids=["top_k", "top_p", "threshold"])
@pytest.mark.parametrize(("of_q", "at", "value"), [(True, 70, torch.nan), (True, 70, torch.inf),
                                                   (False, 40, torch.nan), (False, 40, torch.inf),
                                                   (True, slice(None), torch.nan)])  # fmt: skip
def test_no_row_becomes_zero(budget, scorer, of_q, at, value, device):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 128, heads, 32, device=device) for heads in (4, 2, 2))
    (q if of_q else k)[0, at] = value
    for per in ("group", "head"):
        layout = dx.select_blocks(q, k, budget(scorer, per), block_size=16)
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [120, 1000])
def test_a_decoding_step_with_nan_gives_nan(tokens, device):
    torch.manual_seed(0)
    pages = -(-tokens // 16)
    k, v = (torch.randn(2 * pages, 16, 2, 32, device=device) for _ in range(2))
    q = torch.randn(2, 1, 4, 32, device=device)
    q[0] = torch.nan
    table = torch.arange(2 * pages, dtype=torch.int32, device=device).view(2, pages)
    used = torch.full((2,), tokens, dtype=torch.int32, device=device)
    cache = dx.summarize_pages(dx.PagedCache(k, v, used, table))
    some = torch.tensor([0, 2, 6], dtype=torch.int32, device=device).expand(2, 2, 3).contiguous()
    for chosen in (None, some, dx.PageBudget(0.3)):
        out = dx.sparse_decode(q, cache, chosen)
        assert out[0].isnan().all()
        assert out[1].isfinite().all()
    k[1, 3] = torch.nan
    out = dx.sparse_decode(torch.randn_like(q), dx.PagedCache(k, v, used, table))
    assert out[0].isnan().all()
    assert out[1].isfinite().all()
