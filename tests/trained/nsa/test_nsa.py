# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention: the definition against loops from the paper, the CPU and packed batches against it."""

import random

import pytest
import torch

import dynaxx as dx
from dynaxx.patterns.compressed import Compressed
from dynaxx.trained.nsa import attention as nsa
from dynaxx.trained.nsa.attention import compress, compression_windows, native_sparse_attention, select_nsa
from dynaxx.trained.nsa.spans import NsaSizes, nsa_spans
from dynaxx.trained.packing import packed_problem
from dynaxx.trained.registry import NSA
from dynaxx.trained.selected import selected_attention
from dynaxx.trained.testing.nsa import random_selected_case
from nsa_oracle import nsa_oracle, windows_of

SMALL = NsaSizes(cmp_block=8, cmp_stride=4, slc_block=16, slc_count=3, first_blocks=1, local_blocks=1, window=13)


def random_sizes(rng):
    slc_block = rng.choice((16, 32))
    stride = rng.choice([size for size in (2, 4, 8, 16, 32) if size <= slc_block])
    cmp_block = rng.choice([size for size in (stride, 2 * stride, 4 * stride, 3 * stride) if size <= slc_block])
    first, local, more = rng.choice((0, 1, 2)), rng.choice((0, 1, 2)), rng.choice((0, 1, 3))
    return NsaSizes(
        cmp_block, stride, slc_block, max(1, first + local + more), first, local, rng.choice((1, 20, 70)),
        rng.choice(("sum", "max")),
    )  # fmt: skip


def inputs(rng, tokens_q, tokens_k, group=None, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rng.randint(0, 1 << 30))
    group, kv_heads = group or rng.choice((1, 2, 3, 5, 16, 17)), rng.choice((1, 2))
    dim, dim_v = rng.choice(((8, 8), (12, 20)))
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)
    q, k = draw(tokens_q, group * kv_heads, dim), draw(tokens_k, kv_heads, dim)
    return q, k, draw(tokens_k, kv_heads, dim_v), draw(tokens_q, group * kv_heads, 3).sigmoid()


@pytest.mark.parametrize("seed", range(12))
def test_the_definition_is_the_paper(seed):
    rng = random.Random(seed)
    sizes, tokens_k = random_sizes(rng), rng.choice((1, 7, 33, 64, 90))
    tokens_q = tokens_k if rng.random() < 0.6 else rng.choice((1, 5, tokens_k + 3))
    q, k, v, gates = inputs(rng, tokens_q, tokens_k)
    compressed = tuple(windows_of(x, sizes).mean(1) for x in (k, v))
    want, chosen = nsa_oracle(q, k, v, *compressed, gates, sizes, 0.3)
    got = native_sparse_attention(
        q[None], k[None], v[None], tuple(x[None] for x in compressed), gates[None], sizes, scale=0.3
    )
    assert torch.allclose(got[0], want, atol=1e-12)
    spans = nsa_spans(sizes, (0, tokens_q), (0, tokens_k))
    layout = Compressed(sizes.cmp_block, sizes.cmp_stride, tokens_k - tokens_q).layout(
        tokens_q, spans.ends_cmp[-1], causal=False, block_size=16
    )
    views = [x[None] for x in (q, *compressed)]
    lse = dx.sparse_attention(*views, layout, scale=0.3, return_lse=True).lse[0]
    for row, mine in zip(select_nsa(q, compressed[0], lse, spans, scale=0.3).tolist(), chosen, strict=True):
        assert [[j for j in some if j >= 0] for some in row] == mine


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_packed_is_each_sequence_alone(seed, dtype):
    rng = random.Random(100 + seed)
    sizes, lengths = random_sizes(rng), [rng.choice((0, 1, 5, 16, 40, 77)) for _ in range(4)]
    lengths_k = [n if rng.random() < 0.5 else n + rng.choice((0, 3, 30)) for n in lengths]
    ends, ends_k = ([sum(some[:i]) for i in range(5)] for some in (lengths, lengths_k))
    q, k, v, gates = inputs(rng, ends[-1], ends_k[-1], dtype=dtype)
    pooled = tuple(compress(x, sizes, cu_seqlens=ends_k) for x in (k, v))
    got = native_sparse_attention(q, k, v, pooled, gates, sizes, cu_seqlens_q=ends, cu_seqlens_k=ends_k)
    for i in range(4):
        a, b, c, d = ends[i], ends[i + 1], ends_k[i], ends_k[i + 1]
        alone = tuple(compress(x[None, c:d], sizes) for x in (k, v))
        want = native_sparse_attention(q[None, a:b], k[None, c:d], v[None, c:d], alone, gates[None, a:b], sizes)
        assert torch.allclose(got[a:b], want[0], atol=1e-5 if dtype == torch.float32 else 1e-12)


def test_a_few_kv_heads_at_a_time(monkeypatch):
    """Imitate how groups of 1 run on a GPU."""
    q, k, v, gates = (x[None] for x in inputs(random.Random(5), 60, 60, group=1, dtype=torch.float32))
    wide = [torch.cat([x, x.flip(1)], 2).requires_grad_() for x in (q, k, v, gates)]

    def run():
        q, k, v, gates = wide
        return native_sparse_attention(q, k, v, (compress(k, SMALL), compress(v, SMALL)), gates, SMALL)

    want = run()
    do = torch.randn_like(want)
    grads = torch.autograd.grad(want, wide, do)
    monkeypatch.setattr(nsa, "_kv_heads_at_once", lambda *args: wide[1].shape[2] - 1)
    got = run()
    assert torch.allclose(got, want, atol=1e-6)
    for one, other in zip(torch.autograd.grad(got, wide, do), grads, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_gradients_by_gradcheck():
    rng = random.Random(3)
    q, k, v, gates = (x.requires_grad_() for x in inputs(rng, 37, 37, group=2))
    weight = torch.rand(SMALL.cmp_block, k.shape[1], dtype=torch.float64, requires_grad=True)

    def run(q, k, v, gates, weight):
        q, k, v = q[None], k[None], v[None]
        pooled = compress(k, SMALL, weight), compress(v, SMALL)
        return native_sparse_attention(q, k, v, pooled, gates[None], SMALL)

    assert torch.autograd.gradcheck(run, (q, k, v, gates, weight), fast_mode=True)


@pytest.mark.parametrize("seed", range(30))
def test_selected_attention_on_the_cpu(seed):
    """Draw any group, head_dim_v, number of selection heads, ragged lengths and empty rows; with gradients."""
    case = random_selected_case(seed)
    for report in case.check("cpu"):
        assert report.ok, f"{report}\n{case.label}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_on_the_cpu(dtype):
    for seed in range(3):
        case = random_selected_case(300 + seed, dtype=dtype, groups=(1, 3, 5), lengths=(17, 40), head_dims=(8, 16))
        for report in case.check("cpu"):
            assert report.ok, f"{report}\n{case.label}"


def test_all_blocks_selected_is_dense_attention():
    q, k, v = torch.randn(2, 50, 6, 16), torch.randn(2, 50, 2, 16), torch.randn(2, 50, 2, 16)
    indices = torch.arange(4).expand(2, 50, 2, 4)
    got = selected_attention(q, k, v, indices, block_size=16, return_lse=True)
    want = dx.sparse_attention(q, k, v, dx.Causal().layout(50, block_size=16), return_lse=True)
    assert torch.allclose(got.out, want.out, atol=1e-5)
    assert torch.allclose(got.lse, want.lse, atol=1e-5)


def test_views_of_any_stride():
    wide = torch.randn(40, 2, 3, 40)
    q, k, v = (wide[..., i : i + 16].transpose(0, 1) for i in (0, 10, 20))
    indices = torch.arange(3).expand(2, 40, 3, 3)
    got = selected_attention(q, k, v, indices, block_size=16)
    want = selected_attention(q.contiguous(), k.contiguous(), v.contiguous(), indices, block_size=16)
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_row_that_sees_nothing(name):
    q, k, v = (torch.randn(1, n, 2, 8).requires_grad_() for n in (20, 17, 17))
    indices = torch.full((1, 20, 2, 2), -1)
    indices[:, 10:, :, 0] = 0
    out, lse = selected_attention(q, k, v, indices, block_size=16, return_lse=True)
    assert (out[:, :10] == 0).all()
    assert (lse[..., :10] == -torch.inf).all()
    assert lse[..., 10:].isfinite().all()
    grad = torch.autograd.grad(out.sum(), {"q": q, "k": k, "v": v}[name])[0]
    assert grad.isfinite().all()


def test_moba_ranks_by_the_logits():
    """Without lse, each q head selects the blocks whose mean keys have the largest scores, and its own block."""
    sizes = NsaSizes(16, 16, 16, 3, first_blocks=0, local_blocks=1)
    q, k = torch.randn(70, 4, 8, dtype=torch.float64), torch.randn(70, 2, 8, dtype=torch.float64)
    spans = nsa_spans(sizes, (0, 70))
    means = windows_of(k, sizes).mean(1)
    for dtype in (torch.float32, torch.float64):
        got = select_nsa(q.to(dtype), means.to(dtype), None, spans, select_heads=4)
        for t in range(70):
            for h in range(4):
                past = (means[: t // 16, h // 2] @ q[t, h]).argsort(descending=True)[:2].tolist()
                assert sorted([*past, t // 16]) == [j for j in got[t, h].tolist() if j >= 0]


def test_compression():
    x = torch.randn(2, 30, 3, 5, dtype=torch.float64)
    assert compression_windows(x, SMALL).shape == (2, 6, 8, 3, 5)
    want = torch.stack([windows_of(some, SMALL) for some in x])
    assert torch.equal(compression_windows(x, SMALL), want)
    assert torch.allclose(compress(x, SMALL), want.mean(2))
    weight = torch.rand(8, 3, dtype=torch.float64)
    assert torch.allclose(compress(x, SMALL, weight), (want * weight[..., None]).sum(2))
    with pytest.raises(ValueError, match="cmp_block, heads"):
        compress(x, SMALL, weight.T)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"slc_block": 48}, "slc_block"),
        ({"cmp_stride": 24}, "must divide"),
        ({"cmp_block": 128}, "at most|between 1 and"),
        ({"slc_count": 2}, "must cover the forced blocks"),
        ({"window": 0}, "`window`"),
        ({"first_blocks": -1}, "must be >= 0"),
    ],
)
def test_bad_sizes(changes, words):
    with pytest.raises(ValueError, match=words):
        NsaSizes(**changes)


def test_hopper_leaves_wide_heads_to_triton():
    q = torch.zeros(8, 16, 256, dtype=torch.bfloat16)
    problem = packed_problem(q, q[:, :1], q[:, :1], 64)
    reasons = NSA.reasons("hopper", problem)
    assert any("for selected blocks, got 256" in reason for reason in reasons)


def test_bad_inputs():
    q, k = torch.randn(1, 40, 4, 8), torch.randn(1, 40, 2, 8)
    indices = torch.zeros(1, 40, 2, 1, dtype=torch.int32)
    attend = lambda **given: selected_attention(
        given.pop("q", q), k, k, given.pop("indices", indices), **{"block_size": 16, **given}
    )
    for wrong, error, words in (
        ({"indices": indices + 3}, ValueError, "own sequence"),
        ({"indices": indices - 2}, ValueError, "own sequence"),
        ({"indices": indices.expand(1, 40, 2, 2)}, ValueError, "twice"),
        ({"indices": indices.float()}, TypeError, "integers"),
        ({"indices": indices.repeat(1, 1, 2, 1)[:, :, :3]}, ValueError, "select_heads"),
        ({"indices": indices[0]}, ValueError, "select_heads, slots"),
        ({"q": q.double()}, TypeError, "dtype"),
        ({"q": q[0]}, ValueError, "like q"),
        ({"q": q[..., :7]}, ValueError, "head_dim"),
        ({"q": q[:, :, :3]}, ValueError, "multiple of kv_heads"),
        ({"cu_seqlens_q": (0, 40)}, ValueError, "packed"),
        ({"backend": "cuda"}, ValueError, "'auto'"),
        ({"backend": "hopper"}, dx.UnsupportedInputError, "runs on a Hopper GPU"),
        ({"backend": "triton"}, dx.UnsupportedInputError, "runs on a GPU"),
        ({"block_size": 48}, ValueError, "block_size. must be one of"),
    ):
        with pytest.raises(error, match=words):
            attend(**wrong)
    with pytest.raises(ValueError, match="need `cu_seqlens_q`"):
        selected_attention(q[0], k[0], k[0], indices[0], block_size=16)
    with pytest.raises(ValueError, match="must end at"):
        selected_attention(q[0], k[0], k[0], indices[0], block_size=16, cu_seqlens_q=(0, 30))
    with pytest.raises(ValueError, match="`compressed` must hold"):
        native_sparse_attention(q, k, k, (k, k), torch.rand(1, 40, 4, 3), SMALL)
    with pytest.raises(ValueError, match="`gates` must be"):
        native_sparse_attention(q, k, k, (compress(k, SMALL),) * 2, torch.rand(1, 40, 3), SMALL)


def test_nothing_to_do():
    for batch, queries, keys in ((0, 5, 5), (1, 0, 5), (1, 5, 0), (2, 3, 0)):
        q, k = torch.randn(batch, queries, 4, 8, requires_grad=True), torch.randn(batch, keys, 2, 8)
        out = native_sparse_attention(q, k, k, (compress(k, SMALL),) * 2, torch.rand(batch, queries, 4, 3), SMALL)
        assert out.shape == q.shape
        out.sum().backward()
        assert (q.grad == 0).all()


def test_memory_and_speed_do_not_need_queries_by_keys():
    """For 16k queries, the definition would allocate 16k x 16k scores per head."""
    q, k = torch.randn(1, 16384, 2, 8), torch.randn(1, 16384, 1, 8)
    sizes = NsaSizes(32, 32, 128, 4, 1, 1, window=64)
    out = native_sparse_attention(q, k, k, (compress(k, sizes),) * 2, torch.rand(1, 16384, 2, 3), sizes)
    assert out.isfinite().all()


def test_explain():
    q, k = torch.randn(1, 40, 4, 8), torch.randn(1, 40, 2, 8)
    indices = torch.zeros(1, 40, 2, 2, dtype=torch.int32)
    indices[..., 1] = torch.arange(40)[:, None] % 2 + 1
    found = dx.trained.explain_selected(q, k, k, indices, block_size=16)
    assert found.chosen == "cpu"
    assert found.overlap == 0.5
    assert "runs on a GPU" in str(found)
    assert "union of 8 neighbouring positions" in str(found)
    assert "share 50%" in str(found)
