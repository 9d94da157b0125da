# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention's Triton kernels against fp64: under Triton's interpreter on a CPU, and on a GPU.

The interpreter must be chosen before Triton loads, so these tests run this file in a separate process.
"""

import random

import pytest
import torch

from dynaxx.testing import make_qkv
from dynaxx.trained.nsa.attention import compress, native_sparse_attention
from dynaxx.trained.nsa.kernels import reference as definition
from dynaxx.trained.nsa.kernels.gpu import selected as shared
from dynaxx.trained.nsa.kernels.gpu.query_unions import unions
from dynaxx.trained.nsa.kernels.triton import operators as nsa
from dynaxx.trained.nsa.spans import NsaSizes, nsa_spans
from dynaxx.trained.testing.nsa import random_selected_case
from interpreter import DEVICE, INTERPRETED, on_gpu, run_interpreted, runs_here, starts_interpreter

pytest.importorskip("triton")

gpu = pytest.mark.gpu
SCHEDULES = ("union", "gather", "either")


@pytest.mark.slow  # fingerprints show that kernels are those that passed
@starts_interpreter
def test_under_the_interpreter():
    run_interpreted(__file__)


def check(case, gradients=True):
    for report in case.check("triton", gradients):
        assert report.ok, f"{report}\n{case.label}"


@runs_here
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", [5, 11, 12, 20])
def test_random_cases(seed, schedule, monkeypatch):
    """Use fp32 and fp16, because the interpreter does not multiply bf16; run both schedules, split and whole."""
    monkeypatch.setattr(shared.config, "choose_schedule", lambda group_size: schedule)
    monkeypatch.setattr(shared.config, "AGREE", seed % 2)  # always by query, or always by key
    monkeypatch.setattr(shared, "PARTIAL_BYTES", 1 << 15)
    monkeypatch.setattr(shared, "PARTIAL_GRAD_BYTES", 1 << 15)
    monkeypatch.setattr(shared.config, "item_length", lambda group_size, chunked: 8)
    sizes = {"head_dims": (16, 24), "lengths": (0, 1, 13, 20), "groups": (1, 2, 3, 4, 16)}
    check(random_selected_case(seed, dtype=torch.float16 if seed % 2 else torch.float32, device=DEVICE, **sizes))


LENGTHS = (0, 1, 24) if INTERPRETED else (0, 1, 40, 77)


def selection_case(seed, dtype=torch.float32, lengths=LENGTHS, head_dim=16, sizes=None):
    rng = random.Random(seed)
    per_token, per_block = rng.choice(((1, 1), (1, 2), (2, 4), (4, 4), (1, 4)))
    pool = ("sum", "max")[seed % 2]
    sizes = sizes or NsaSizes(16 // per_block * per_token, 16 // per_block, 16, rng.choice((3, 5)), 1, 1, pool=pool)
    seqlens = [rng.choice(lengths) for _ in range(rng.choice((1, 3)))]
    longer = [n + rng.choice((0, 30)) for n in seqlens]
    ends, ends_k = ([sum(some[:i]) for i in range(len(some) + 1)] for some in (seqlens, longer))
    spans = nsa_spans(sizes, ends, ends_k, device=DEVICE)
    group, kv_heads = rng.choice((1, 2, 3, 16)), rng.choice((1, 2))
    q, k, _ = make_qkv(1, ends[-1], spans.ends_cmp[-1], group * kv_heads, kv_heads, head_dim,
                       dtype=dtype, device=DEVICE, seed=seed)  # fmt: skip
    return q[0], k[0], spans, kv_heads


def check_selection(q, k, lse, spans, heads, kernels=nsa):
    """Check that a selection has the right size, has the forced blocks, and omits no better block, up to rounding."""
    got = kernels.select_blocks(q, k, lse, spans, heads, 0.3)
    want = definition.select_blocks(q.double(), k.double(), None if lse is None else lse.double(), spans, heads, 0.3)
    scores = definition.selection_scores(
        q.double(), k.double(), lse if lse is None else lse.double(), spans, heads, 0.3
    )
    assert torch.equal(got >= 0, want >= 0)
    assert ((got[..., 1:] > got[..., :-1]) | (got[..., 1:] < 0)).all()
    pick = lambda chosen: scores.gather(-1, chosen.clamp(min=0).long()).masked_fill(chosen < 0, 0.0).sum(-1)
    limit = 64 * torch.finfo(torch.float32).eps * scores.masked_fill(scores < -1e30, 0.0).abs().sum(-1)
    if q.dtype != torch.float32:
        limit = limit + 1e-2  # products of fp16 are summed in another order
    assert ((pick(want) - pick(got)).abs() <= limit).all()


@runs_here
@pytest.mark.parametrize("seed", range(8))
def test_selection(seed, monkeypatch):
    from dynaxx.trained.nsa.kernels.gpu import select as nsa_select

    monkeypatch.setattr(nsa_select, "SCORE_BYTES", 1 << 10)
    q, k, spans, heads = selection_case(seed)
    lse = torch.full((q.shape[1], q.shape[0]), 3.0, device=DEVICE)
    check_selection(q, k, lse, spans, heads)


@runs_here
@pytest.mark.parametrize(("count", "step"), [(384, 128), (256, 64)])
def test_units_hold_every_token_that_rows_see_once(count, step):
    """Units of any run of tiles: the parts of a tile differ by one step at most and count what their first row sees."""
    from dynaxx.trained.nsa.kernels.gpu import select as nsa_select

    spans = nsa_spans(NsaSizes(), (0, 1, 301, 301, 9000), (0, 1, 301, 308, 9050), device="cpu")
    tiles = nsa_select._tiles_of(spans, 64)
    for some in (slice(0, len(tiles.bounds)), slice(4, 100)):
        held = torch.zeros(spans.ends_q[-1], max(spans.num_cmp) + step, dtype=torch.int32)
        units = tiles.units(some, count, step).tolist()
        for first, end, begin, stop, start, least, *_ in units:
            assert 0 < stop - begin <= count
            assert begin % step == 0
            assert (start, least) == (spans.first_cmp[first], spans.num_cmp[first])
            held[first:end, begin:stop] += 1
        rows = slice(tiles.bounds[some][0][0], tiles.bounds[some][-1][1])
        assert held.max() == 1
        assert all((held[t, : spans.num_cmp[t]] == 1).all() for t in range(rows.start, rows.stop))
        sizes = [-(-(unit[3] - unit[2]) // step) for unit in units if unit[0] == units[-1][0]]
        assert max(sizes) - min(sizes) <= 1


@runs_here
@pytest.mark.parametrize("count", [3, 9, 40])
def test_selection_of_many_blocks(count):
    """More blocks than groups of them, more slots than groups, and selections of forced blocks only."""
    sizes = NsaSizes(16, 8, 16, count, 1, 2)
    spans = nsa_spans(sizes, (0, 12, 20), (0, 350, 750) if INTERPRETED else (0, 700, 1500), device=DEVICE)
    q, k, _ = make_qkv(1, 20, spans.ends_cmp[-1], 4, 2, 16, dtype=torch.float32, device=DEVICE, seed=count)
    check_selection(q[0], k[0], torch.full((4, 20), 3.0, device=DEVICE), spans, 2)


@runs_here
def test_selection_by_logits():
    sizes = NsaSizes(16, 16, 16, 3, 0, 1)
    q, k, spans, _ = selection_case(1, sizes=sizes, lengths=LENGTHS[-1:] if INTERPRETED else LENGTHS)
    check_selection(q, k, None, spans, q.shape[1])


@runs_here
def test_ties_take_the_first_blocks():
    sizes = NsaSizes(16, 16, 16, 3, 0, 1)
    spans = nsa_spans(sizes, (0, 100), device=DEVICE)
    q, k = torch.zeros(100, 1, 16, device=DEVICE), torch.zeros(6, 1, 16, device=DEVICE)
    got = nsa.select_blocks(q, k, torch.zeros(1, 100, device=DEVICE), spans, 1, 1.0)
    assert torch.equal(got, definition.select_blocks(q, k, torch.zeros(1, 100, device=DEVICE), spans, 1, 1.0))


@runs_here
@pytest.mark.parametrize("pool", ["sum", "max"])
@pytest.mark.parametrize("blocks", [16, 112, 240, 528, 1040])
def test_choices_of_equal_scores(blocks, pool):
    """With few distinct scores, rows of any length select exactly the definition's blocks, whatever follows the row."""
    from dynaxx.trained.nsa.kernels.gpu.top import top_blocks

    sizes = NsaSizes(8, 4, 16, 13, 1, 2, pool=pool)
    rng = torch.Generator().manual_seed(blocks)
    draw = lambda *shape, high: torch.randint(high, shape, generator=rng)
    count = torch.cat((torch.tensor([0, 1, 2, 13, 14, blocks]), draw(4, high=blocks + 1)))
    tokens = (count * 4 - 1 - draw(len(count), high=4)).clamp(min=0)
    own, behind = (draw(len(count), 2, blocks, high=high).float() for high in (5, 40))
    column, scored = torch.arange(blocks), -(-tokens // 4)[:, None, None]
    seen = column < scored, (column > 0) & (column <= scored)
    parts = [x.masked_fill(~some, 0.0) for x, some in zip((own, behind), seen, strict=True)]
    want = definition.choose_blocks(parts[0] + parts[1] if pool == "sum" else parts[0].maximum(parts[1]), count, sizes)
    own, behind = (x.masked_fill(~some, torch.nan).to(DEVICE) for x, some in zip((own, behind), seen, strict=True))
    got = torch.full(want.shape, 7, dtype=torch.int32, device=DEVICE)
    top_blocks(own, behind, got, count.int().to(DEVICE), tokens.int().to(DEVICE), 0, sizes)
    assert torch.equal(got.cpu(), want)


@runs_here
@pytest.mark.parametrize("dim", [16, 24])
def test_gated_sum(dim):
    dtype = torch.float32
    outs = [torch.randn(37, 3, dim, dtype=dtype, device=DEVICE, requires_grad=True) for _ in range(3)]
    gates = torch.rand(37, 3, 3, dtype=dtype, device=DEVICE, requires_grad=True)
    do = torch.randn(37, 3, dim, dtype=dtype, device=DEVICE)
    want = definition.gated_sum(tuple(outs), gates)
    got = nsa.gating.gated_sum_forward(tuple(outs), gates)
    assert torch.allclose(got, want, atol=1e-6)
    grads = torch.autograd.grad(want, [*outs, gates], do)
    for one, other in zip(nsa.gating.gated_sum_backward(do, tuple(outs), gates), grads, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@runs_here
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("window", "stride", "dim"), [(8, 4, 16), (4, 4, 24), (12, 4, 16)])
@pytest.mark.parametrize("tokens", [3, 8, 37, 90])
def test_pooled_windows(window, stride, dim, tokens, weighted):
    spans = nsa_spans(NsaSizes(window, stride, 16, 3), (0, tokens, 2 * tokens), device=DEVICE)
    x = torch.randn(2 * tokens, 3, dim + 5, device=DEVICE)[..., :dim].requires_grad_()
    weight = torch.rand(window, 3, device=DEVICE, requires_grad=True) if weighted else None
    windows = definition.compression_windows(x, spans)
    want = windows.mean(1) if weight is None else torch.einsum("wlhd,lh->whd", windows, weight)
    assert torch.allclose(nsa.pooling.pool_forward(x, weight, spans), want, atol=1e-5)
    do = torch.randn_like(want)
    grads = torch.autograd.grad(want, [x] if weight is None else [x, weight], do)
    for got, expected in zip(nsa.pooling.pool_backward(do, x, weight, spans), grads, strict=False):
        assert torch.allclose(got, expected, atol=1e-4)


@runs_here
@pytest.mark.parametrize("seed", range(6))
def test_items_hold_every_entry_once_in_order(seed):
    from dynaxx.trained.nsa.kernels.gpu.key_items import items

    rng, length = random.Random(seed), (2, 8, 64)[seed % 3]
    torch.manual_seed(seed)
    ends = [0, 40 + seed, 40 + seed, 97]
    spans = nsa_spans(NsaSizes(16, 16, 16, 3, 0, 0), ends, device=DEVICE)
    heads, slots, step = rng.choice((1, 2)), rng.choice((1, 3, 5)), rng.choice((97, 7, 50))
    indices = torch.randint(-1, 6, (97, heads, slots), dtype=torch.int32)
    found = items(indices.to(DEVICE), spans, step, length)
    want = {}
    for entry, index in enumerate(indices.flatten().tolist()):
        t, head = entry // (heads * slots), entry // slots % heads
        if 0 <= index < int(spans.num_blocks[t]):
            cell = head * len(spans.block_start) + int(spans.first_block[t]) + index
            want.setdefault((t // step, cell), []).append(entry)
    got = {}
    for chunk in range(found.cell.shape[0]):
        for cell, begin, end in torch.stack([found.cell, found.begin, found.end])[:, chunk].T.tolist():
            some = found.entries[begin:end].tolist()
            assert len(some) <= length
            if some:
                got.setdefault((chunk, cell), []).extend(some)
    assert got == want
    counts = found.first_item.diff(dim=1)
    for (chunk, cell), entries in want.items():
        assert counts[chunk, cell] == -(-len(entries) // length)
    assert counts.sum() == sum(-(-len(entries) // length) for entries in want.values())


@runs_here
def test_the_whole_of_it():
    """All three branches and their gates, forward and backward, against the definition in fp64, with ragged lengths."""
    sizes = NsaSizes(8, 4, 16, 3, 1, 1, window=9)
    ends = (0, 30, 30, 53)
    q, k, v = make_qkv(1, 53, 53, 4, 2, 16, device=DEVICE)
    gates = torch.rand(53, 4, 3, device=DEVICE)

    def run(dtype, backend):
        leaves = [x.to(dtype).requires_grad_() for x in (q[0], k[0], v[0], gates)]
        pooled = tuple(compress(x, sizes, cu_seqlens=ends) for x in leaves[1:3])
        out = native_sparse_attention(*leaves[:3], pooled, leaves[3], sizes, cu_seqlens_q=ends, backend=backend)
        return out, *torch.autograd.grad(out, leaves, torch.cos(out.detach()))

    for exact, got in zip(run(torch.float64, "reference"), run(torch.float32, "triton"), strict=True):
        assert torch.allclose(got.double(), exact, atol=2e-5), (got.double() - exact).abs().max()


@gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(12))
def test_random_cases_on_a_gpu(seed, schedule, dtype, monkeypatch):
    monkeypatch.setattr(shared.config, "choose_schedule", lambda group_size: schedule)
    monkeypatch.setattr(shared.config, "AGREE", seed % 2)
    monkeypatch.setattr(shared, "PARTIAL_BYTES", 1 << 22)
    monkeypatch.setattr(shared, "PARTIAL_GRAD_BYTES", 1 << 22)
    check(random_selected_case(1000 + seed, dtype=dtype, device=DEVICE, head_dims=(64, 128, 256, 40),
                               lengths=(0, 1, 130, 300, 517)))  # fmt: skip


@gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", range(10))
def test_selection_on_a_gpu(seed, dtype):
    q, k, spans, heads = selection_case(seed, dtype, lengths=(0, 1, 400, 1500), head_dim=64)
    lse = torch.full((q.shape[1], q.shape[0]), 3.0, device=DEVICE)
    check_selection(q, k, lse, spans, heads)


@gpu
@on_gpu
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_runs_agree_bit_for_bit(schedule, monkeypatch):
    monkeypatch.setattr(shared.config, "choose_schedule", lambda group_size: schedule)
    case = random_selected_case(7, dtype=torch.bfloat16, device=DEVICE, head_dims=(64,), lengths=(900,))
    leaves = [x.requires_grad_() for x in (case.q, case.k, case.v)]

    def run():
        out, lse = case.attend("triton")(*leaves, case)
        return out, lse, *torch.autograd.grad(out.square().sum() + lse[lse.isfinite()].sum(), leaves)

    for once, again in zip(run(), run(), strict=True):
        assert torch.equal(once, again)


@runs_here
@pytest.mark.parametrize(("positions", "slots"), [(4, 6), (12, 16), (24, 48)])
def test_a_union_holds_each_block_once_with_who_selected_it(positions, slots):
    torch.manual_seed(positions)
    tokens, blocks = 200 if DEVICE == "cuda" else 26, 64
    spans = nsa_spans(NsaSizes(16, 16, 16, slots, 0, 0), (0, tokens), (0, blocks * 16), device=DEVICE)
    indices = torch.rand(tokens, 2, blocks).argsort(-1)[..., :slots].to(torch.int32)
    indices[torch.rand(indices.shape) < 0.1] = -1
    found = unions(indices.to(DEVICE), spans, positions)
    for tile in range(-(-tokens // positions)):
        for head in range(2):
            wanted = {}
            for i, row in enumerate(indices[tile * positions : (tile + 1) * positions, head]):
                for block in row[row >= 0].tolist():
                    if block < spans.num_blocks[tile * positions + i]:
                        wanted[block] = wanted.get(block, 0) | 1 << i
            count = int(found.counts[tile, head])
            starts = [int(start) // 16 for start in found.starts[tile, head, :count]]
            members = [int(bits) for bits in found.members[tile, head, :count]]
            assert starts == sorted(wanted)
            assert members == [wanted[block] for block in starts]
