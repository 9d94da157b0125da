# SPDX-License-Identifier: Apache-2.0
"""`BlockLayout.plot` draws what the layout shows."""

import pytest
import torch

import dynaxx as dx
from dynaxx.layout.plot import block_picture

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("agg")


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


def test_the_picture_is_the_mask():
    layout = (dx.SlidingWindow(100) | dx.Sink(5)).layout(300, block_size=(32, 64))
    (image,) = layout.plot().get_images()
    drawn = torch.as_tensor(image.get_array())
    assert torch.equal(drawn == 2, layout.to_dense()[0, 0])


def test_each_head_is_drawn_by_itself():
    layouts = [dx.SlidingWindow(20).layout(128, block_size=32), dx.Causal().layout(128, block_size=32)]
    both = dx.BlockLayout.stack_heads(layouts)
    for head, alone in enumerate(layouts):
        assert torch.equal(block_picture(both, 0, head), block_picture(alone, 0, 0))
        drawn = torch.as_tensor(both.plot(head=head).get_images()[0].get_array())
        assert torch.equal(drawn == 2, alone.to_dense()[0, 0])


def test_long_layouts_are_drawn_by_block():
    layout = dx.SlidingWindow(1000).layout(100_000, block_size=128)
    (image,) = layout.plot().get_images()
    assert image.get_array().shape == (layout.q_blocks, layout.kv_blocks)


def test_wrong_heads_are_refused():
    layout = dx.SlidingWindow(20).layout(128, block_size=32)
    with pytest.raises(ValueError, match="`head` must be from 0 to 0, got 1"):
        layout.plot(head=1)
    with pytest.raises(ValueError, match="`batch` must be from 0 to 0, got -1"):
        layout.plot(batch=-1)
