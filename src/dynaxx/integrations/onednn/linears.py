# SPDX-License-Identifier: Apache-2.0
"""`use_onednn`: run a model's linear layers on oneDNN.

On x86, torch computes fp32 linear layers with MKL. MKL uses AVX-512 only on Intel's processors. On AMD's processors it
uses AVX2 and reaches half of the peak. oneDNN, which torch also contains, uses the instructions that a processor has.

    model:  Linear --> OneDnnLinear   shares the weight and keeps the state dict
    call:   enough tokens, no gradient, fp32 on a CPU --> oneDNN, else torch's default
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynaxx.arguments import typed

MIN_TOKENS = 16  # oneDNN is faster from here on: measured for 576 to 1,536 features on an AMD EPYC (Zen 5)
WORTH = 1.1  # minimum speedup in a short measurement; other layers do not change
SAMPLE = 128  # tokens of the measurement
ROUNDS = 7


class OneDnnLinear(nn.Linear):
    """Linear layer that runs on oneDNN where possible.

    It shares the parameters of the layer that it replaces, so training, saving and moving work as before.
    """

    least_tokens: int = MIN_TOKENS

    def forward(self, input: Tensor) -> Tensor:
        """Return input @ weight.T + bias."""
        if not _serves(input, self.weight, self.least_tokens):
            return F.linear(input, self.weight, self.bias)
        if torch.compiler.is_compiling():
            return onednn_linear(input, self.weight, self.bias)
        return _product(input, self.weight, self.bias)


class OneDnnHandle:
    """Handle of linear layers that run on oneDNN until `remove()`. Also a context manager.

    Attributes:
        times_faster: measured speedup of oneDNN for 128 tokens, by (in_features, out_features).
        replaced: number of layers that run on oneDNN.
    """

    def __init__(self, model: nn.Module, times_faster: dict[tuple[int, int], float], worth: float) -> None:
        self.times_faster = times_faster
        self._before: list[tuple[nn.Module, str, nn.Module]] = []
        made: dict[int, OneDnnLinear] = {}
        for parent in list(model.modules()):
            for name, child in list(parent._modules.items()):
                if _can_move(child) and times_faster[child.in_features, child.out_features] >= worth:
                    setattr(parent, name, made.setdefault(id(child), _moved(child)))
                    self._before.append((parent, name, child))

    @property
    def replaced(self) -> int:
        """Return the number of replaced layers."""
        return len(self._before)

    def remove(self) -> None:
        """Restore the original layers."""
        while self._before:
            parent, name, child = self._before.pop()
            child.training = getattr(parent, name).training
            setattr(parent, name, child)

    def __enter__(self) -> OneDnnHandle:
        """Return the handle. The end of the block removes it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the original layers."""
        self.remove()


@typed
def use_onednn(model: nn.Module, *, always: bool = False) -> OneDnnHandle:
    """Run a model's fp32 linear layers on oneDNN where it is faster on this CPU. Modifies the model in place.

    Each shape of layer is timed once with both libraries, which takes a few milliseconds. Results differ from MKL's by
    rounding. Half-precision layers run on oneDNN without this function. Call it before `torch.compile`.

    Args:
        model: any module. Only layers of the exact type `nn.Linear` change, not those of subclasses.
        always: replace all layers without timing them.

    Returns:
        A handle; `remove()` restores the model.

    Raises:
        ValueError: this build of torch has no oneDNN.
    """
    if not torch.backends.mkldnn.is_available():
        raise ValueError("`use_onednn` needs a torch with oneDNN: torch.backends.mkldnn.is_available() is False here")
    layers = {(each.in_features, each.out_features): each for each in model.modules() if _can_move(each)}
    faster = {shape: float("inf") if always else _times_faster(layer) for shape, layer in layers.items()}
    return OneDnnHandle(model, faster, WORTH)


def _can_move(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and module.weight.device.type == "cpu" and module.weight.dtype == torch.float32


def _moved(layer: nn.Linear) -> OneDnnLinear:
    """Return a layer with the parameters, hooks and training mode of another one."""
    moved = OneDnnLinear.__new__(OneDnnLinear)
    moved.__dict__.update(layer.__dict__)
    return moved


def _serves(x: Tensor, weight: Tensor, least_tokens: int) -> bool:
    recorded = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if recorded or x.device.type != "cpu" or x.dtype != torch.float32 or weight.dtype != torch.float32:
        return False
    return x.numel() >= least_tokens * x.shape[-1] and not torch.is_autocast_enabled("cpu")


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@torch.library.custom_op("dynaxx::onednn_linear", mutates_args=())
def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias, computed by oneDNN. It is opaque to inductor, which requires frozen weights."""
    return _product(x, weight, bias)


@onednn_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.no_grad()
def _times_faster(layer: nn.Linear) -> float:
    """Return the speedup of oneDNN over torch's default; each uses the best of several rounds."""
    x = torch.ones(SAMPLE, layer.in_features, dtype=torch.float32, device="cpu")
    seconds: dict[Any, float] = {}
    for _ in range(ROUNDS):
        for run in (F.linear, _product):
            start = time.process_time()  # excludes the time of other processes
            run(x, layer.weight, layer.bias)
            seconds[run] = min(seconds.get(run, float("inf")), time.process_time() - start)
    return seconds[F.linear] / seconds[_product]
