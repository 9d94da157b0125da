# SPDX-License-Identifier: Apache-2.0
"""Time the parts of a model: hooks around attention modules and MLPs, and a wrapper around the attention function."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dynaxx.integrations.transformers.calls.dense_fallback import attention_of
from dynaxx.lab.perplexity import routed

ATTENTION_NAME = "dynaxx_profile"  # name in transformers' AttentionInterface while the clock runs


class PartClock:
    """Sum up time by part. On a GPU it records events and synchronizes once, at the end of a run."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._spans: list[tuple[str, Any, Any]] = []
        self.attention_flops = 0
        self.attention_calls = 0

    @contextmanager
    def span(self, part: str, label: str) -> Iterator[None]:
        """Count the time of the `with` block as a part of the pass."""
        started = self.enter(label)
        yield
        self.leave(part, started)

    def enter(self, label: str) -> tuple[Any, Any]:
        """Start a span, with a label for PyTorch's profiler and, on a GPU, for Nsight."""
        record = torch.profiler.record_function(f"dynaxx.{label}")
        record.__enter__()
        if self._gpu:
            torch.cuda.nvtx.range_push(f"dynaxx.{label}")
        return self._now(), record

    def leave(self, part: str, started: tuple[Any, Any]) -> None:
        """End a span that `enter` began."""
        self._spans.append((part, started[0], self._now()))
        if self._gpu:
            torch.cuda.nvtx.range_pop()
        started[1].__exit__(None, None, None)

    def collect(self) -> dict[str, float]:
        """Return the seconds by part since the last call, and reset them."""
        if self._gpu:
            torch.cuda.synchronize()
        seconds = dict.fromkeys(("attention", "windowed", "module", "mlp"), 0.0)
        for part, start, end in self._spans:
            seconds[part] += start.elapsed_time(end) / 1e3 if self._gpu else end - start
        self._spans.clear()
        return seconds

    def _now(self) -> Any:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@contextmanager
def instrumented(model: Any) -> Iterator[PartClock]:
    """Time a model's attention function, attention modules and MLPs within the block, and restore it afterwards."""
    clock = PartClock(model.device)
    attention, mlps = find_parts(model)
    with ExitStack() as stack:
        for index, module in enumerate(attention):
            _hook(stack, clock, module, "module", f"attention_module.{getattr(module, 'layer_idx', index)}")
        for index, module in enumerate(mlps):
            _hook(stack, clock, module, "mlp", f"mlp.{index}")
        stack.enter_context(_timed_core(model, clock))
        yield clock


def find_parts(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the outermost attention modules and MLPs (or mixtures of experts), by their names in transformers."""

    def outermost(words: tuple[str, ...], module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            kind = type(child).__name__.lower()
            if not isinstance(child, nn.ModuleList) and any(word in kind for word in words):
                yield child
            else:
                yield from outermost(words, child)

    attention = list(outermost(("attention",), model))
    mlps = list(outermost(("mlp", "feedforward", "ffn", "moe", "experts"), model))
    if not attention:
        raise ValueError(f"no attention module found in {type(model).__name__}")
    return attention, mlps


def _hook(stack: ExitStack, clock: PartClock, module: nn.Module, part: str, label: str) -> None:
    started: list[tuple[Any, Any]] = []
    before = module.register_forward_pre_hook(lambda *_: started.append(clock.enter(label)))
    after = module.register_forward_hook(lambda *_: clock.leave(part, started.pop()))
    stack.callback(before.remove)
    stack.callback(after.remove)


@contextmanager
def _timed_core(model: Any, clock: PartClock) -> Iterator[None]:
    """Time the model's attention. Raise ValueError if it does not use transformers' attention interface."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    used = model.config._attn_implementation
    if used != "eager" and used not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        raise ValueError(
            f"attention implementation must be one of transformers' interface, such as 'sdpa', got {used!r}"
        )

    def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return attention_of(module, used)(module, *args, **kwargs)

    def timed(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        window = kwargs.get("sliding_window")  # a layer with a window, which policies do not change
        if window is None:
            rows, last = query.shape[2], key.shape[2]  # the queries are at the end of the keys
            pairs = rows * last - rows * (rows - 1) // 2
            clock.attention_flops += 2 * pairs * query.shape[0] * query.shape[1] * (query.shape[3] + value.shape[3])
        clock.attention_calls += 1
        part = "attention" if window is None else "windowed"
        with clock.span(part, f"attention.{getattr(module, 'layer_idx', '')}"):
            return attend(module, query, key, value, *args, **kwargs)

    with routed(model, ATTENTION_NAME, timed, ALL_MASK_ATTENTION_FUNCTIONS[used]):
        yield
