# SPDX-License-Identifier: Apache-2.0
"""Compile a policy's kernels while the engine starts, so that no request waits for them.

vLLM measures the memory of a step by a pass without attention metadata. Prefill kernels are run in that pass, which
also lets vLLM see the memory that they need. Decoding kernels are run when a builder of metadata is made, which knows
the cache. Steps that CUDA graphs capture compile theirs before the capture.

Knows vLLM's objects by the names of their fields alone, and imports none of it.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dynaxx.integrations.runtime.paged_layer import PagedLayer
from dynaxx.integrations.runtime.paged_warmup import (
    Decoding,
    LayerShape,
    compiled_kernels,
    prefill_shapes,
    run_decode,
    run_prefill,
)
from dynaxx.integrations.vllm.engine import Engine, softmax_of
from dynaxx.policy import LayerPlan

LARGEST = 4  # shapes of a rule whose kernels another rule has compiled: for the memory that it needs


def prepare_prefill(
    engine: Engine, index: int, layer: Any, query: Tensor, dtype: torch.dtype, log: logging.Logger
) -> None:
    """Run the prefill kernels of a layer's rule, if no layer before it has the same rule.

    Args:
        index: of the layer in the model.
        layer: vLLM's `Attention`.
        query: (tokens, heads, head_size) of a step of the largest size.
        dtype: of the output; queries may be in fp8.
        log: told what is compiled, and how long it took.
    """
    plan, config = engine.plans.get(index), engine.config
    if plan is None or layer.sliding_window is not None or plan in engine.prepared or _capturing(query):
        return
    kind, chunk, longest = kind_of(plan), query.shape[0], config.model_config.max_model_len
    below, start = engine.policy.dense_below, engine.policy.sparse_from
    shapes = prefill_shapes(plan.block_size[0], below if start is None else start, chunk, longest)
    if kind in engine.prepared:
        shapes = shapes[:LARGEST]
    else:
        log.info("compiling prefill kernels: layer %d, steps of %d tokens, prompts of %d", index, chunk, longest)
    engine.prepared |= {plan, kind}
    shape = shape_of(layer, query.device, dtype)
    _told(partial(run_prefill, plan, shape, shapes), f"prefill kernels of layer {index}", log)


def prepare_decode(
    engine: Engine, layers: Sequence[tuple[PagedLayer, Any]], page_size: int, device: torch.device, log: logging.Logger
) -> None:
    """Run the decoding kernels of some layers for every batch size of a step.

    Args:
        layers: of one builder, each with vLLM's `Attention`.
        page_size: tokens of a page.
    """
    config = engine.config
    longest, pages = config.model_config.max_model_len, config.cache_config.num_gpu_blocks or 0
    most = config.scheduler_config.max_num_seqs
    for paged, layer in layers:
        plan = engine.decode_plans.get(paged.index)
        if plan is None or (plan, page_size, pages) in engine.prepared:
            continue
        engine.prepared.add((plan, page_size, pages))
        fp8 = config.cache_config.cache_dtype.startswith("fp8")
        decoding = Decoding(page_size, pages, -(-longest // page_size), most, fp8)
        shape = shape_of(layer, device, config.model_config.dtype)
        log.info("compiling decoding kernels: layer %d, up to %d sequences of %d tokens", paged.index, most, longest)
        _told(partial(run_decode, plan, shape, decoding), f"decoding kernels of layer {paged.index}", log)


def shape_of(layer: Any, device: torch.device, dtype: torch.dtype) -> LayerShape:
    """Return what kernels of one of vLLM's `Attention` layers are compiled for."""
    impl = layer.impl
    return LayerShape(impl.num_heads, impl.num_kv_heads, impl.head_size, dtype, device, softmax_of(impl))


def kind_of(plan: LayerPlan) -> str:
    """Return a plan without its numbers: plans of one kind run the same kernels."""
    return re.sub(r"[\d.]+", "", repr([group.rule for group in plan.groups])) + repr(plan.block_size)


def _told(run: Callable[[], None], what: str, log: logging.Logger) -> None:
    begun = time.perf_counter()
    try:
        with compiled_kernels() as names:
            run()
    except Exception as error:  # requests run dense where kernels fail, and so does nothing worse here
        log.warning("%s could not be compiled ahead: %s", what, error, exc_info=error)
        return
    if names:
        log.info("%s: %d compiled or loaded in %.1f s", what, len(names), time.perf_counter() - begun)


def _capturing(query: Tensor) -> bool:
    return query.is_cuda and torch.cuda.is_current_stream_capturing()
