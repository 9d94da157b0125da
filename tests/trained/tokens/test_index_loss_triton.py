# SPDX-License-Identifier: Apache-2.0
"""The kernels of an indexer's loss against fp64: under Triton's interpreter on a CPU, and on a GPU.

An error may be twice that of the same steps done eagerly with weights of pairs in the inputs' dtype, plus rounding.
"""

from itertools import pairwise

import pytest
import torch

import dynaxx as dx
from dynaxx.trained.tokens.spans import TokenSpans
from interpreter import DEVICE, on_gpu, run_interpreted, runs_here, starts_interpreter

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # of hidden pairs
NAMES = ("loss", "recall", "dq", "dk", "dweights")


@pytest.mark.slow  # fingerprints show that kernels are those that passed
@starts_interpreter
def test_under_the_interpreter():
    run_interpreted(__file__)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Make tiles small enough for several of them; not on a GPU, whose tiles are tested as they are."""
    from dynaxx.trained.tokens.kernels.triton import index_loss

    if DEVICE == "cpu":
        monkeypatch.setattr(index_loss, "BLOCK_Q", 16)
        monkeypatch.setattr(index_loss, "BLOCK_K", 16)
    index_loss._places.cache_clear()
    yield
    index_loss._places.cache_clear()


def draw(ends_q, ends_k, heads=(4, 2, 16), index_heads=3, index_dim=12, dtype=torch.float32, seed=0):
    """Return index q, k and weights, and q and k of attention, packed."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator).to(DEVICE, dtype)
    queries, keys, (q_heads, kv_heads, dim) = ends_q[-1], ends_k[-1], heads
    indexer = normal(queries, index_heads, index_dim), normal(keys, index_dim), normal(queries, index_heads)
    return indexer, (2 * normal(queries, q_heads, dim), normal(keys, kv_heads, dim))


def random_blocks(spans, slots, seed=0):
    """Return (T, 1, slots): different blocks of each query's sequence in any order, some slots empty, some unseen."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.full((spans.ends_q[-1], 1, slots), -1, dtype=torch.int32)
    for t, count in enumerate(spans.blocks.tolist()):
        found = torch.randperm(count, generator=generator)[:slots].int()
        rows[t, 0, torch.randperm(slots, generator=generator)[: len(found)]] = found
    if len(rows) > 3:
        rows[3] = -1
    return rows.to(DEVICE)


def by_formula(indexer, attention, blocks, spans, dtype):
    """Compute loss, recall and gradients of one sequence after another, with pairs' gradients rounded to `dtype`."""
    work = torch.float64 if dtype == torch.float64 else torch.float32
    (iq, ik, w), (q, k) = ([x.to(work) for x in some] for some in (indexer, attention))
    loss, recall, highest, grads = 0, 0, 0, [torch.zeros_like(x) for x in (iq, ik, w)]
    scale, index_scale = q.shape[-1] ** -0.5, (iq.shape[1] * iq.shape[2]) ** -0.5
    for (a, b), (c, d) in zip(pairwise(spans.ends_q), pairwise(spans.ends_k), strict=True):
        seen = torch.arange(d - c, device=DEVICE) <= spans.position[a:b, None].to(DEVICE)
        keys = k[c:d].repeat_interleave(q.shape[1] // k.shape[1], 1)
        logits = torch.einsum("thd,mhd->htm", q[a:b], keys) * scale
        highest = max(highest, float(logits.abs().max())) if logits.numel() else highest
        target = logits.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0).mean(0)
        if blocks is not None:
            size, count = spans.block_size, -(-(d - c) // spans.block_size)
            own = torch.where(blocks[a:b, 0] < 0, count, blocks[a:b, 0]).long()
            chosen = torch.zeros(b - a, count + 1, dtype=torch.bool, device=DEVICE).scatter_(1, own, True)
            seen = seen & chosen[:, :count].repeat_interleave(size, 1)[:, : d - c]
        target = target * seen
        mass = target.sum(-1, keepdim=True)
        recall = recall + (mass if blocks is not None else seen.any(-1).to(work)).sum()
        target = target / mass.clamp(min=torch.finfo(torch.float32).tiny)
        dots = torch.einsum("thd,md->htm", iq[a:b], ik[c:d])
        scores = torch.einsum("htm,th->tm", dots.relu(), w[a:b]) * index_scale
        logs = scores.masked_fill(~seen, -torch.inf).log_softmax(-1)
        loss = loss + torch.where(target > 0, target * (target.log() - logs), 0.0).sum()
        ds = torch.where(seen, logs.exp() - target, 0.0).to(dtype).to(work)
        gated = ds * (dots > 0)
        grads[0][a:b] = torch.einsum("htm,md->thd", gated, ik[c:d]) * w[a:b, :, None] * index_scale
        weighted = (gated * w[a:b].T[:, :, None]).to(dtype).to(work)
        grads[1][c:d] = torch.einsum("htm,thd->md", weighted, iq[a:b]) * index_scale
        grads[2][a:b] = (gated * dots).sum(-1).T * index_scale
    count = max(1, spans.ends_q[-1])
    return [loss / count, recall / count, *(x / count for x in grads)], highest


def run(indexer, attention, blocks, spans, batched=False):
    leaves = [x.detach().clone().requires_grad_() for x in indexer]
    more = {"block_indices": blocks, "block_size": spans.block_size, "backend": "triton"}
    if batched:
        given = [x[None] for x in (*leaves, *attention)]
        more["block_indices"] = None if blocks is None else blocks[None]
    else:
        given, more = [*leaves, *attention], more | {"cu_seqlens_q": spans.ends_q, "cu_seqlens_k": spans.ends_k}
    loss, recall = dx.trained.index_loss(*given, **more)
    return [loss.detach(), recall, *torch.autograd.grad(loss, leaves)]


def check(indexer, attention, blocks, spans, batched=False):
    got = run(indexer, attention, blocks, spans, batched)
    dtype = indexer[0].dtype
    exact, highest = by_formula(indexer, attention, blocks, spans, torch.float64)
    eager, _ = by_formula(indexer, attention, blocks, spans, dtype)
    for name, one, right, other in zip(NAMES, got, exact, eager, strict=True):
        right = torch.as_tensor(right, dtype=torch.float64, device=DEVICE)
        error, allowed = (float((x - right).abs().max()) if right.numel() else 0.0 for x in (one, other))
        stored = torch.float32 if name in NAMES[:2] else dtype
        unit = torch.finfo(stored).eps + torch.finfo(torch.float32).eps * highest  # of results, and of scores
        rounding = unit * (float(right.abs().max()) if right.numel() else 0.0)
        assert error <= 2 * (allowed + rounding) + 1e-7, (name, error, allowed, rounding)
    if DEVICE == "cpu":
        return
    again = run(indexer, attention, blocks, spans, batched)
    assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True))


SHAPES = {
    "one": ((0, 1), (0, 1), {}),
    "few queries": ((0, 3), (0, 70), {"heads": (6, 2, 8)}),
    "unseen": ((0, 20), (0, 13), {"heads": (3, 3, 24), "index_heads": 1}),
    "packed": ((0, 17, 17, 28, 29), (0, 30, 33, 44, 44), {"heads": (5, 1, 16), "index_heads": 6, "index_dim": 16}),
    "in 16 bits": ((0, 40), (0, 40), {"heads": (2, 1, 16), "dtype": torch.float16}),
    "wide": ((0, 9), (0, 9), {"heads": (2, 1, 192), "index_heads": 2, "index_dim": 40}),
}


@runs_here
@pytest.mark.parametrize("chosen", [0, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_fp64(shape, chosen):
    ends_q, ends_k, more = SHAPES[shape]
    indexer, attention = draw(ends_q, ends_k, **more)
    spans = TokenSpans(ends_q, ends_k, chosen or 1)
    blocks = random_blocks(spans, 7) if chosen else None
    check(indexer, attention, blocks, spans, batched=len(ends_q) == 2)


@runs_here
@pytest.mark.parametrize("chosen", [False, True])
def test_strips_and_parts_of_heads(chosen, monkeypatch):
    """Several strips, each of one tile or two, and gradients of keys in several parts."""
    from dynaxx.trained.tokens.kernels.triton import index_loss

    monkeypatch.setattr(index_loss, "STRIP_BYTES", 10_000)
    monkeypatch.setattr(index_loss, "HEADS_PER_PART", 2)
    ends_q, ends_k = (0, 10, 37), (0, 21, 40)
    spans = TokenSpans(ends_q, ends_k, 2)
    indexer, attention = draw(ends_q, ends_k, index_heads=5)
    check(indexer, attention, random_blocks(spans, 9) if chosen else None, spans)


@runs_here
def test_views_nothing_to_do_and_no_gradients():
    """Transposed inputs; no queries, no keys, no slots; a call without gradients."""
    (iq, ik, w), (q, k) = draw((0, 24), (0, 24), (2, 1, 16))
    spans = TokenSpans((0, 24), (0, 24))
    turned = lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)
    check((turned(iq), ik, w.T.contiguous().T), (turned(q), turned(k)), None, spans)
    with torch.no_grad():
        loss, recall = dx.trained.index_loss(iq, ik, w, q, k, cu_seqlens_q=(0, 24), backend="triton")
    torch.testing.assert_close(loss, run((iq, ik, w), (q, k), None, spans)[0])
    assert recall == 1
    none = torch.zeros(24, 1, 0, dtype=torch.int32, device=DEVICE)
    assert all(not x.any() for x in run((iq, ik, w), (q, k), none, spans))
    found = run((iq[:0], ik, w[:0]), (q[:0], k), None, TokenSpans((0, 0), (0, 24)))
    assert all(not x.any() for x in found)
    found = run((iq, ik[:0], w), (q, k[:0]), None, TokenSpans((0, 24), (0, 0)))
    assert all(not x.any() for x in found)


@runs_here
@pytest.mark.parametrize("chosen", [False, True])
def test_large_logits_and_nan(chosen):
    """Attention and indexer with all mass on single keys; a NaN reaches the loss."""
    (iq, ik, w), (q, k) = draw((0, 24), (0, 24))
    spans = TokenSpans((0, 24), (0, 24))
    blocks = random_blocks(spans, 24) if chosen else None
    check((iq * 30, ik, w), (q * 100, k), blocks, spans)
    k[7, 0, 0] = torch.nan
    assert run((iq, ik, w), (q, k), blocks, spans)[0].isnan()


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize(
    ("heads", "index_heads", "index_dim"), [((8, 2, 64), 4, 32), ((12, 4, 128), 8, 64), ((16, 1, 576), 16, 128)]
)
def test_on_a_gpu(heads, index_heads, index_dim, chosen, dtype):
    """fp32 has fewer pairs: a product near 0 whose sign is rounded away changes a gradient by more than rounding."""
    factor = 1 if dtype == torch.float32 else 8
    ends_q, ends_k = ([factor * x for x in ends] for ends in ((0, 87, 87, 125), (0, 112, 114, 151)))
    spans = TokenSpans(tuple(ends_q), tuple(ends_k))
    indexer, attention = draw(ends_q, ends_k, heads, index_heads, index_dim, dtype)
    check(indexer, attention, random_blocks(spans, 17 * factor) if chosen else None, spans)


@on_gpu
@pytest.mark.parametrize("chosen", [False, True])
def test_strips_of_a_long_sequence(chosen, monkeypatch):
    from dynaxx.trained.tokens.kernels.triton import index_loss

    monkeypatch.setattr(index_loss, "STRIP_BYTES", 4 << 20)
    spans = TokenSpans((0, 4000), (0, 4100))
    indexer, attention = draw(spans.ends_q, spans.ends_k, (8, 2, 64), 4, 32, torch.bfloat16)
    check(indexer, attention, random_blocks(spans, 600) if chosen else None, spans)


@on_gpu
@pytest.mark.parametrize("chosen", [False, True])
def test_memory_is_bounded(chosen, monkeypatch):
    """All pairs of 32,768 queries and keys would take 2 GiB in 16 bits."""
    from dynaxx.trained.tokens.kernels.triton import index_loss

    monkeypatch.setattr(index_loss, "STRIP_BYTES", 16 << 20)
    n = 1 << 15
    blocks = torch.arange(64, device=DEVICE, dtype=torch.int32).expand(n, 1, 64) if chosen else None
    indexer, attention = draw((0, n), (0, n), (8, 2, 64), 4, 32, torch.bfloat16)
    leaves = [x.requires_grad_() for x in indexer]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    dx.trained.index_loss(
        *leaves, *attention, cu_seqlens_q=(0, n), block_indices=blocks, backend="triton"
    ).loss.backward()
    assert torch.cuda.max_memory_allocated() - before < 0.15 * 2**30


@on_gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_in_a_graph():
    """A call is captured as a CUDA graph once kernels are compiled, and replays with new numbers."""
    indexer, attention = draw((0, 300), (0, 300), dtype=torch.bfloat16)
    blocks = random_blocks(TokenSpans((0, 300), (0, 300)), 40)
    leaves, graph, side = [x.requires_grad_() for x in indexer], torch.cuda.CUDAGraph(), torch.cuda.Stream()

    def step():
        one = dx.trained.index_loss(*leaves, *attention, cu_seqlens_q=(0, 300)).loss
        two = dx.trained.index_loss(*leaves, *attention, cu_seqlens_q=(0, 300), block_indices=blocks).loss
        return one, two, *torch.autograd.grad(one + two, leaves)

    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        attention[0].mul_(0.5)
    graph.replay()
    for one, other in zip(found, step(), strict=True):
        assert torch.equal(one, other)
