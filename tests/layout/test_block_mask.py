# SPDX-License-Identifier: Apache-2.0
"""`from_block_mask` shows what FlexAttention's own `create_mask` shows, for mask functions of every form."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask

import dynaxx as dx
from dynaxx.layout import from_block_mask
from interpreter import DEVICE

BATCH, HEADS, SEQLEN = 2, 3, 200
draw = torch.Generator().manual_seed(0)
TABLE = (torch.rand(BATCH, HEADS, SEQLEN, SEQLEN, generator=draw) < 0.4).to(DEVICE)
DOCUMENTS = torch.arange(SEQLEN).div(70, rounding_mode="floor").expand(BATCH, -1).to(DEVICE)
TAGS = (torch.rand(SEQLEN, 5, generator=draw) < 0.3).to(DEVICE)
LENGTHS = torch.tensor([150, 200], device=DEVICE)
MASKS = {
    "causal": lambda b, h, q, k: q >= k,
    "keys alone": lambda b, h, q, k: k < 77,
    "a table, index by index": lambda b, h, q, k: TABLE[b][h][q][k],
    "a table, all indices at once": lambda b, h, q, k: TABLE[b, h, q, k],
    "documents": lambda b, h, q, k: (DOCUMENTS[b][q] == DOCUMENTS[b][k]) & (q >= k),
    "padding": lambda b, h, q, k: k < LENGTHS[b],
    "a reduction": lambda b, h, q, k: (TAGS[q] & TAGS[k]).any(),
    "a sum of rows": lambda b, h, q, k: TAGS[q].sum() >= TAGS[k].sum(-1),
    "heads": lambda b, h, q, k: (q - k).abs() <= 10 * (h + 1),
    "stacked": lambda b, h, q, k: torch.stack([q >= k, k > 3]).all(0),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", [(SEQLEN, SEQLEN), (130, SEQLEN)])
@pytest.mark.parametrize("block_size", [64, (128, 64)])
@pytest.mark.parametrize("chunk", [3, 1024])
def test_mask_functions(mask, lengths, block_size, chunk):
    form = (MASKS[mask], BATCH, HEADS, *lengths, DEVICE)
    layout = from_block_mask(create_block_mask(*form, BLOCK_SIZE=block_size), chunk=chunk)
    assert torch.equal(layout.to_dense(), create_mask(*form))


@pytest.mark.parametrize("mask", [lambda b, h, q, k: q - k, lambda b, h, q, k: torch.stack([q >= k, q >= k])])
def test_a_mask_that_is_none_is_refused(mask):
    block_mask = create_block_mask(MASKS["causal"], 1, 1, SEQLEN, SEQLEN, DEVICE, BLOCK_SIZE=64)
    block_mask.mask_mod = mask
    with pytest.raises(TypeError, match="`mask_mod` of `block_mask` must return one bool"):
        from_block_mask(block_mask)


def test_attention_is_that_of_the_mask():
    form = (MASKS["a reduction"], 1, 1, SEQLEN, SEQLEN, DEVICE)
    q = torch.randn(1, SEQLEN, 2, 16, device=DEVICE)
    found = dx.sparse_attention(q, q, q, from_block_mask(create_block_mask(*form, BLOCK_SIZE=64)))
    x = q.transpose(1, 2)
    wanted = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=create_mask(*form))
    torch.testing.assert_close(found, wanted.transpose(1, 2).nan_to_num(), atol=2e-5, rtol=2e-5)
