# SPDX-License-Identifier: Apache-2.0
"""`sparse_decode` against its definition and against an independent oracle: caches, page sizes, groups."""

import random

import pytest
import torch

import dynaxx as dx
from dynaxx.kernels.decode.reference import read_cache, visible_keys
from dynaxx.layout.paging import PageSummaries, quantize_pages
from dynaxx.testing import oracle_attention

LOW = {torch.float8_e4m3fn, torch.int8}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, *LOW)


def random_cache(seed, *, dtype=torch.float32, kv_heads=None, head_dim=None, page_size=None, paged=None, batch=None):
    """Return a cache of ragged lengths, whose unused memory is NaN, and its random generator."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, kv_heads = batch or rng.choice((1, 2, 3)), kv_heads or rng.choice((1, 2, 3))
    head_dim, page_size = (
        head_dim or rng.choice((16, 24, 64, 80, 128)),
        page_size or rng.choice((8, 16, 32, 64, 128, 256)),
    )
    head_dim_v = head_dim if rng.random() < 0.7 else rng.choice((16, 40, 64))
    paged = rng.random() < 0.6 if paged is None else paged
    capacity = rng.choice((1, 2, 5, 9)) if page_size < 128 else rng.choice((1, 2, 3))
    seqlen = capacity * page_size - (0 if paged else rng.randint(0, page_size - 1))
    lengths = [rng.choice((0, 1, seqlen, rng.randint(0, seqlen), rng.randint(0, seqlen))) for _ in range(batch)]
    used = torch.tensor(lengths, dtype=torch.int32)
    leftpad = torch.tensor([rng.randint(0, n) for n in lengths], dtype=torch.int32) if rng.random() < 0.3 else None
    pages = batch * capacity + 3
    shape = (pages, page_size) if paged else (batch, seqlen)
    draw = lambda width: torch.randn(*shape, kv_heads, width, generator=gen)
    k, v = draw(head_dim), draw(head_dim_v)
    table = torch.randperm(pages, generator=gen)[: batch * capacity].view(batch, capacity).int() if paged else None
    scales = {}
    if dtype in LOW:
        (k, k_scale), (v, v_scale) = (quantize_pages(x, dtype, None if paged else page_size) for x in (k, v))
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        if rng.random() < 0.3:
            scales = {name: torch.full((kv_heads,), 0.01) for name in scales}
    else:
        k, v = k.to(dtype), v.to(dtype)
        hide_unused(k, v, used, leftpad, table, page_size)
    if paged and rng.random() < 0.5:  # packed as in vLLM: (pages, heads, page_size, k | v)
        packed = torch.cat([k, v], -1).transpose(1, 2).contiguous()
        k, v = (x.transpose(1, 2) for x in packed.split([head_dim, head_dim_v], -1))
    if paged and rng.random() < 0.3 and capacity > 1:
        table[0, rng.randrange(capacity)] = -1
    cache = dx.PagedCache(k, v, used, table, page_size=0 if paged else page_size, leftpad_k=leftpad, **scales)
    return cache, rng, gen


def hide_unused(k, v, used, leftpad, table, page_size):
    """Set everything that no sequence may read to NaN."""
    seen = torch.zeros(k.shape[:2], dtype=torch.bool)
    for b, stop in enumerate(used.tolist()):
        for position in range(0 if leftpad is None else int(leftpad[b]), stop):
            where = (b, position) if table is None else (int(table[b, position // page_size]), position % page_size)
            seen[where] = True
    k[~seen], v[~seen] = torch.nan, torch.nan


def queries(cache, rng, gen, dtype=torch.float32):
    group_size, seqlen_q = rng.choice((1, 2, 3, 4, 5, 7, 8)), rng.choice((1, 1, 2, 3, 5))
    q = torch.randn(cache.batch, cache.kv_heads * group_size, seqlen_q, cache.head_dim, generator=gen)
    return q.to(dtype).transpose(1, 2)


def random_pages(cache, gen):
    """Draw some pages for each list, in any order, with empty slots in between."""
    lists = cache.batch, cache.kv_heads, cache.max_pages
    order = torch.rand(lists, generator=gen).argsort(-1)
    return torch.where(torch.rand(lists, generator=gen) < 0.5, order, -1).int()


def check_attention(q, cache, pages, backend):
    """Compare with fp64: the budget is twice the error of eager fp32, plus one rounding of the output."""
    group_size = q.shape[2] // cache.kv_heads
    mask = visible_keys(cache, q.shape[1], pages).repeat_interleave(group_size, 1)
    scale = q.shape[-1] ** -0.5
    exact = oracle_attention(q.double(), *read_cache(cache, torch.float64), mask, scale)
    eager = oracle_attention(q.float(), *read_cache(cache, torch.float32), mask, scale)
    got = dx.sparse_decode(q, cache, pages, return_lse=True, backend=backend)
    assert got.out.dtype == q.dtype
    assert got.lse.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    for mine, theirs, truth in zip(got, eager, exact, strict=True):
        assert torch.equal(mine.isfinite(), truth.isfinite())
        finite = truth.isfinite()
        if finite.any():
            worst = lambda x, truth=truth, finite=finite: float((x.double() - truth)[finite].abs().amax())
            rounding = torch.finfo(mine.dtype).eps * float(truth[finite].abs().amax())
            assert worst(mine) <= 2 * (worst(theirs) + rounding)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("seed", range(30))
def test_random_caches(seed, backend):
    dtype = DTYPES[seed % len(DTYPES)]
    cache, rng, gen = random_cache(seed, dtype=dtype)
    q = queries(cache, rng, gen, rng.choice((torch.float32, torch.bfloat16, torch.float16)))
    check_attention(q, cache, random_pages(cache, gen) if seed % 3 else None, backend)


def test_random_choices():
    """The core selects the same pages as the definition; scores are small integers, so nothing is rounded."""
    for seed in range(30):
        cache, rng, gen = random_cache(seed, dtype=(torch.float32, torch.bfloat16, torch.float16)[seed % 3])
        k = torch.randint(-2, 3, cache.k.shape, generator=gen).to(cache.k.dtype)
        bound = rng.choice((0.0, 1.0, 1.0))
        cache = dx.PagedCache(k, k, cache.seqused_k, cache.page_table, 0 if cache.is_paged else cache.page_size,
                              cache.leftpad_k)  # fmt: skip
        stored = rng.choice((None, torch.bfloat16))
        cache = dx.summarize_pages(cache, bound=bound, dtype=stored, backend="reference")
        q = torch.randint(-3, 4, (cache.batch, rng.choice((1, 2)), cache.kv_heads * rng.choice((1, 3)), cache.head_dim),
                          generator=gen).float()  # fmt: skip
        share = rng.choice((0, 1, 3, 0.0, 0.2, 0.5, 1.0, tuple(rng.choice((0.1, 2)) for _ in range(cache.kv_heads))))
        budget = dx.PageBudget(share, sinks=rng.choice((0, 1, 40)), window=rng.choice((1, 30)), bound=bound)
        wanted = dx.select_pages(q, cache, budget, scale=1.0, backend="reference")
        chosen = dx.select_pages(q, cache, budget, scale=1.0, backend="cpu")
        if bound == 1.0:
            assert torch.equal(chosen, wanted), f"seed {seed}: {budget}"
        assert torch.equal((chosen >= 0).sum(-1), (wanted >= 0).sum(-1))
        assert (chosen.diff() > 0)[chosen[..., 1:] >= 0].all()


def check_summaries(cache, bound, dtype, backend):
    """Summaries equal the definition's up to rounding; int8 ones are as close to exact ones as rounding allows."""
    mine, wanted, exact = (
        dx.summarize_pages(cache, bound=bound, dtype=stored, backend=name).summaries
        for name, stored in ((backend, dtype), ("reference", dtype), ("reference", torch.float32))
    )
    for name in ("low", "high"):
        got, defined = getattr(mine, name), getattr(wanted, name)
        assert got.dtype == defined.dtype == dtype
        if dtype != torch.int8:
            assert got.isfinite().all()
            step = 2 * torch.finfo(dtype).eps
            torch.testing.assert_close(got, defined, rtol=step, atol=step)
        else:
            torch.testing.assert_close(mine.scale, wanted.scale)
            assert (got.int() - defined.int()).abs().amax() <= 1
            off = (got * mine.scale[..., None] - getattr(exact, name)).abs()
            assert (off <= 0.501 * mine.scale[..., None] + 1e-6).all()


@pytest.mark.parametrize("bound", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("stored", [torch.int8, torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_summaries(stored, bound):
    for seed in range(10):
        cache, *_ = random_cache(seed, dtype=DTYPES[seed % len(DTYPES)])
        check_summaries(cache, bound, stored, "cpu")


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("paged", [False, True])
def test_summaries_kept_up_to_date_are_those_made_afresh(backend, paged):
    gen = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 7 if paged else 2, 16 if paged else 40, 2, 24, generator=gen).bfloat16()
    table = torch.tensor([[4, 0, 3], [1, 2, 5]], dtype=torch.int32) if paged else None
    at = lambda lengths, summaries=None: dx.PagedCache(
        k, v, torch.tensor(lengths, dtype=torch.int32), table, 0 if paged else 16, summaries=summaries
    )
    summaries = dx.summarize_pages(at([17, 3]), backend=backend).summaries
    for lengths in ([18, 4], [20, 6], [32, 18], [33, 19], [30, 19], [36, 25]):  # including a step back
        summaries = dx.summarize_pages(at(lengths, summaries), new_tokens=15, backend=backend).summaries
        fresh = dx.summarize_pages(at(lengths), backend=backend).summaries
        for b, length in enumerate(lengths):
            for page in range(-(-length // 16)):
                where = (int(table[b, page]),) if paged else (b, page)
                assert torch.equal(summaries.low[where], fresh.low[where])
                assert torch.equal(summaries.high[where], fresh.high[where])
                assert torch.equal(summaries.scale[where], fresh.scale[where])


def check_smaller_pages(tokens_first, backend, device="cpu"):
    """A cache with pages of 64 and room between them, divided, decodes as the same keys in pages of 16."""
    gen = torch.Generator().manual_seed(7)
    table = torch.tensor([[5, 0, 3, -1], [2, 6, 1, 4]], dtype=torch.int32)
    memory = torch.randn(7, 64, 2, 64, generator=gen) if tokens_first else torch.randn(7, 2, 64, 64, generator=gen)
    k, v = (memory if tokens_first else memory.transpose(1, 2)).to(device).chunk(2, -1)
    used = torch.tensor([150, 233], dtype=torch.int32, device=device)
    cache = dx.PagedCache(k, v, used, table.to(device)).with_page_size(16)
    copy = lambda x: x[table.clamp(min=0).long()].flatten(1, 2)
    plain = dx.PagedCache.contiguous(copy(k), copy(v), page_size=16, seqused_k=used)
    assert cache.page_size == 16
    assert cache.k.data_ptr() == k.data_ptr()
    assert (cache.page_table < 0).sum() == 4
    q = torch.randn(2, 1, 6, 32, generator=gen).to(device)
    for bound, dtype in ((1.0, torch.int8), (0.0, torch.float32)):
        both = [dx.summarize_pages(x, bound=bound, dtype=dtype, backend=backend) for x in (cache, plain)]
        stored = both[0].summaries.low.untyped_storage().nbytes()
        assert stored <= (7 + 1) * 4 * 2 * 32 * dtype.itemsize, "memory between the pages of a head takes none"
        budget = dx.PageBudget(3, sinks=4, bound=bound)
        torch.testing.assert_close(*(dx.sparse_decode(q, x, budget, backend=backend) for x in both))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("tokens_first", [True, False])
def test_smaller_pages(tokens_first, backend):
    check_smaller_pages(tokens_first, backend)


def test_smaller_pages_keep_what_a_page_table_says():
    """A page that does not exist stays one, even if its part's number passes int32."""
    k, q = torch.randn(3, 64, 2, 16), torch.randn(1, 1, 2, 16)
    used = torch.tensor([100], dtype=torch.int32)
    at = lambda second: dx.PagedCache(k, k, used, torch.tensor([[1, second]], dtype=torch.int32)).with_page_size(16)
    for wrong in (3, 2**30, 2**31 - 1):
        with pytest.raises(ValueError, match="`page_table` must hold -1 or pages below 12"):
            dx.sparse_decode(q, at(wrong))
    for empty in (-(2**30), -(2**31)):
        torch.testing.assert_close(dx.sparse_decode(q, at(empty)), dx.sparse_decode(q, at(-1)))


def test_pages_that_cannot_be_smaller():
    k = torch.zeros(3, 64, 2, 16)
    table, used = torch.zeros(1, 2, dtype=torch.int32), torch.tensor([100], dtype=torch.int32)
    cache = dx.PagedCache(k, k, used, table)
    assert cache.with_page_size(64) is cache
    for size in (128, 48, 3, 0, -4, -16):
        with pytest.raises(ValueError, match=f"must divide the pages' 64 tokens, got {size}"):
            cache.with_page_size(size)
    apart = torch.zeros(3, 70, 2, 16)[:, :64]
    with pytest.raises(ValueError, match="must begin a whole number of 64 tokens behind another"):
        dx.PagedCache(apart, apart, used, table).with_page_size(16)
    with pytest.raises(ValueError, match="same order"):
        dx.PagedCache(k, torch.zeros(3, 2, 64, 16).transpose(1, 2), used, table).with_page_size(16)
    assert dx.PagedCache(k[:0], k[:0], used, table - 1).with_page_size(16).k.shape == (0, 16, 2, 16)
    one = k[:1], torch.zeros(1, 2, 64, 16).transpose(1, 2)  # one page has no distance to another
    assert dx.PagedCache(*one, used, table).with_page_size(16).page_table.tolist() == [[0, 1, 2, 3] * 2]
    scale = torch.ones(3, 2)
    stored = dx.PagedCache(k.to(torch.int8), k.to(torch.int8), used, table, k_scale=scale, v_scale=scale)
    with pytest.raises(ValueError, match="a scale per page"):
        stored.with_page_size(16)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_full_budget_is_dense(backend):
    cache, rng, gen = random_cache(11, dtype=torch.float32)
    q = queries(cache, rng, gen)
    cache = dx.summarize_pages(cache)
    dense = dx.sparse_decode(q, cache, backend=backend)
    for budget in (1.0, cache.max_pages, 0.9999999):
        assert torch.equal(dx.sparse_decode(q, cache, dx.PageBudget(budget), backend=backend), dense)


def test_sinks_and_window_are_always_read():
    k = torch.randn(1, 640, 1, 16)
    cache = dx.summarize_pages(dx.PagedCache.contiguous(k, k, page_size=16))
    q = torch.randn(1, 3, 2, 16)
    chosen = dx.select_pages(q, cache, dx.PageBudget(0, sinks=17, window=15))
    assert chosen.tolist() == [[[0, 1, 38, 39]]]  # the first of three queries is at 637, so its window starts at 623
    padded = dx.PagedCache.contiguous(k, k, page_size=16, leftpad_k=torch.tensor([33], dtype=torch.int32))
    chosen = dx.select_pages(q, dx.summarize_pages(padded), dx.PageBudget(1, sinks=1))
    assert chosen[0, 0, 0] == 2  # the first key that is not padding


def test_the_result_does_not_depend_on_threads_beyond_rounding():
    cache, _, gen = random_cache(5, dtype=torch.float32, kv_heads=1, page_size=16, batch=1, paged=False)
    k = torch.randn(1, 3000, 1, 64, generator=gen)
    cache, q = dx.PagedCache.contiguous(k, k, page_size=16), torch.randn(1, 1, 4, 64, generator=gen)
    before = torch.get_num_threads()
    try:
        outs = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outs.append(dx.sparse_decode(q, cache, backend="cpu"))
            assert torch.equal(outs[-1], dx.sparse_decode(q, cache, backend="cpu"))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(outs[2], outs[0], rtol=1e-5, atol=1e-6)


def test_the_definition_in_fp64():
    cache, rng, gen = random_cache(2, dtype=torch.float32)
    cache = dx.PagedCache(cache.k.double(), cache.v.double(), cache.seqused_k, cache.page_table, cache.page_size,
                          cache.leftpad_k)  # fmt: skip
    check_attention(queries(cache, rng, gen, torch.float64), cache, random_pages(cache, gen), "auto")


def test_rules_become_budgets():
    hybrid = dx.Sink(4) | dx.SlidingWindow(256) | dx.TopK(0.1, dx.MinMax(bound=0.5))
    assert dx.PageBudget.of(hybrid) == dx.PageBudget(0.1, sinks=4, window=256, bound=0.5)
    assert dx.PageBudget.of(dx.TopK(8, dx.MeanPool())) == dx.PageBudget(8, bound=0.0)
    assert dx.PageBudget.of(dx.SlidingWindow(64) | dx.GlobalTokens(8)) == dx.PageBudget(0, sinks=8, window=64)
    assert dx.PageBudget.of(dx.Causal()).reads_everything
    for rule in (dx.Strided(4), dx.TopP(0.9), dx.TopK(0.1, dx.AntiDiagonal()), dx.SlidingWindow((3, 0))):
        with pytest.raises(ValueError, match="decoding supports"):
            dx.PageBudget.of(rule)


def test_invalid_inputs_are_refused():
    k = torch.randn(2, 64, 2, 16)
    q = torch.randn(2, 1, 4, 16)
    used = torch.tensor([64, 10], dtype=torch.int32)
    cache = dx.PagedCache.contiguous(k, k, page_size=16, seqused_k=used)
    table = torch.zeros(2, 4, dtype=torch.int32)
    paged = lambda table, used=used: dx.PagedCache(k[:, :16], k[:, :16], used, table)
    cases = [
        (lambda: dx.sparse_decode(q[0], cache), "`q` must be"),
        (lambda: dx.sparse_decode(q[:, :, :3], cache), "multiple of kv_heads"),
        (lambda: dx.sparse_decode(q[..., :8], cache), "head_dim = 16"),
        (lambda: dx.sparse_decode(q, cache, dx.PageBudget(0.5)), "must have summaries"),
        (lambda: dx.sparse_decode(q, dx.summarize_pages(cache, bound=0.0), dx.PageBudget(0.5)), "bound 0.0"),
        (lambda: dx.sparse_decode(q, cache, torch.zeros(2, 2, 3, dtype=torch.int32)), "twice"),
        (lambda: dx.sparse_decode(q, cache, torch.full((2, 2, 1), 4, dtype=torch.int32)), "below 4"),
        (lambda: dx.sparse_decode(q, cache, torch.zeros(2, 2, 3)), "int32"),
        (lambda: dx.sparse_decode(q, cache, backend="cuda"), "`backend`"),
        (lambda: dx.sparse_decode(q, paged(table + 2)), "page_table"),
        (lambda: dx.sparse_decode(q, paged(table - 2)), "page_table"),
        (lambda: dx.sparse_decode(q, paged(table, used + 1)), "`seqused_k`"),
        (lambda: dx.PagedCache.contiguous(k, k, page_size=48), "`page_size`"),
        (lambda: dx.PagedCache(k[:, :17], k[:, :17], used, table), "pages must hold"),
        (lambda: dx.PagedCache(k, k[:, :, :1], used, table), "differ in head_dim only"),
        (lambda: dx.PagedCache(k[:, :16], k[:, :16], used.long(), table), "int32"),
        (lambda: dx.PagedCache(k[:, :16].to(torch.int8), k[:, :16].to(torch.int8), used, table), "`k_scale`"),
        (lambda: dx.PagedCache(k[:, :16, :, ::2], k[:, :16], used, table), "dense last"),
        (lambda: dx.summarize_pages(cache, new_tokens=1), "`new_tokens`"),
        (lambda: dx.summarize_pages(dx.summarize_pages(cache, bound=0.5), bound=1.0), "`bound` and `dtype` must match"),
        (lambda: PageSummaries(k.to(torch.int8), k.to(torch.int8), 1.0), "`scale`"),
        (lambda: PageSummaries(k, k + 1, 1.0, torch.ones(2, 64, 2)), "`scale`"),
        (lambda: dx.PageBudget(1.5), "`budget`"),
        (lambda: dx.PageBudget(-1), "`budget`"),
        (lambda: dx.PageBudget(()), "`budget` must be one value or one per kv head"),
        (lambda: dx.PageBudget(1, window=0), "`window`"),
        (lambda: dx.select_pages(q, dx.summarize_pages(cache), dx.PageBudget((1, 2, 3))), "one per kv head"),
    ]
    for call, message in cases:
        with pytest.raises((ValueError, TypeError), match=message):
            call()
    with pytest.raises(dx.UnsupportedInputError, match="triton"):
        dx.sparse_decode(q, cache, backend="triton")


def test_nothing_to_see():
    k = torch.randn(0, 16, 2, 16)
    empty = dx.PagedCache(k, k, torch.zeros(0, dtype=torch.int32), torch.zeros(0, 4, dtype=torch.int32))
    assert dx.sparse_decode(torch.randn(0, 1, 4, 16), empty).shape == (0, 1, 4, 16)
    k = torch.randn(1, 32, 2, 16)
    for backend in ("cpu", "reference"):
        cache = dx.PagedCache.contiguous(k, k, page_size=16, seqused_k=torch.zeros(1, dtype=torch.int32))
        out, lse = dx.sparse_decode(torch.randn(1, 2, 4, 16), dx.summarize_pages(cache), dx.PageBudget(0.5),
                                    return_lse=True, backend=backend)  # fmt: skip
        assert (out == 0).all()
        assert (lse == -torch.inf).all()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_lists_without_slots_read_no_page(backend):
    """torch gives an empty tensor the address 0, which must not be read as "no list given"."""
    q, k = torch.randn(1, 1, 2, 16), torch.randn(1, 40, 2, 16)
    cache = dx.PagedCache.contiguous(k, k, page_size=16)
    out, lse = dx.sparse_decode(q, cache, torch.zeros(1, 2, 0, dtype=torch.int32), return_lse=True, backend=backend)
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("shape", [(0, 40), (2, 0), (0, 0)])
def test_summaries_of_no_keys(shape):
    k = torch.randn(*shape, 2, 16)
    cache = dx.summarize_pages(dx.PagedCache.contiguous(k, k, page_size=16))
    out = dx.sparse_decode(torch.randn(shape[0], 1, 4, 16), cache, dx.PageBudget(2))
    assert out.shape == (shape[0], 1, 4, 16)
    assert not out.any()


def test_a_count_and_a_share_are_not_mixed_up():
    """1 page and 1.0, which means all pages, are equal numbers but different budgets."""
    for count, share in ((1, 1.0), ((1, 0), (1.0, 0))):
        for _ in range(2):
            fixed, shares = dx.PageBudget(count).wanted(2, torch.device("cpu"))
            assert (fixed.sum() > 0, shares.sum()) == (True, 0)
            fixed, shares = dx.PageBudget(share).wanted(2, torch.device("cpu"))
            assert (fixed.sum(), shares.sum() > 0) == (0, True)
