# SPDX-License-Identifier: Apache-2.0
"""Page shares use the pages of decoding, dense attention costs nothing, and shares follow the costs."""

import pytest
import torch

import dynaxx as dx
from dynaxx.kernels.decode.reference import select_pages
from dynaxx.lab.tune import page_costs
from dynaxx.selection.pages import PageBudget
from tiny import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    pytest.importorskip("transformers")
    from dynaxx.lab.models import load_model

    return load_model(str(save_tiny_model(tmp_path_factory.mktemp("tiny"))), device="cpu").model


@pytest.mark.parametrize("bound", [1.0, 0.75])
@pytest.mark.parametrize("tokens", [192, 186])
def test_pages_are_ranked_as_decoding_ranks_them(bound, tokens):
    torch.manual_seed(0)
    q, k = torch.randn(tokens, 4, 16), torch.randn(tokens, 2, 16)
    budget, steps = PageBudget(0.3, sinks=16, window=40, bound=bound), 30
    queries = q[-steps:].unflatten(1, (2, 2)).movedim(0, 2) * 0.25
    stands = torch.arange(tokens)[-steps:]
    rank, forced, pages = page_costs._ranked(queries, k.transpose(0, 1), stands, budget, 16)
    for step, stand in enumerate(stands.tolist()):
        used = stand + 1
        own = k[None, :used].contiguous()
        cache = dx.summarize_pages(dx.PagedCache.contiguous(own, own, page_size=16), bound=bound, dtype=torch.float32)
        wanted = budget.wanted(2, torch.device("cpu"))
        found, _ = select_pages(q[None, stand : stand + 1], cache, wanted, 16, 40, cache.max_pages, 0.25)
        kept = forced[step] | (rank[:, step] < (0.3 * pages[step]).ceil())
        for head in range(2):
            expected = sorted(page for page in found[0, head].tolist() if page >= 0)
            assert kept[head].nonzero()[:, 0].tolist() == expected


def test_reading_everything_costs_nothing_and_less_costs_more(model):
    ids = torch.randint(3, 300, (1, 201))
    budget = PageBudget(0, sinks=8, window=16)
    options = dict(page_size=8, steps=40, layers=[1])
    (costs,) = page_costs.measure_page_costs(model, ids, budget, **options)
    assert costs.layer == 1
    assert costs.loss.shape == (len(page_costs.SHARES), 2)
    assert float(costs.loss[-1].max()) < 1e-12
    assert bool((costs.loss[0] > costs.loss[-2]).all())


def test_shares_go_to_the_heads_that_need_them():
    shares = torch.tensor(page_costs.SHARES, dtype=torch.float64)[:, None]
    wide, narrow = (1 - shares) ** 2, 1e-6 * (1 - shares)
    losses = [torch.cat([wide, narrow], dim=1)] * 2
    found = page_costs.shares_of([losses, losses], 0.125)
    assert [len(row) for row in found] == [2, 2]
    assert sum(map(sum, found)) / 4 <= 0.125 + 1e-9
    assert all(row[0] > row[1] for row in found)
