# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's functions against torch's SDPA with the masks that flash-attn 2.1 and later define."""

import inspect
import re

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import dynaxx as dx
from dynaxx.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

WINDOWS = [(-1, -1), (5, 3), (0, 0), (20, -1), (-1, 4), (200, 200)]
LENGTHS = [(1, 1), (63, 63), (17, 100), (100, 17), (1, 129), (130, 65)]


def draw(*shape, grad=False, seed=0):
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return made.requires_grad_(grad)


def mask_of(seqlen_q, seqlen_k, causal, window_size):
    """Return the pairs that flash-attn shows, aligned to the bottom right."""
    distance = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q - torch.arange(seqlen_k)
    left, right = window_size
    right = 0 if causal else right
    seen = torch.ones_like(distance, dtype=torch.bool)
    seen = seen if left == -1 else seen & (distance <= left)
    return seen if right == -1 else seen & (distance >= -right)


def expected_of(q, k, v, seen, *, scale=None, softcap=0.0):
    """Compute dense attention over (batch, seqlen, heads, head_dim) in fp64; rows that see nothing are 0."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2).double() for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    if softcap:
        scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        scores = softcap * torch.tanh(scores / softcap)
        out = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1).nan_to_num() @ v
    else:
        out = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale).nan_to_num()
    return out.transpose(1, 2)


def close(out, expected):
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_size", WINDOWS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_func(lengths, window_size, causal):
    seqlen_q, seqlen_k = lengths
    q, k, v = (
        draw(2, seqlen_q, 4, 16, grad=True),
        draw(2, seqlen_k, 2, 16, grad=True),
        draw(2, seqlen_k, 2, 24, grad=True),
    )
    seen = mask_of(seqlen_q, seqlen_k, causal, window_size)
    out = flash_attn_func(q, k, v, causal=causal, window_size=window_size)
    expected = expected_of(q, k, v, seen)
    close(out, expected)
    rows = seen.any(1)  # SDPA has no gradient of a row that sees nothing
    do = draw(*out.shape, seed=1) * rows[:, None, None]
    ours = torch.autograd.grad(out, (q, k, v), do)
    theirs = torch.autograd.grad(expected[:, rows], (q, k, v), do.double()[:, rows])
    for mine, other in zip(ours, theirs, strict=True):
        close(mine, other.double())


def test_func_scale_softcap_and_lse():
    q, k, v = draw(2, 40, 4, 16), draw(2, 70, 2, 16), draw(2, 70, 2, 16)
    seen = mask_of(40, 70, True, (30, 0))
    given = {"causal": True, "window_size": (30, 0), "softmax_scale": 0.3, "softcap": 2.0, "deterministic": True}
    out, lse, probabilities = flash_attn_func(q, k, v, return_attn_probs=True, **given)
    close(out, expected_of(q, k, v, seen, scale=0.3, softcap=2.0))
    assert lse.shape == (2, 4, 40)
    assert probabilities is None
    scores = q.transpose(1, 2) @ k.repeat_interleave(2, 2).permute(0, 2, 3, 1) * 0.3
    logits = (2.0 * torch.tanh(scores / 2.0)).masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(lse, torch.logsumexp(logits, -1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_size", [(-1, -1), (5, 3), (20, -1)])
def test_varlen(window_size, causal):
    q_lengths, k_lengths = (3, 0, 64, 1, 100, 17), (3, 5, 64, 129, 33, 0)
    q, k, v = (
        draw(sum(q_lengths), 6, 16, grad=True),
        draw(sum(k_lengths), 2, 16, grad=True),
        draw(sum(k_lengths), 2, 16, grad=True),
    )
    ends = [torch.tensor([0, *torch.tensor(x).cumsum(0).tolist()], dtype=torch.int32) for x in (q_lengths, k_lengths)]
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, *ends, 100, 129, causal=causal, window_size=window_size, return_attn_probs=True
    )
    assert lse.shape == (6, sum(q_lengths))
    expected, rows = [], []
    parts = [x.split(n) for x, n in ((q, q_lengths), (k, k_lengths), (v, k_lengths))]
    for one_q, one_k, one_v in zip(*parts, strict=True):
        seen = mask_of(len(one_q), len(one_k), causal, window_size)
        expected.append(expected_of(one_q[None], one_k[None], one_v[None], seen)[0])
        rows.append(seen.any(1))
    expected, rows = torch.cat(expected), torch.cat(rows)
    close(out, expected)
    do = draw(*out.shape, seed=1) * rows[:, None, None]
    ours = torch.autograd.grad(out, (q, k, v), do)
    theirs = torch.autograd.grad(expected[rows], (q, k, v), do.double()[rows])
    for mine, other in zip(ours, theirs, strict=True):
        close(mine, other.double())


def ragged_reference(q, k_cache, v_cache, used, causal, window_size, *, leftpad=None, softcap=0.0):
    """Compute attention over each sequence's own keys."""
    outs = []
    for b, length in enumerate(used):
        start = 0 if leftpad is None else leftpad[b]
        seen = mask_of(q.shape[1], length, causal, window_size)
        seen[:, :start] = False
        outs.append(
            expected_of(q[b : b + 1], k_cache[b : b + 1, :length], v_cache[b : b + 1, :length], seen, softcap=softcap)
        )
    return torch.cat(outs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_size", [(-1, -1), (9, 2), (20, 0), (-1, 1)])
@pytest.mark.parametrize("count", [1, 3])
def test_kvcache(count, window_size, causal):
    used = [160, 7, 64]
    q, k, v = draw(3, count, 4, 16), draw(3, 160, 2, 16), draw(3, 160, 2, 16)
    lengths = torch.tensor(used, dtype=torch.int32)
    out, lse = flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, causal=causal, window_size=window_size, return_softmax_lse=True
    )
    close(out, ragged_reference(q, k, v, used, causal, window_size))
    assert lse.shape == (3, 4, count)


@pytest.mark.parametrize("causal", [False, True])
def test_kvcache_pages_rows_padding_and_new_keys(causal):
    used, pad = [150, 7, 64], [4, 0, 30]
    q, new_k, new_v = draw(3, 2, 4, 16), draw(3, 2, 2, 16, seed=5), draw(3, 2, 2, 16, seed=6)
    lengths, rows = torch.tensor(used, dtype=torch.int32), torch.tensor([4, 0, 2])
    k, v = draw(5, 160, 2, 16), draw(5, 160, 2, 16, seed=1)
    want_k, want_v = k[rows].clone(), v[rows].clone()
    for b, length in enumerate(used):
        want_k[b, length : length + 2], want_v[b, length : length + 2] = new_k[b], new_v[b]
    expected = ragged_reference(q, want_k, want_v, [n + 2 for n in used], causal, (40, 1), leftpad=pad, softcap=1.5)
    given = {"causal": causal, "window_size": (40, 1), "softcap": 1.5, "cache_seqlens": lengths,
             "cache_leftpad": torch.tensor(pad, dtype=torch.int32)}  # fmt: skip
    shuffled = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    pages = [x.reshape(50, 16, 2, 16)[shuffled] for x in (k, v)]
    place = torch.argsort(shuffled).view(5, 10)[rows]
    table = torch.where(torch.arange(10) * 16 < lengths[:, None] + 2, place, 10**6).to(torch.int32)
    close(flash_attn_with_kvcache(q, k, v, new_k, new_v, cache_batch_idx=rows, **given), expected)
    assert torch.equal(k[rows], want_k)
    close(flash_attn_with_kvcache(q, *pages, new_k, new_v, block_table=table, **given), expected)
    assert torch.equal(pages[0][place].flatten(1, 2), want_k)


@pytest.mark.parametrize("cut", [0, 1])
@pytest.mark.parametrize("rows", [None, (4, 0, 2)])
@pytest.mark.parametrize("length", [159, 160, 40])
@pytest.mark.parametrize("window_size", [(-1, -1), (20, 0), (9, 2)])
def test_kvcache_of_any_length_and_stride(window_size, length, rows, cut):
    """Slices of a larger cache, and caches whose length is no multiple of a page, are read and written in place."""
    whole_k, whole_v = draw(5, 200, 2, 16), draw(5, 200, 2, 16, seed=1)
    k, v = whole_k[:, cut : cut + length], whole_v[:, cut : cut + length]
    q, new_k, new_v, used = draw(3, 2, 4, 16), draw(3, 2, 2, 16, seed=5), draw(3, 2, 2, 16, seed=6), [30, 7, 0]
    at = torch.tensor(rows or (0, 1, 2))
    want_k, want_v = k[at].clone(), v[at].clone()
    for b, n in enumerate(used):
        want_k[b, n : n + 2], want_v[b, n : n + 2] = new_k[b], new_v[b]
    given = {"window_size": window_size, "cache_seqlens": torch.tensor(used, dtype=torch.int32)}
    out = flash_attn_with_kvcache(q, k, v, new_k, new_v, cache_batch_idx=None if rows is None else at, **given)
    close(out, ragged_reference(q, want_k, want_v, [n + 2 for n in used], False, window_size))
    assert torch.equal(whole_k[at, cut : cut + length], want_k)
    assert torch.equal(whole_v[at, cut : cut + length], want_v)


@pytest.mark.parametrize("window_size", [torch.tensor([5, 3]), [5, 3], tuple(torch.tensor([5, 3]).numpy())])
def test_a_window_may_be_a_tensor(window_size):
    """As in flash-attn's own tests, which draw it by torch.randint."""
    q, k = draw(1, 20, 2, 16), draw(1, 30, 2, 16)
    expected = expected_of(q, k, k, mask_of(20, 30, False, (5, 3)))
    close(flash_attn_func(q, k, k, window_size=window_size), expected)
    close(flash_attn_varlen_func(q[0], k[0], k[0], [0, 20], [0, 30], 20, 30, window_size=window_size)[None], expected)
    lengths = torch.tensor([30], dtype=torch.int32)
    close(flash_attn_with_kvcache(q, k, k, cache_seqlens=lengths, window_size=window_size), expected)


def test_errors_name_arguments_that_the_caller_has():
    q, k = draw(1, 2, 4, 16), draw(1, 32, 2, 16)
    used = torch.tensor([32], dtype=torch.int32)
    for scale in (torch.ones((), requires_grad=True), float("inf")):
        for call in (
            lambda scale: flash_attn_func(q, k, k, softmax_scale=scale),
            lambda scale: flash_attn_varlen_func(q[0], k[0], k[0], [0, 2], [0, 32], 2, 32, softmax_scale=scale),
        ):
            with pytest.raises((TypeError, ValueError), match="`softmax_scale` must be") as refusal:
                call(scale)
            assert not re.search(r"\bscale\b", str(refusal.value))
    with pytest.raises(ValueError, match="`cache_leftpad` must be"):
        flash_attn_with_kvcache(q, k, k, cache_seqlens=used, cache_leftpad=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(TypeError, match="`k_cache` and `v_cache` must both be"):
        flash_attn_with_kvcache(q, k, k.double(), cache_seqlens=used)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_kvcache_rotary(causal, interleaved):
    angle = torch.arange(64)[:, None] * 10000.0 ** (-torch.arange(4) / 4)
    q, k, v = draw(1, 2, 2, 16), draw(1, 64, 2, 16), draw(1, 64, 2, 16)
    new_k, new_v = draw(1, 2, 2, 16, seed=3), draw(1, 2, 2, 16, seed=4)

    def turned(x, positions):
        """Rotate pairs of columns by an angle, as complex numbers."""
        part = x[..., :8]
        pairs = part.unflatten(-1, (4, 2)) if interleaved else part.unflatten(-1, (2, 4)).transpose(-1, -2)
        spun = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(()), angle[positions])[:, None]
        back = torch.view_as_real(spun)
        return torch.cat(((back if interleaved else back.transpose(-1, -2)).flatten(-2), x[..., 8:]), -1)

    want_k, want_v = k.clone(), v.clone()
    want_k[:, 20:22], want_v[:, 20:22] = turned(new_k, torch.tensor([20, 21])), new_v
    at = torch.tensor([20, 21] if causal else [20, 20])  # without an order all queries stand at the first new key
    expected = ragged_reference(turned(q, at), want_k, want_v, [22], causal, (-1, -1))
    out = flash_attn_with_kvcache(
        q, k, v, new_k, new_v, angle.cos(), angle.sin(), 20, causal=causal, rotary_interleaved=interleaved
    )
    close(out, expected)


def test_arguments_are_flash_attns():
    """The arguments have the names and the order of flash-attn 2.8."""
    names = lambda function: list(inspect.signature(function).parameters)
    tail = ["dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic",
            "return_attn_probs"]  # fmt: skip
    assert names(flash_attn_func) == ["q", "k", "v", *tail]
    lengths = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    assert names(flash_attn_varlen_func) == ["q", "k", "v", *lengths, *tail, "block_table"]


REFUSED = [
    ({"dropout_p": 0.1}, "`dropout_p` must be 0.0"),
    ({"alibi_slopes": torch.ones(3)}, "`alibi_slopes` must be"),
    ({"window_size": (-2, 0)}, "`window_size`"),
    ({"window_size": 5}, "`window_size`"),
    ({"softcap": -1.0}, "`softcap`"),
    ({"softcap": float("nan")}, "`softcap`"),
    ({"softmax_scale": float("nan")}, "`softmax_scale`"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=[str(*x[0]) for x in REFUSED])
def test_unserved_arguments_are_refused(given, said):
    q = draw(1, 32, 4, 16)
    ends = [0, 32]
    with pytest.raises((ValueError, TypeError), match=said):
        flash_attn_func(q, q, q, **given)
    with pytest.raises((ValueError, TypeError), match=said):
        flash_attn_varlen_func(q[0], q[0], q[0], ends, ends, 32, 32, **given)
    if "dropout_p" not in given:
        with pytest.raises((ValueError, TypeError), match=said):
            flash_attn_with_kvcache(q, q, q, **given)


def test_invalid_arguments_are_refused():
    q, ends, table = draw(1, 32, 4, 16), [0, 32], torch.zeros(1, 1, dtype=torch.int32)
    cos = torch.ones(64, 4)
    with pytest.raises(dx.UnsupportedInputError, match="flash_attn_with_kvcache"):
        flash_attn_varlen_func(q[0], q[0], q[0], ends, ends, 32, 32, block_table=table)
    with pytest.raises(ValueError, match="`max_seqlen_k` must be at least"):
        flash_attn_varlen_func(q[0], q[0], q[0], ends, ends, 32, 31)
    for said, given in {
        "`num_splits`": {"num_splits": 4},
        "must have space": {"k": q, "v": q},
        "both or neither": {"k": q},
        "need new": {"rotary_cos": cos, "rotary_sin": cos},
        "`cache_seqlens` must be given": {"block_table": table},
        "`cache_batch_idx` must be None": {"block_table": table, "cache_seqlens": 3, "cache_batch_idx": table[0]},
        "rows below 1": {"cache_batch_idx": torch.tensor([1])},
        "int or": {"cache_seqlens": torch.tensor([3])},
        "must cover position": {
            "k": q[:, :1],
            "v": q[:, :1],
            "cache_seqlens": 9,
            "rotary_cos": cos[:9],
            "rotary_sin": cos[:9],
        },
    }.items():
        with pytest.raises((ValueError, TypeError), match=said):
            flash_attn_with_kvcache(q, q.clone(), q.clone(), **given)


NEW = torch.ones(2, 1, 2, 8)
PLACES = {
    "a page that is missing": ({"block_table": torch.tensor([[0], [-1]]).int()}, "a page for every new key"),
    "a page that is not there": ({"block_table": torch.tensor([[0], [4]]).int()}, "a page for every new key"),
    "one page twice": ({"block_table": torch.tensor([[2], [2]]).int()}, "write to one page"),
    "one row twice": ({"cache_batch_idx": torch.tensor([3, 3])}, "write to one page"),
    "a length below 0": ({"cache_seqlens": -1, "cache_batch_idx": torch.tensor([0, 1])}, "must have space"),
    "fewer heads": ({"cache_batch_idx": torch.tensor([0, 1]), "k": NEW[:, :, :1], "v": NEW[:, :, :1]}, "the heads and"),
    "a smaller head": ({"cache_batch_idx": torch.tensor([0, 1]), "v": NEW[..., :1]}, "the heads and head_dim of the"),
    "no batch": ({"cache_batch_idx": torch.tensor([0, 1]), "k": NEW[0, 0, 0], "v": NEW[0, 0, 0]}, "seqlen_new"),
}


@pytest.mark.parametrize(("given", "said"), PLACES.values(), ids=PLACES)
def test_new_keys_go_to_places_of_their_own_or_nowhere(given, said):
    """Page -1 is not the last page, which another sequence may own, and one head is not broadcast to all heads."""
    cache = torch.zeros(2, 4, 16, 2, 8)
    with pytest.raises(ValueError, match=said):
        flash_attn_with_kvcache(draw(2, 1, 2, 8), *cache, **{"k": NEW, "v": NEW, "cache_seqlens": 3, **given})
    assert not cache.any()


def test_new_keys_are_not_written_to_a_cache_that_overlaps_itself():
    cache = torch.zeros(1, 16, 2, 8).expand(2, 16, 2, 8)
    with pytest.raises(ValueError, match="write to one page"):
        flash_attn_with_kvcache(draw(2, 1, 2, 8), cache, cache, NEW, NEW, cache_seqlens=3)


@pytest.mark.parametrize("ends", [[0, 7], [0, 9]])
def test_lengths_of_other_tokens_are_refused(ends):
    q = draw(8, 2, 16)
    with pytest.raises(ValueError, match="`cu_seqlens_q` must end at the 8 tokens of q"):
        flash_attn_varlen_func(q, q, q, ends, ends, 9, 9)
