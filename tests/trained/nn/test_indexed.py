# SPDX-License-Identifier: Apache-2.0
"""`IndexedSparseAttention`: dense if it may select all tokens; two separate losses; both stages of training."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.func import grad

import dynaxx as dx
from dynaxx.trained import nn
from dynaxx.trained.nn.indexed import rotate_first_columns
from dynaxx.trained.nn.projection import rotate


def module(count=16, **more):
    torch.manual_seed(0)
    return nn.IndexedSparseAttention(48, 4, 2, choice=dx.trained.TopKTokens(count), index_heads=3, index_dim=8, **more)


def rotary(tokens, dim=12):
    angles = torch.arange(tokens)[:, None] * 10.0 ** -torch.arange(dim // 2)
    return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_all_tokens_are_dense_attention(precision):
    attention, x = module(64, precision=precision).eval(), torch.randn(2, 50, 48)
    sparse = attention(x, rotary(50))
    attention.dense = True
    torch.testing.assert_close(sparse, attention(x, rotary(50)), atol=1e-6, rtol=1e-4)
    assert attention.index_loss is None


@pytest.mark.parametrize("ends", [None, (0, 20, 20, 50)])
def test_sequences_that_are_chosen_whole_are_attended_to_densely(ends, monkeypatch):
    """Output, loss, recall and gradients are those of choosing every token."""
    attention, x = module(50), torch.randn(50, 48)
    inputs = (x, None) if ends else (x[None], None)

    def run():
        attention.zero_grad()
        out = attention(*inputs, cu_seqlens=ends)
        (out.square().sum() + attention.index_loss.loss).backward()
        grads = [p.grad.clone() for p in attention.parameters()]
        return out, attention.index_loss.loss, attention.index_loss.recall, *grads

    with monkeypatch.context() as patch:
        patch.setattr("dynaxx.trained.nn.indexed.index_tokens", None)
        got = run()
    monkeypatch.setattr(attention, "_chooses_everything", lambda *_: False)
    for one, other in zip(got, run(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dense", [True, False])
def test_each_loss_moves_its_own_part(dense):
    attention, x = module(), torch.randn(2, 50, 48, requires_grad=True)
    attention.dense = dense
    out = attention(x, rotary(50))
    own = {name for name, _ in attention.named_parameters() if name.startswith("indexer.")}
    attention.index_loss.loss.backward(retain_graph=True)
    moved = {name for name, p in attention.named_parameters() if p.grad is not None and p.grad.any()}
    assert moved <= own
    assert {"indexer.q_proj.weight", "indexer.k_proj.weight", "indexer.weight_proj.weight"} <= moved
    assert x.grad is None
    attention.zero_grad()
    out.square().sum().backward()
    assert all(p.grad is None or not p.grad.any() for name, p in attention.named_parameters() if name in own)
    assert x.grad.any()
    assert 0 < float(attention.index_loss.recall) <= 1.0001


def test_it_attends_to_what_the_indexer_chooses():
    attention, x = module(8).eval(), torch.randn(1, 40, 48)
    chosen = dx.trained.index_tokens(*attention.indexer(x), dx.trained.TopKTokens(8))
    q, k, v = (part(x).unflatten(-1, (-1, 12)) for part in (attention.q_proj, attention.k_proj, attention.v_proj))
    want = attention.o_proj(
        dx.trained.selected_attention(q, k, v, chosen, block_size=1, backend="reference").flatten(-2)
    )
    torch.testing.assert_close(attention(x), want, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("dense", [True, False])
def test_packed_is_each_sequence_alone(dense):
    attention, x, ends = module(), torch.randn(90, 48), (0, 40, 90)
    attention.dense = dense
    packed, found = attention(x, cu_seqlens=ends), attention.index_loss
    losses, recalls = [], []
    for a, b in ((0, 40), (40, 90)):
        torch.testing.assert_close(packed[a:b], attention(x[None, a:b])[0], atol=1e-6, rtol=1e-4)
        losses.append(attention.index_loss.loss * (b - a))
        recalls.append(attention.index_loss.recall * (b - a))
    torch.testing.assert_close(found.loss, sum(losses) / 90)
    torch.testing.assert_close(found.recall, sum(recalls) / 90)
    with pytest.raises(ValueError, match="`cache` must be None"):
        attention.eval()(x[None], cache=nn.LayerCache())


def test_positions():
    """An indexer rotates as many columns as attention does; further columns are not rotated."""
    x = torch.randn(2, 9, 3, 12)
    torch.testing.assert_close(rotate_first_columns(x, rotary(9)), rotate(x, rotary(9)))
    wide = torch.randn(2, 9, 3, 20)
    assert torch.equal(rotate_first_columns(wide, rotary(9))[..., 12:], wide[..., 12:])
    assert rotate_first_columns(x[..., :7], rotary(9)).shape == (2, 9, 3, 7)


def test_sizes():
    with pytest.raises(ValueError, match="`hidden_size`, `heads` and `dim`"):
        nn.Indexer(8, 0)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_decoding_over_pages_is_the_forward_traced_whole(precision):
    torch.manual_seed(0)
    attention = nn.IndexedSparseAttention(32, 4, 2, head_dim=16, choice=dx.trained.TopKTokens(12), index_dim=8,
                                          precision=precision).eval()  # fmt: skip
    x = torch.randn(2, 40, 32)
    angle = torch.arange(40)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001]).repeat(4)
    rotary = (angle.cos().expand(2, -1, -1), angle.sin().expand(2, -1, -1))
    with torch.no_grad():
        want = attention(x, rotary)
    pages = lambda *shape: torch.full((8, 16, *shape), torch.nan)
    k, v, index_k, table = pages(2, 16), pages(2, 16), pages(8), torch.randperm(8, dtype=torch.int32).view(2, 4)
    decode = torch.compile(attention.decode, fullgraph=True, backend="aot_eager")
    used, done = torch.zeros(2, dtype=torch.int32), 0
    for count in (30, 1, 1, 1, 3):
        used, some = used + count, slice(done, done + count)
        part = tuple(each[:, some] for each in rotary)
        run = attention.decode if count == 30 else decode
        got = run(x[:, some], part, dx.PagedCache(k, v, used, table), index_k)
        torch.testing.assert_close(got, want[:, some], atol=1e-5, rtol=1e-5)
        done += count


def test_copies_and_pickles_leave_the_graph_of_the_last_call_behind():
    attention, x = module(), torch.randn(2, 30, 48)
    want = attention(x)
    assert attention.index_loss is not None
    for other in (copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))):
        assert other.index_loss is None
        assert torch.equal(other(x), want)


def test_threads_that_share_a_module_use_their_own_indexers_output():
    attention, inputs = module(8).eval(), torch.randn(6, 1, 60, 48)
    with torch.no_grad(), ThreadPoolExecutor(3) as pool:
        want = [attention(x) for x in inputs]
        found = list(pool.map(torch.no_grad()(attention), [*inputs, *inputs]))
    for a, b in zip(found, [*want, *want], strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_invalid_inputs_are_refused_before_the_indexer_reads_them():
    with pytest.raises(ValueError, match="hidden_size = 48"):
        module()(torch.randn(2, 9, 47))
    with pytest.raises(TypeError, match="floating-point"):
        module()(torch.zeros(2, 9, 48, dtype=torch.int64))
    attention = module()
    with pytest.raises(NotImplementedError, match="no rules for torch"):
        grad(lambda x: attention(x).sum())(torch.randn(1, 9, 48))


@pytest.mark.parametrize(
    ("table", "used", "said"),
    [
        ([[0], [-1]], [3, 3], "a page for every new key"),
        ([[0], [9]], [3, 3], "a page for every new key"),
        ([[1], [1]], [3, 3], "write to one page"),
        ([[0], [1]], [3, 0], "must have space"),
        ([[0], [1]], [3, 17], "must have space"),
    ],
)
def test_new_tokens_go_to_pages_of_their_own_or_nowhere(table, used, said):
    """Page -1 is not the last page, which another sequence may own."""
    k, v, index_k = torch.zeros(3, 16, 2, 12), torch.zeros(3, 16, 2, 12), torch.zeros(3, 16, 8)
    cache = dx.PagedCache(k, v, torch.tensor(used).int(), torch.tensor(table).int())
    with pytest.raises(ValueError, match=said):
        module().eval().decode(torch.randn(2, 1, 48), None, cache, index_k)
    assert not any(x.any() for x in (k, v, index_k))
