# SPDX-License-Identifier: Apache-2.0
"""xFormers' masks as layouts. Here the classes are stand-ins; `make test-xformers` takes the real ones."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

import dynaxx as dx
from dynaxx.integrations.xformers import layout_of_mask
from dynaxx.integrations.xformers.masks import BLOCKS, WHOLE

REAL = importlib.util.find_spec("xformers") is not None


def starts(lengths):
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


def stand_in(name, **fields):
    return type(name, (), {})() if not fields else _with(type(name, (), {})(), fields)


def _with(mask, fields):
    for name, value in fields.items():
        setattr(mask, name, value)
    return mask


def blocks(name, q_lengths, k_lengths, **fields):
    info = lambda lengths: SimpleNamespace(seqstart_py=starts(lengths))
    return stand_in(name, q_seqinfo=info(q_lengths), k_seqinfo=info(k_lengths), **fields)


def padded(name, q_lengths, k_starts, k_lengths, **fields):
    keys = SimpleNamespace(seqstart_py=k_starts, seqlen_py=k_lengths)
    return stand_in(name, q_seqinfo=SimpleNamespace(seqstart_py=starts(q_lengths)), k_seqinfo=keys, **fields)


def band(q_length, k_length, lo=None, hi=None, from_start=False):
    """Return the mask of pairs with lo <= query - key <= hi."""
    distance = torch.arange(q_length)[:, None] - torch.arange(k_length)
    distance = distance if from_start else distance + k_length - q_length
    seen = torch.ones(q_length, k_length, dtype=torch.bool)
    seen = seen if lo is None else seen & (distance >= lo)
    return seen if hi is None else seen & (distance <= hi)


BANDS = {
    "BlockDiagonalMask": {},
    "BlockDiagonalCausalMask": {"lo": 0, "from_start": True},
    "BlockDiagonalCausalFromBottomRightMask": {"lo": 0},
    "BlockDiagonalCausalLocalAttentionMask": {"lo": 0, "hi": 19, "from_start": True},
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": {"lo": 0, "hi": 19},
    "BlockDiagonalPaddedKeysMask": {},
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": {"lo": 0},
    "BlockDiagonalLocalAttentionPaddedKeysMask": {"lo": -5, "hi": 17},
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": {"lo": 0, "hi": 19},
    "BlockDiagonalGappyKeysMask": {},
    "BlockDiagonalCausalWithOffsetGappyKeysMask": {"lo": 0},
    "LowerTriangularMask": {"lo": 0, "from_start": True},
    "LowerTriangularFromBottomRightMask": {"lo": 0},
    "LowerTriangularFromBottomRightLocalAttentionMask": {"lo": 0, "hi": 19},
    "LocalAttentionFromBottomRightMask": {"lo": -5, "hi": 17},
}
FIELDS = {"_window_size": 20, "window_left": 17, "window_right": 5}
Q, K = [3, 17, 64, 1, 33], [5, 40, 64, 9, 130]


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("block_size", [16, (32, 64)])
def test_a_mask_of_sequences_shows_its_pairs(name, block_size):
    gaps = "Padded" in name or "Gappy" in name
    k_starts = [0, 7, 60, 124, 140, 280] if gaps else starts(K)
    mask = padded(name, Q, k_starts, K, **FIELDS) if gaps else blocks(name, Q, K, **FIELDS)
    expected = torch.zeros(sum(Q), k_starts[-1], dtype=torch.bool)
    for i, (q_start, k_start) in enumerate(zip(starts(Q), k_starts, strict=True)):
        if i < len(Q):
            expected[q_start : q_start + Q[i], k_start : k_start + K[i]] = band(Q[i], K[i], **BANDS[name])
    layout = layout_of_mask(mask, block_size=block_size)
    assert torch.equal(layout.to_dense()[0, 0], expected)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(50, 50), (33, 130), (130, 33), (1, 65)])
def test_a_mask_without_lengths_shows_its_pairs(name, seqlen_q, seqlen_k):
    layout = layout_of_mask(stand_in(name, **FIELDS), seqlen_q, seqlen_k, block_size=16)
    assert torch.equal(layout.to_dense()[0, 0], band(seqlen_q, seqlen_k, **BANDS[name]))


def test_attention_and_gradients_under_a_mask_of_sequences():
    mask = blocks("BlockDiagonalCausalMask", Q, K)
    layout = layout_of_mask(mask, block_size=16)
    q, k, v = (torch.randn(1, sum(n), h, 16, requires_grad=True) for n, h in ((Q, 4), (K, 2), (K, 2)))
    out = dx.sparse_attention(q[0], k[0], v[0], layout)
    bias = layout.to_dense()[0, 0]
    heads = [x.transpose(1, 2) for x in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2))]
    expected = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=bias).transpose(1, 2)
    torch.testing.assert_close(out[None], expected)
    do = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad(x, (q, k, v), do.view_as(x), retain_graph=True) for x in (out, expected))
    torch.testing.assert_close(ours, theirs)


def test_unserved_masks_are_refused():
    with pytest.raises(dx.UnsupportedInputError, match="PagedBlockDiagonalPaddedKeysMask"):
        layout_of_mask(stand_in("PagedBlockDiagonalPaddedKeysMask"))
    with pytest.raises(dx.UnsupportedInputError, match="LowerTriangularMaskWithTensorBias"):
        layout_of_mask(stand_in("LowerTriangularMaskWithTensorBias"), 5)
    with pytest.raises(dx.UnsupportedInputError, match="Tensor"):
        layout_of_mask(torch.zeros(3, 3))
    with pytest.raises(ValueError, match="`seqlen_q` must be given"):
        layout_of_mask(stand_in("LowerTriangularMask"))
    with pytest.raises(ValueError, match="its own lengths"):
        layout_of_mask(blocks("BlockDiagonalMask", Q, K), 5)
    with pytest.raises(ValueError, match="must not overlap"):
        layout_of_mask(padded("BlockDiagonalGappyKeysMask", [3, 3], [10, 0, 40], [5, 5]))


@pytest.mark.skipif(not REAL, reason="xFormers has an environment of its own: make test-xformers")
@pytest.mark.filterwarnings("ignore")
class TestReal:
    def masks(self):
        from xformers.ops.fmha import attn_bias as of

        plain = of.BlockDiagonalMask.from_seqlens(Q, K)
        yield plain
        yield of.BlockDiagonalMask.from_seqlens(Q)
        yield plain.make_causal()
        yield plain.make_causal_from_bottomright()
        yield plain.make_local_attention(20)
        yield plain.make_local_attention_from_bottomright(20)
        lengths = {"q_seqlen": Q, "kv_padding": 140, "kv_seqlen": K}
        yield of.BlockDiagonalPaddedKeysMask.from_seqlens(**lengths)
        yield of.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(**lengths)
        yield of.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local(**lengths, window_left=17, window_right=5)
        yield of.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(**lengths, window_size=20)
        gappy = {"q_seqlen": Q, "kv_seqstarts": [0, 7, 60, 124, 140, 280], "kv_seqlen": K}
        yield of.BlockDiagonalGappyKeysMask.from_seqlens(**gappy)
        yield of.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(**gappy)

    def test_every_mask_of_sequences(self):
        seen = set()
        for mask in self.masks():
            layout = layout_of_mask(mask, block_size=16)
            shape = (sum(Q), mask.k_seqinfo.seqstart_py[-1])
            assert torch.equal(layout.to_dense()[0, 0], mask.materialize(shape) == 0), mask
            seen.add(type(mask).__name__)
        assert seen == set(BLOCKS)

    def test_every_mask_without_lengths(self):
        from xformers.ops.fmha import attn_bias as of

        masks = [of.LowerTriangularMask(), of.LowerTriangularFromBottomRightMask(),
                 of.LowerTriangularFromBottomRightLocalAttentionMask(20),
                 of.LocalAttentionFromBottomRightMask(17, 5)]  # fmt: skip
        for mask in masks:
            for lengths in ((50, 50), (33, 130), (130, 33)):
                layout = layout_of_mask(mask, *lengths, block_size=16)
                assert torch.equal(layout.to_dense()[0, 0], mask.materialize(lengths) == 0), (mask, lengths)
        assert {type(mask).__name__ for mask in masks} == set(WHOLE)
