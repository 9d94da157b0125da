# SPDX-License-Identifier: Apache-2.0
"""A mixin for SGLang's attention backends: sparse sequences on dynaxx's kernels, all others on SGLang's.

Both read the same cache. SGLang's backend also stores keys and values, and computes every step that has no sparse
sequence. A step with sparse and dense sequences runs on SGLang first, and its sparse sequences are then overwritten.
"""

from __future__ import annotations

import importlib
import weakref
from functools import lru_cache
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from dynaxx.integrations.runtime.paged import Sequences, Softmax, TokenPages
from dynaxx.integrations.runtime.paged_layer import PagedLayer, Step
from dynaxx.integrations.sglang.engine import start

PREFILL = (ForwardMode.EXTEND, ForwardMode.MIXED)


class PolicyBackend:
    """A mixin that precedes one of SGLang's attention backends."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)  # type: ignore[call-arg]
        parallel = get_parallel()
        graphs = not check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED)
        self.engine = start(runner, (parallel.attn_tp_rank, parallel.attn_tp_size), decode_graphs=graphs)
        self.needs_cpu_seq_lens = True
        self._tokens = runner.req_to_token_pool.req_to_token
        self._pool, self._page_size = runner.token_to_kv_pool, runner.page_size
        self._batch: Any = lambda: None  # the batch of the step, weakly
        self._step: Step | None = None

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any:
        """Attend in prompts, their chunks, and steps that mix them with decoding. q has a row per token."""
        dense = super().forward_extend  # type: ignore[misc]
        if forward_batch.forward_mode not in PREFILL or not self._covers(layer, k, forward_batch, kwargs):
            return dense(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        return self._attend(dense, q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any:
        """Attend in steps that decode one token per sequence. q has a row per sequence."""
        dense = super().forward_decode  # type: ignore[misc]
        if layer.layer_id not in self.engine.deployed.decode or not self._covers(layer, k, forward_batch, kwargs):
            return dense(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        return self._attend(dense, q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def _covers(self, layer: Any, k: Tensor | None, forward_batch: Any, kwargs: dict[str, Any]) -> bool:
        """Return whether the policy has a rule for a layer, and the call is plain causal attention."""
        window = layer.sliding_window_size
        return (
            layer.layer_id in self.engine.deployed.rules
            and k is not None
            and (window is None or window < 0)
            and not layer.is_cross_attention
            and layer.attn_type.value == "decoder"
            and layer.qk_head_dim == layer.v_head_dim
            and layer.k_scale is None
            and getattr(forward_batch, "attn_cp_metadata", None) is None
            and all(value is None for name, value in kwargs.items() if name != "sinks")
        )

    def _attend(
        self, dense: Any, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save: bool, kwargs: dict[str, Any]
    ) -> Any:
        softmax = Softmax(float(layer.scaling), layer.logit_cap or None, kwargs.get("sinks"))
        paged, step = self.engine.layer(layer.layer_id, softmax), self._step_of(batch)
        split = step.split(layer.layer_id)
        if split.dense or not split.runs_sparse:
            out = dense(q, k, v, layer, batch, save, **kwargs)
            if not isinstance(out, Tensor):  # with log-sum-exps, which sparse sequences would lack
                return out
        else:
            if save:
                self._pool.set_kv_buffer(layer, KVWriteLoc.for_batch(batch), k, v)
            out = torch.zeros_like(q).flatten(1)  # (tokens, heads * head_dim); rows of padding stay zero
        if not self._sparse(paged, step, q, layer, out):
            return dense(q, k, v, layer, batch, save, **kwargs)
        return out

    def _sparse(self, paged: PagedLayer, step: Step, q: Tensor, layer: Any, out: Tensor) -> bool:
        shape = (-1, self._page_size, layer.tp_k_head_num, layer.qk_head_dim)
        keys, values = self._pool.get_kv_buffer(layer.layer_id)
        whole = len(keys) // self._page_size * self._page_size
        pages = TokenPages(keys[:whole].view(shape), values[:whole].view(shape))
        heads = (-1, layer.tp_q_head_num, layer.qk_head_dim)
        return paged.sparse(q.view(heads), pages, step, out.view(heads))

    def _step_of(self, batch: Any) -> Step:
        """Return the step of a batch, made at its first layer."""
        if self._step is None or self._batch() is not batch:
            self._batch, self._step = weakref.ref(batch), self.engine.step(self._sequences(batch))
        return self._step

    def _sequences(self, batch: Any) -> Sequences:
        count = batch.batch_size
        if batch.forward_mode.is_decode():
            new, lengths = [1] * count, batch.seq_lens_cpu[:count].tolist()
        else:
            new = list(batch.extend_seq_lens_cpu)
            lengths = [before + now for before, now in zip(batch.extend_prefix_lens_cpu, new, strict=True)]
        starts = [0]
        for each in new:
            starts.append(starts[-1] + each)
        longest = -(-max(lengths) // self._page_size) * self._page_size
        slots = self._tokens[batch.req_pool_indices[:count].long(), : longest : self._page_size]
        table = torch.div(slots, self._page_size, rounding_mode="floor").to(torch.int32)
        of_prompt = [True] * count if batch.forward_mode == ForwardMode.EXTEND else None  # mixed steps do not say it
        return Sequences(table, batch.seq_lens[:count].to(torch.int32), starts, lengths, of_prompt)


@lru_cache(maxsize=4)
def backend_class(path: str) -> type:
    """Return one of SGLang's backends with a policy; `path` is "module.Class" in its attention package."""
    module, name = path.split(".")
    base = getattr(importlib.import_module(f"sglang.srt.layers.attention.{module}"), name)
    return type(f"Policy{name}", (PolicyBackend, base), {})
