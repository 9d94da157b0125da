# SPDX-License-Identifier: Apache-2.0
"""Sparse sequences whose keys stay in an engine's pages: equal to the same sequences copied out in order."""

import random

import pytest
import torch

import dynaxx as dx
from dynaxx.errors import UnsupportedInputError
from dynaxx.integrations.runtime.counts import Counts
from dynaxx.integrations.runtime.deployed import Deployed
from dynaxx.integrations.runtime.in_place import attend_in_place, serves_in_place
from dynaxx.integrations.runtime.paged import FP8, Pages, Sequences, Softmax
from dynaxx.integrations.runtime.paged_layer import PagedLayer, Step
from dynaxx.integrations.runtime.paged_warmup import LayerShape, run_prefill
from dynaxx.layout import BlockGrid
from dynaxx.layout.paging import SequenceKeys
from dynaxx.policy import ModelFacts, resolve
from dynaxx.testing import oracle_attention
from interpreter import DEVICE, INTERPRETED, on_gpu, run_interpreted, runs_here, starts_interpreter

LAYOUTS = ("heads first", "tokens first", "wide")


@pytest.mark.slow
@starts_interpreter
def test_under_the_interpreter():
    run_interpreted(__file__)


def pages_of(layout, count, page_size, heads, dim, dtype=torch.float32, device=DEVICE):
    """Return a cache of NaN with one of the strides that engines use."""
    empty = lambda *size: torch.full(size, torch.nan, dtype=dtype, device=device)
    if layout == "tokens first":
        return Pages(empty(count, page_size, heads, 2 * dim).transpose(1, 2))
    return Pages(empty(count, heads, page_size, (4 if layout == "wide" else 2) * dim)[..., : 2 * dim])


class Chunk:
    """A chunk of a prompt over a cache whose pages lie in any order; all other memory is NaN."""

    def __init__(self, queries, keys, layout, page_size, heads=(4, 2), dim=16, dtype=torch.float32, device=DEVICE):
        draw = torch.Generator().manual_seed(keys)
        made = lambda *size: torch.randn(size, generator=draw).to(device, dtype)
        self.q, self.k, self.v = made(queries, heads[0], dim), made(keys, heads[1], dim), made(keys, heads[1], dim)
        count = -(-keys // page_size)
        self.pages = pages_of(layout, count + 3, page_size, heads[1], dim, dtype, device)
        order = random.Random(keys).sample(range(count + 3), count)
        table = torch.zeros(2, count + 2, dtype=torch.int32, device=device)
        table[1, :count] = torch.tensor(order, dtype=torch.int32, device=device)
        at = torch.arange(keys, device=device)
        slots = (table[1, at // page_size].long(), at % page_size)
        to_k, to_v = self.pages.tokens_first()
        to_k[slots], to_v[slots] = self.k, self.v
        used = torch.tensor([0, keys], dtype=torch.int32, device=device)
        self.sequences = Sequences(table, used, [0, 0, queries], [0, keys])

    @property
    def row(self):
        return self.sequences.rows[0]

    @property
    def in_order(self):
        return SequenceKeys(self.k[None], self.v[None], len(self.k))


def in_place(chunk, block):
    keys = chunk.sequences.keys_in_place(chunk.pages, chunk.row, block)
    assert keys is not None
    return keys


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("page_size", "block"), [(16, 16), (64, 16), (64, 64), (128, 32)])
def test_blocks_are_where_places_say(layout, page_size, block):
    for count in (1, 63, 64, 65, 300):
        chunk = Chunk(1, count, layout, page_size, device="cpu")
        keys = in_place(chunk, block)
        rows = (keys.places.long()[:, None] * block + torch.arange(block)).flatten()[:count]
        assert len(keys.places) == -(-count // block)
        assert torch.equal(keys.k[0, rows], chunk.k)
        assert torch.equal(keys.v[0, rows], chunk.v)
        memory = chunk.pages.tokens_first()[0]
        assert keys.k.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()


def test_layouts_of_patterns_move_once_a_step():
    chunk = Chunk(40, 130, "heads first", 32, device="cpu")
    layout = dx.SlidingWindow(50).layout(40, 130, block_size=16)
    first, second = in_place(chunk, 16), in_place(chunk, 16)
    moved = first.moved(layout)
    assert second.moved(layout) is moved
    assert torch.equal(moved.kv_indices, first.places[layout.kv_indices])
    assert (moved.seqlen_k, moved.nnz, moved.kv_order) == (130, layout.nnz, layout.kv_order)
    other = dx.SlidingWindow(20).layout(40, 130, block_size=16)
    assert torch.equal(second.moved(other).kv_indices, first.places[other.kv_indices])
    assert chunk.in_order.moved(layout) is layout


def test_values_behind_the_last_key_are_zero_and_others_unchanged():
    chunk = Chunk(1, 70, "tokens first", 32, device="cpu")
    k, v = (x.clone() for x in chunk.pages.tokens_first())
    chunk.sequences.clear_tail(chunk.pages, chunk.row)
    now_k, now_v = chunk.pages.tokens_first()
    last = chunk.sequences.page_table[1, 2]
    assert torch.equal(now_k, k) or torch.equal(now_k.isnan(), k.isnan())
    assert (now_v[last, 6:] == 0).all()
    now_v[last, 6:] = torch.nan
    assert torch.equal(now_v.isnan(), v.isnan())
    assert torch.equal(now_v.nan_to_num(), v.nan_to_num())


def test_memory_that_kernels_cannot_read_in_place_is_copied():
    chunk = Chunk(1, 70, "heads first", 32, device="cpu")
    assert chunk.sequences.keys_in_place(chunk.pages, chunk.row, 64) is None  # a block is more than a page
    one = torch.ones(())
    fp8 = Pages(chunk.pages.memory.to(FP8), one, one)
    assert chunk.sequences.keys_in_place(fp8, chunk.row, 16) is None
    odd = torch.zeros(9, 2 * 32 * 32 + 8)[:, : 2 * 32 * 32].unflatten(1, (2, 32, 32))  # pages at an odd distance
    assert chunk.sequences.keys_in_place(Pages(odd), chunk.row, 16) is None


def test_a_cpu_says_that_it_does_not_read_pages():
    if INTERPRETED:
        pytest.skip("the interpreter reads them")
    chunk = Chunk(40, 70, "heads first", 32, device="cpu")
    keys = in_place(chunk, 16)
    assert not serves_in_place(chunk.q[None], keys, (16, 16), None)
    layout = dx.SlidingWindow(20).layout(40, 70, block_size=16)
    with pytest.raises(UnsupportedInputError, match="keys in pages"):
        attend_in_place(chunk.q[None], keys, layout, torch.empty_like(chunk.q)[None], scale=0.2)


@runs_here
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pattern_over_pages(layout):
    for queries, count, page_size in ((33, 130, 64), (40, 64, 16)):
        chunk = Chunk(queries, count, layout, page_size)
        pattern = dx.SlidingWindow(50) | dx.Sink(3)
        made = pattern.layout(queries, count, block_size=16, device=DEVICE)
        out = torch.full((queries, 8, 16), torch.nan, device=DEVICE)[None, :, ::2]
        sinks = torch.linspace(-1, 1, 4, device=DEVICE)
        softmax = {"scale": 0.2, "softcap": 3.0, "sinks": sinks}
        assert serves_in_place(chunk.q[None], in_place(chunk, 16), (16, 16), 3.0)
        chunk.sequences.clear_tail(chunk.pages, chunk.row)
        attend_in_place(chunk.q[None], in_place(chunk, 16), made, out, **softmax)
        want = dx.sparse_attention(chunk.q[None], chunk.k[None], chunk.v[None], made, **softmax)
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


@runs_here
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_over_pages(layout):
    from dynaxx.kernels.selection.triton.query_scores import query_scores

    for queries, count in ((33, 130), (64, 256)):
        chunk, grid = Chunk(queries, count, layout, 64), BlockGrid(queries, count, (16, 16), True)
        mean = torch.randn(1, 4, grid.q_blocks, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        keys = in_place(chunk, 16)
        got = query_scores(mean, keys.k, 0, grid, places=keys.places)
        seen = grid.causal_kv_blocks(torch.arange(grid.q_blocks))[:, None] > torch.arange(grid.kv_blocks)
        want = query_scores(mean, chunk.k[None], 0, grid)
        torch.testing.assert_close(got.cpu()[..., seen], want.cpu()[..., seen], rtol=1e-4, atol=1e-5)


@runs_here
@pytest.mark.parametrize("rule", [dx.TopK(3), dx.SlidingWindow(50) | dx.Sink(16) | dx.TopK(0.1)], ids=str)
def test_a_choice_is_written_with_the_places_of_its_blocks(rule, monkeypatch):
    from dynaxx.kernels.selection.triton import query_scores
    from dynaxx.selection.device import select_on_device
    from dynaxx.selection.scorers import query

    monkeypatch.setattr(query, "_query_kernels", lambda problem: query_scores)
    pattern, selector = (None, rule) if isinstance(rule, dx.TopK) else (rule.pattern, rule.selector)
    chunk, grid = Chunk(200, 640, "heads first", 64), BlockGrid(200, 640, (16, 16), causal=True)
    keys = in_place(chunk, 16)
    want = select_on_device(chunk.q[None], chunk.k[None], pattern, selector, grid, 0.25, 1 << 28)
    got = select_on_device(chunk.q[None], keys.k, pattern, selector, grid, 0.25, 1 << 28, keys.places)
    visited = int(want.kv_indptr.flatten()[-1])
    assert torch.equal(got.kv_indices[:visited], want.kv_indices[:visited])
    assert torch.equal(got.kv_masks[:visited], want.kv_masks[:visited])
    moved = keys.moved(got)
    assert torch.equal(moved.kv_indices[:visited], keys.places[want.kv_indices[:visited].long()])
    assert moved.form == got.form
    other = keys._replace(places=keys.places.clone())
    assert torch.equal(other.moved(got).kv_indices[:visited], moved.kv_indices[:visited])


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", ["window", "hybrid", "per head"])
def test_a_layer_over_pages_is_the_layer_over_copies(telemetry, monkeypatch, layout, rule):
    """Prompts whole and in chunks, of whole and odd lengths, several times, so that recorded launches run too."""
    rules = {
        "window": dx.SlidingWindow(500) | dx.Sink(100),
        "hybrid": dx.SlidingWindow(300) | dx.TopK(0.1),
        "per head": dx.SlidingWindow(300) | dx.TopK((0.1, 0.3) * 4),
    }
    facts = ModelFacts(model_type="llama", layers=1, q_heads=8, kv_heads=2, head_dim=128)
    policy = dx.Policy(model=facts, block_size=128, rules=(dx.Rule.of(rules[rule]),))
    plan, layouts = resolve(policy)[0], []
    layer = PagedLayer(0, Softmax(0.1), Counts(telemetry), [lambda index, made: layouts.append(made)])
    copied = []
    copies = Sequences.keys
    monkeypatch.setattr(Sequences, "keys", lambda *args: copied.append(1) or copies(*args))
    for queries, count in ((2048, 2048), (1000, 3001), (1024, 4096), (1500, 1500)) * 3:
        chunk = Chunk(queries, count, layout, 128, (8, 2), 128, torch.bfloat16, "cuda")
        step = Step(chunk.sequences, Deployed(policy, telemetry, None))
        out = torch.full_like(chunk.q, torch.nan)
        assert layer.sparse(chunk.q, chunk.pages, step, out)
        q, k, v = (x[None] for x in (chunk.q, chunk.k, chunk.v))
        want = plan.layout(q, k, scale=0.1)
        assert torch.equal(layouts[-1].to_dense(), want.to_dense())
        exact = oracle_attention(q.double(), k.double(), v.double(), want.to_dense(), 0.1)[0]
        dense = dx.sparse_attention(q, k, v, want, scale=0.1)
        assert (out - exact).abs().max() <= 1.5 * (dense - exact).abs().max() + 1e-3
    assert not copied
    assert telemetry


@on_gpu
@pytest.mark.gpu
def test_the_warm_up_compiles_what_requests_run(telemetry):
    from dynaxx.integrations.runtime.paged_warmup import compiled_kernels, prefill_shapes

    facts = ModelFacts(model_type="llama", layers=1, q_heads=8, kv_heads=2, head_dim=128)
    rule = dx.SlidingWindow(300) | dx.Sink(130) | dx.TopK(0.1, dx.MeanQuery(sharpness=0.7))
    policy = dx.Policy(model=facts, block_size=128, rules=(dx.Rule.of(rule),))
    shape = LayerShape(8, 2, 128, torch.bfloat16, torch.device("cuda"), Softmax(0.1))
    run_prefill(resolve(policy)[0], shape, prefill_shapes(128, 256, 1024, 4096), in_place=True)
    layer = PagedLayer(0, Softmax(0.1), Counts(telemetry))
    with compiled_kernels() as names:
        for queries, count in ((1024, 1024), (1000, 3001), (1024, 4096), (777, 1501), (512, 513)):
            chunk = Chunk(queries, count, "heads first", 128, (8, 2), 128, torch.bfloat16, "cuda")
            step = Step(chunk.sequences, Deployed(policy, telemetry, None))
            assert layer.sparse(chunk.q, chunk.pages, step, torch.empty_like(chunk.q))
    assert names == []
