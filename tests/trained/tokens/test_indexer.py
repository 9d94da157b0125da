# SPDX-License-Identifier: Apache-2.0
"""The indexer: its choices against sorting, streamed divergence and gradients against autograd through the formula."""

from itertools import pairwise

import pytest
import torch

import dynaxx as dx
from dynaxx.core import library
from dynaxx.errors import UnsupportedInputError
from dynaxx.trained.tokens.kernels.reference import index_loss as pieces

ISAS = ["", "torch"]


def draw(queries, keys, heads=3, dim=12, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator)
    return normal(batch, queries, heads, dim), normal(batch, keys, dim), normal(batch, queries, heads)


def whole(x):
    """Draw few different scores, so that many are equal; products are exact."""
    return x.mul(1.3).round()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize(
    ("queries", "keys", "count"), [(50, 50, 8), (3, 700, 16), (20, 17, 8), (1, 3000, 1200), (700, 700, 4)]
)
def test_choices_are_those_of_sorting(isa, size, queries, keys, count, monkeypatch):
    monkeypatch.setenv(library.ISA_VARIABLE, isa)
    inputs = [whole(x) for x in draw(queries, keys, batch=1)]
    choice = dx.trained.TopKTokens(count, block_size=size)
    got = dx.trained.index_tokens(*inputs, choice, backend="cpu")
    want = dx.trained.index_tokens(*(x.double() for x in inputs), choice, backend="reference")
    assert torch.equal(got, want)
    assert got.shape == (1, queries, 1, count // size)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_ranks_first(size, value):
    """NaN ranks first, as in `torch.topk`. A broken indexer then shows in the output instead of choosing nothing."""
    torch.manual_seed(0)
    q, k, weights = torch.randn(1, 60, 2, 32), torch.randn(1, 60, 32), torch.randn(1, 60, 2)
    for broken in (k[0, 5], k[0, 40:44], q[0, 20], weights[0, 30], k):
        broken.fill_(value)
        got, want = (
            dx.trained.index_tokens(q, k, weights, dx.trained.TopKTokens(12, block_size=size), backend=backend)
            for backend in ("cpu", "reference")
        )
        assert torch.equal(got, want)
        assert (got[..., 0] >= 0).all()


def test_the_definition():
    q, k, weights = (x.double() for x in draw(9, 12, batch=1))
    chosen = dx.trained.index_tokens(q, k, weights, dx.trained.TopKTokens(3), backend="reference")[0, :, 0]
    for t in range(9):
        scores = [
            sum(float(weights[0, t, h]) * max(0.0, float(q[0, t, h] @ k[0, s])) for h in range(3)) for s in range(t + 4)
        ]
        assert sorted(sorted(range(t + 4), key=lambda s: -scores[s])[:3]) == [s for s in chosen[t].tolist() if s >= 0]


@pytest.mark.parametrize("isa", ISAS)
def test_packed_is_each_sequence_alone(isa, monkeypatch):
    monkeypatch.setenv(library.ISA_VARIABLE, isa)
    q, k, weights = (x[0] for x in draw(100, 140))
    ends, ends_k = (0, 33, 33, 100), (0, 60, 71, 140)
    got = dx.trained.index_tokens(
        q, k, weights, dx.trained.TopKTokens(8, block_size=2), cu_seqlens_q=ends, cu_seqlens_k=ends_k
    )
    for (a, b), (c, d) in zip(pairwise(ends), pairwise(ends_k), strict=True):
        alone = dx.trained.index_tokens(
            q[None, a:b], k[None, c:d], weights[None, a:b], dx.trained.TopKTokens(8, block_size=2)
        )
        assert torch.equal(got[a:b], alone[0])


@pytest.mark.parametrize("precision", ["bf16", "fp8", "int8"])
def test_precision(precision):
    """Most choices agree with those of fp32, and the core agrees with the definition on rounded numbers."""
    inputs = draw(80, 80)
    choice = dx.trained.TopKTokens(16)
    got, exact = (dx.trained.index_tokens(*inputs, choice, precision=p) for p in (precision, "fp32"))
    same = (got[..., :, None] == exact[..., None, :]) & (got >= 0)[..., None]
    assert same.sum() / (exact >= 0).sum() > 0.95
    assert not torch.equal(got, exact)
    by_definition = dx.trained.index_tokens(*inputs, choice, precision=precision, backend="reference")
    assert (got == by_definition).float().mean() > 0.99  # sums in another order may swap near equals


def divergence(index_q, index_k, weights, q, k, scale, index_scale, visible):
    """Compute the divergence in one step, by the formula."""
    keys = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    causal = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    logits = torch.einsum("bthd,bmhd->bhtm", q, keys) * scale
    target = logits.masked_fill(~causal, -torch.inf).softmax(-1).mean(1).masked_fill(~visible, 0.0)
    recall = target.sum(-1).mean()
    target = target / target.sum(-1, keepdim=True).clamp(min=1e-30)
    scores = torch.einsum("bthd,bmd->bhtm", index_q, index_k).relu()
    scores = torch.einsum("bhtm,bth->btm", scores, weights) * index_scale
    logs = scores.masked_fill(~visible, -torch.inf).log_softmax(-1).masked_fill(~visible, 0.0)
    return (torch.special.xlogy(target, target) - target * logs).sum(-1).mean(), recall


@pytest.mark.parametrize("piece", [1 << 26, 5000])
@pytest.mark.parametrize("sparse", [False, True])
def test_loss_and_gradients(sparse, piece, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", piece)
    leaves = [x.requires_grad_() for x in draw(40, 50)]
    q, k = torch.randn(2, 40, 6, 16), torch.randn(2, 50, 2, 16)
    chosen = dx.trained.index_tokens(*leaves, dx.trained.TopKTokens(8, block_size=2)) if sparse else None
    got = dx.trained.index_loss(*leaves, q, k, block_indices=chosen, block_size=2)
    visible = torch.ones(40, 50, dtype=torch.bool).tril(10).expand(2, 40, 50)
    if sparse:
        mask = torch.zeros(2, 40, 26, dtype=torch.bool).scatter_(
            2, torch.where(chosen < 0, 25, chosen)[:, :, 0].long(), True
        )
        visible = visible & mask[..., :25].repeat_interleave(2, 2)
    want, recall = divergence(*leaves, q, k, 16**-0.5, 36**-0.5, visible)
    torch.testing.assert_close(got.loss, want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(got.recall, recall, atol=1e-5, rtol=1e-4)
    pairs = zip(*(torch.autograd.grad(3 * loss, leaves) for loss in (got.loss, want)), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-3)


def test_loss_of_packed_sequences_and_under_autocast():
    """A packed loss is the mean over the queries of all sequences; autocast does not change it."""
    (iq, ik, w), q, k = draw(40, 50, batch=1), torch.randn(1, 40, 6, 16), torch.randn(1, 50, 2, 16)
    inputs = [x[0] for x in (iq, ik, w, q, k)]
    ends, ends_k, losses = (0, 12, 12, 40), (0, 20, 25, 50), []
    for (a, b), (c, d) in zip(pairwise(ends), pairwise(ends_k), strict=True):
        if b > a:
            alone = [x[None, a:b] if x.shape[0] == 40 else x[None, c:d] for x in inputs]
            losses.append((b - a) * dx.trained.index_loss(*alone).loss)
    packed = dx.trained.index_loss(*inputs, cu_seqlens_q=ends, cu_seqlens_k=ends_k).loss
    torch.testing.assert_close(packed, sum(losses) / 40)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(packed, dx.trained.index_loss(*inputs, cu_seqlens_q=ends, cu_seqlens_k=ends_k).loss)
    with pytest.raises(ValueError, match="must have 3 dimensions"):
        dx.trained.index_loss(*inputs[:3], q, k, cu_seqlens_q=ends, cu_seqlens_k=ends_k)
    with pytest.raises(UnsupportedInputError, match="runs on a GPU"):
        dx.trained.index_loss(*inputs, cu_seqlens_q=ends, cu_seqlens_k=ends_k, backend="triton")


def test_it_learns():
    """An indexer that can copy attention's q and k learns to find most of the attention mass."""
    torch.manual_seed(0)
    x = torch.randn(1, 96, 24)
    q, k = (x @ torch.randn(24, 24) * 0.5).unflatten(-1, (2, 12)), (x @ torch.randn(24, 12))[:, :, None]
    layers = [torch.nn.Linear(24, width, bias=False) for width in (4 * 12, 12, 4)]
    optimizer = torch.optim.Adam([p for layer in layers for p in layer.parameters()], lr=1e-2)
    project = lambda: (layers[0](x).unflatten(-1, (4, 12)), layers[1](x), layers[2](x))
    recall = lambda: (
        dx.trained.index_loss(
            *project(), q, k, block_indices=dx.trained.index_tokens(*project(), dx.trained.TopKTokens(12))
        ).recall
    )
    before = float(recall())
    for _ in range(40):
        optimizer.zero_grad()
        dx.trained.index_loss(*project(), q, k).loss.backward()
        optimizer.step()
    assert float(recall()) > max(0.6, before + 0.15)


def test_errors():
    q, k, weights = draw(9, 9)
    with pytest.raises(ValueError, match="`index_q` must be"):
        dx.trained.index_tokens(q, k[:, :, None], weights, dx.trained.TopKTokens(4))
    with pytest.raises(ValueError, match="agree in batch and index_dim"):
        dx.trained.index_tokens(q, k[..., :3], weights, dx.trained.TopKTokens(4))
    with pytest.raises(ValueError, match="need `cu_seqlens_q`"):
        dx.trained.index_tokens(q[0], k[0], weights[0], dx.trained.TopKTokens(4))
    with pytest.raises(ValueError, match="`precision` must be"):
        dx.trained.index_tokens(q, k, weights, dx.trained.TopKTokens(4), precision="fp4")
    with pytest.raises(ValueError, match="of the tokens that the indexer has"):
        dx.trained.index_loss(q, k, weights, torch.randn(2, 8, 2, 4), torch.randn(2, 9, 2, 4))
    with pytest.raises(ValueError, match="'cpu', 'reference'"):
        dx.trained.index_tokens(q, k, weights, dx.trained.TopKTokens(4), backend="cuda")
    with pytest.raises(UnsupportedInputError, match="runs on a Hopper GPU"):
        dx.trained.index_tokens(q, k, weights, dx.trained.TopKTokens(4), backend="hopper")
