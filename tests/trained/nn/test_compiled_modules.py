# SPDX-License-Identifier: Apache-2.0
"""`nn.SparseAttention` compiles without a graph break, and exports."""

import pickle

import pytest
import torch

import dynaxx as dx
from dynaxx.trained.nn import SparseAttention


class Two(torch.nn.Module):
    """A model of two layers with different patterns."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.near = SparseAttention(32, 2, 1, pattern=dx.SlidingWindow(20), block_size=16)
        self.far = SparseAttention(32, 2, 2, pattern=dx.Sink(2) | dx.SlidingWindow(5), block_size=16)

    def forward(self, x):
        return self.far(self.near(x))


@pytest.mark.filterwarnings("ignore")
def test_it_compiles_with_fullgraph_for_all_lengths():
    torch._dynamo.reset()
    model = Two()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch, seqlen in ((1, 40), (2, 40), (2, 56), (1, 72)):
        x = torch.randn(batch, seqlen, 32)
        plain, traced = x.clone().requires_grad_(), x.clone().requires_grad_()
        torch.testing.assert_close(compiled(traced), model(plain), atol=1e-5, rtol=1e-5)
        model(plain).square().sum().backward()
        compiled(traced).square().sum().backward()
        torch.testing.assert_close(traced.grad, plain.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_another_pattern_and_another_process_have_their_own_number():
    """The number of a pattern follows the pattern; saved modules get the number of the process that loads them."""
    torch._dynamo.reset()
    model, x = Two(), torch.randn(1, 40, 32)
    model.near.pattern = dx.SlidingWindow(3)
    copied = pickle.loads(pickle.dumps(model))
    compiled = torch.compile(copied, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-5)
    saved = {name: value for name, value in vars(model.near).items() if name not in ("_pattern", "_number")}
    older = SparseAttention.__new__(SparseAttention)
    older.__setstate__({**saved, "pattern": dx.SlidingWindow(3)})  # as modules were saved before
    assert older.pattern == dx.SlidingWindow(3)
    torch.testing.assert_close(older(x), model.near(x))


@pytest.mark.filterwarnings("ignore")
def test_it_exports():
    model, x = Two(), torch.randn(1, 40, 32)
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), model(x), atol=1e-5, rtol=1e-5)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count("dynaxx.attention_forward.default") == 2
    assert model.near.pattern.layout(40, block_size=16).kv_indices.device.type == "cpu"
    assert type(model.near.pattern.layout(40, block_size=16).kv_indices) is torch.Tensor  # no fake one was cached
