# SPDX-License-Identifier: Apache-2.0
"""`hide_keys` keeps exactly the pairs that both the layout and the keys show."""

import pytest
import torch

import dynaxx as dx
from dynaxx.layout.hide_keys import hide_keys


def shown(layout, visible):
    return (layout.to_dense() & visible[:, None, None]).expand(max(layout.layout_batch, len(visible)), -1, -1, -1)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (65, 129), (100, 250), (128, 128)])
@pytest.mark.parametrize("block_size", [(16, 16), (64, 32)])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_against_the_dense_mask(seqlen_q, seqlen_k, block_size, share):
    rule = dx.SlidingWindow((20, 20)) | dx.GlobalTokens(3) | dx.RandomBlocks(1)
    layout = rule.layout(seqlen_q, seqlen_k, causal=False, block_size=block_size)
    visible = torch.rand(3, seqlen_k, generator=torch.Generator().manual_seed(seqlen_k)) < share
    visible[2, : seqlen_k // 2] = True
    hidden = hide_keys(layout, visible).validate()
    assert torch.equal(hidden.to_dense(), shown(layout, visible)[: hidden.layout_batch])
    assert hidden.nnz <= layout.nnz * 3


def test_layouts_of_heads_and_blocks_that_nobody_sees():
    heads = [dx.SlidingWindow(9).layout(70, block_size=16), dx.Full().layout(70, block_size=16)]
    layout = dx.BlockLayout.stack_heads(heads)
    visible = torch.ones(2, 70, dtype=torch.bool)
    visible[0, :16], visible[1] = False, False
    hidden = hide_keys(layout, visible).validate()
    assert (hidden.layout_batch, hidden.layout_heads) == (2, 2)
    assert torch.equal(hidden.to_dense(), shown(layout, visible))
    assert not (hidden.entries()[1][: hidden.nnz] == 0).any()  # block 0 is hidden in both
    assert hidden.kv_num_blocks[1].sum() == 0


def test_nothing_hidden_is_the_layout_itself_and_equal_rows_share_one():
    layout = dx.SlidingWindow(9).layout(70, block_size=16)
    assert hide_keys(layout, torch.ones(4, 70, dtype=torch.bool)) is layout
    visible = torch.ones(4, 70, dtype=torch.bool)
    visible[:, 50:] = False
    assert hide_keys(layout, visible).layout_batch == 1


@pytest.mark.parametrize(
    "visible", [torch.ones(2, 69, dtype=torch.bool), torch.ones(70, dtype=torch.bool), torch.ones(2, 70)]
)
def test_masks_that_do_not_fit_are_refused(visible):
    with pytest.raises(ValueError, match="`visible` must be bool"):
        hide_keys(dx.SlidingWindow(9).layout(70, block_size=16), visible)


def test_a_layout_per_batch_entry():
    rules = (dx.SlidingWindow(9), dx.Full(), dx.Causal())
    layout = dx.BlockLayout.stack_batch([rule.layout(70, 90, block_size=(16, 32)) for rule in rules]).validate()
    dense = [rule.layout(70, 90, block_size=(16, 32)).to_dense() for rule in rules]
    assert torch.equal(layout.to_dense(), torch.cat(dense))
    visible = torch.rand(3, 90) < 0.7
    assert torch.equal(hide_keys(layout, visible).validate().to_dense(), shown(layout, visible))
    pairs = dx.BlockLayout.stack_heads([layout, layout])
    again = dx.BlockLayout.stack_batch([pairs, pairs])
    assert (again.layout_batch, again.layout_heads) == (6, 2)
    assert torch.equal(again.to_dense(), torch.cat([pairs.to_dense()] * 2))
    with pytest.raises(ValueError, match="`visible` must be for batch 3"):
        hide_keys(layout, visible[:2])
    with pytest.raises(ValueError, match="layout_heads"):
        dx.BlockLayout.stack_batch([layout, pairs])


def test_what_is_no_layout_or_packed_is_refused():
    with pytest.raises(TypeError, match="`layout` must be"):
        hide_keys(dx.Causal(), torch.ones(1, 70) > 0)
    with pytest.raises(ValueError, match="must not be packed"):
        hide_keys(dx.packed_layout(dx.Causal(), (0, 30, 70), block_size=16), torch.ones(1, 70) > 0)
