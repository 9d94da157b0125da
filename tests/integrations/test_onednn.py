# SPDX-License-Identifier: Apache-2.0
"""Linear layers on oneDNN have the same results, gradients and state dict, and removing them restores the model."""

import copy

import pytest
import torch
from torch import nn

from dynaxx.integrations.onednn import OneDnnLinear, linears, use_onednn

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 40)
        self.again = self.first
        self.block = nn.Sequential(nn.Linear(24, 40, bias=False), nn.GELU(), nn.Linear(40, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) + self.first(x).sum(-1, keepdim=True) + self.again(x).mean(-1, keepdim=True)


@pytest.mark.parametrize("shape", [(3, 24), (40, 24), (1, 33, 24), (2, 5, 9, 24), (0, 24), (4, 0, 24)])
def test_results_are_those_of_torch(shape: tuple[int, ...]) -> None:
    model, x = Tied().eval(), torch.randn(shape)
    with torch.no_grad():
        expected = model(x)
        with use_onednn(model, always=True) as handle:
            assert handle.replaced == 4
            assert model.first is model.again
            torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    assert type(model.first) is nn.Linear
    assert type(model.block[2]) is nn.Linear


def test_inputs_may_have_any_strides() -> None:
    layer, x = nn.Linear(24, 40), torch.randn(24, 50).T
    with torch.no_grad(), use_onednn(nn.Sequential(layer), always=True):
        torch.testing.assert_close(OneDnnLinear.forward(linears._moved(layer), x), layer(x), rtol=1e-5, atol=1e-5)


def test_gradients_and_half_precision_stay_with_torch() -> None:
    model, x = Tied(), torch.randn(40, 24)
    model(x).sum().backward()
    expected = model.first.weight.grad.clone()
    model.zero_grad()
    with use_onednn(model, always=True):
        model(x).sum().backward()
        torch.testing.assert_close(model.first.weight.grad, expected)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            assert model.first(x).dtype == torch.bfloat16
    assert use_onednn(Tied().bfloat16(), always=True).replaced == 0


def test_state_dict_copies_and_hooks_are_those_of_the_layer() -> None:
    model, seen = Tied().eval(), []
    model.first.register_forward_hook(lambda *_: seen.append(1))
    before = {name: value.data_ptr() for name, value in model.state_dict().items()}
    with torch.no_grad(), use_onednn(model, always=True):
        assert {name: value.data_ptr() for name, value in model.state_dict().items()} == before
        x = torch.randn(32, 24)
        torch.testing.assert_close(copy.deepcopy(model)(x), model(x))
    assert seen


def test_only_layers_that_gain_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "_times_faster", lambda layer: 2.0 if layer.out_features == 7 else 1.05)
    model = Tied()
    handle = use_onednn(model)
    assert handle.replaced == 1
    assert handle.times_faster == {(24, 40): 1.05, (40, 7): 2.0}
    handle.remove()
    handle.remove()
    assert handle.replaced == 0


def test_a_compiled_graph_calls_the_op() -> None:
    model, x = Tied().eval(), torch.randn(20, 24)
    graphs = []

    def keep(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph

    with torch.no_grad(), use_onednn(model, always=True):
        expected = model(x)
        torch.testing.assert_close(torch.compile(model, backend=keep, fullgraph=True)(x), expected)
    assert sum("onednn_linear" in str(node.target) for node in graphs[0].graph.nodes) == 4


def test_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs a torch with oneDNN"):
        use_onednn(Tied())
