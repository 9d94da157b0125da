# SPDX-License-Identifier: Apache-2.0
"""`index_decode` chooses as `index_tokens` does, over pages, and a step over chosen tokens is traced whole."""

import pytest
import torch

import dynaxx as dx
from dynaxx.kernels.rounding import to_fp8, to_int8

PRECISIONS = ["fp32", "bf16", "fp8", "int8"]


def pages(lengths, heads=3, dim=8, seqlen_q=1, page_size=16, seed=0):
    """Draw whole numbers in shuffled pages; scores are often equal, and unused memory holds NaN."""
    torch.manual_seed(seed)
    whole = lambda *shape: torch.randn(*shape).mul(1.3).round()
    batch, most = len(lengths), -(-max(lengths) // page_size) + 1
    table = torch.randperm(batch * most, dtype=torch.int32).view(batch, most)
    k = torch.full((batch * most, page_size, dim), torch.nan)
    for b, length in enumerate(lengths):
        rows = k[table[b].long()].flatten(0, 1)
        rows[:length] = whole(length, dim)
        k[table[b].long()] = rows.view(most, page_size, dim)
    used = torch.tensor(lengths, dtype=torch.int32)
    return whole(batch, seqlen_q, heads, dim), k, whole(batch, seqlen_q, heads), used, table


def scores_of(found, q, k, weights, precision, size):
    """Return the scores of each query's chosen blocks in fp64, in descending order, and -inf behind them."""
    round_rows = {"int8": to_int8, "fp8": to_fp8}[precision]
    (q, q_scale), (k, k_scale) = ((x.double(), scale.double()) for x, scale in map(round_rows, (q, k)))
    products = torch.einsum("thd,md,th,m->thm", q, k, q_scale, k_scale).relu()
    scores = torch.einsum("thm,th->tm", products, weights.double())
    seqlen_q, keys = scores.shape
    hidden = torch.arange(keys) > keys - seqlen_q + torch.arange(seqlen_q)[:, None]
    scores = torch.nn.functional.pad(scores.masked_fill(hidden, -torch.inf), (0, -keys % size), value=-torch.inf)
    blocks = torch.nn.functional.pad(scores.unflatten(1, (-1, size)).amax(2), (0, 1), value=-torch.inf)
    return blocks.gather(1, found[0, :, 0].long() % blocks.shape[1]).sort(1, descending=True).values


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("count", "size"), [(8, 1), (12, 4), (400, 1), (64, 8)])
@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_choices_are_those_of_index_tokens(precision, count, size, seqlen_q):
    q, k, weights, used, table = pages([100, 3, 250], seqlen_q=seqlen_q)
    choice = dx.trained.TopKTokens(count, block_size=size)
    got = dx.trained.index_decode(q, k, weights, choice, used, page_table=table, precision=precision)
    assert got.dtype == torch.int32
    assert got.shape == (3, seqlen_q, 1, choice.slots)
    for b, length in enumerate(used.tolist()):
        rows = k[table[b].long()].flatten(0, 1)[None]
        own, some = rows[:, :length], slice(b, b + 1)
        want = dx.trained.index_tokens(q[some], own, weights[some], choice, precision=precision, backend="reference")
        plain = dx.trained.index_decode(q[some], rows, weights[some], choice, used[some], precision=precision)
        for found in (got[some], plain):
            if precision in ("fp32", "bf16"):  # products of whole numbers are exact, products of scales are not
                assert torch.equal(found, want)
            else:  # then only blocks whose scores are equal but for rounding may take each other's place
                of_found, of_want = (scores_of(x, q[b], own[0], weights[b], precision, size) for x in (found, want))
                torch.testing.assert_close(of_found, of_want, rtol=1e-5, atol=1e-5)


def test_missing_pages_are_never_chosen():
    q, k, weights, used, table = pages([90, 60])
    table[0, 2] = -1
    got = dx.trained.index_decode(q, k, weights, dx.trained.TopKTokens(90), used, page_table=table)[0, 0, 0]
    assert sorted(got[got >= 0].tolist()) == [i for i in range(90) if not 32 <= i < 48]
    empty = dx.trained.index_decode(q, k, weights, dx.trained.TopKTokens(5), torch.zeros_like(used), page_table=table)
    assert (empty == -1).all()


def step(q, index, k, v, used, table):
    """A decoding step; the indexer's tensors are (q, k, weights)."""
    chosen = dx.trained.index_decode(*index, dx.trained.TopKTokens(24), used, page_table=table)
    out, lse = dx.trained.selected_decode(q, dx.PagedCache(k, v, used, table), chosen, return_lse=True)
    return out, lse, chosen


def step_inputs(device="cpu", dtype=torch.float32):
    index_q, index_k, weights, used, table = pages([100, 3, 250])
    q, k, v = torch.randn(3, 1, 8, 64), torch.randn(*index_k.shape[:2], 2, 64), torch.randn(*index_k.shape[:2], 2, 64)
    q, k, v = (x.to(device, dtype) for x in (q, k, v))
    return q, tuple(x.to(device) for x in (index_q, index_k, weights)), k, v, used.to(device), table.to(device)


def test_a_step_is_traced_without_a_graph_break():
    inputs = step_inputs()
    want = step(*inputs)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(x, y) for x, y in zip(compiled(*inputs), want, strict=True))
    longer = (*inputs[:4], inputs[4] + 2, inputs[5])
    assert all(torch.equal(x, y) for x, y in zip(compiled(*longer), step(*longer), strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_cuda_graph_follows_lengths_on_the_device():
    inputs = step_inputs("cuda", torch.bfloat16)
    run = torch.compile(step, fullgraph=True)
    for function in (step, run):
        for _ in range(2):
            function(*inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = function(*inputs)
        inputs[4].sub_(2)
        graph.replay()
        for got, want in zip(out, step(*inputs), strict=True):
            assert torch.equal(got, want)
        inputs[4].add_(2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seqused_k": torch.tensor([3, 4])}, "`seqused_k` must be"),
        ({"page_table": torch.zeros(2, 4, dtype=torch.int32)}, "`page_table` must be"),
        ({"page_table": None}, "pages need `page_table`"),
        ({"precision": "fp64"}, "`precision` must be"),
        ({"index_weights": torch.zeros(3, 1, 2)}, "`index_weights`"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change, message):
    q, k, weights, used, table = pages([100, 3, 250])
    given = {"index_q": q, "index_k": k, "index_weights": weights, "seqused_k": used, "page_table": table} | change
    with pytest.raises(ValueError, match=message):
        dx.trained.index_decode(choice=dx.trained.TopKTokens(8), **given)
