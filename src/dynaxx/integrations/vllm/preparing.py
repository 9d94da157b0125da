# SPDX-License-Identifier: Apache-2.0
"""Compile a policy's kernels while the engine starts, so that no request waits for them.

vLLM measures the memory of a step in a pass without attention metadata. Prefill kernels run in that pass, so that vLLM
also measures their memory. Decoding kernels run when a metadata builder is created, which knows the cache. Captured
steps compile their kernels before the capture.

This module uses vLLM's objects by field names and does not import vLLM.
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
    run_chunks,
    run_decode,
    run_prefill,
    run_write,
    zero_pages,
)
from dynaxx.integrations.vllm.engine import Engine, softmax_of
from dynaxx.policy import LayerPlan

LARGEST = 4  # number of shapes to run for a rule whose kernels are compiled already, to measure its memory


def prepare_prefill(
    engine: Engine, index: int, layer: Any, query: Tensor, dtype: torch.dtype, log: logging.Logger
) -> None:
    """Run the prefill kernels of a layer's rule, unless a previous layer has the same rule.

    Args:
        engine: the engine.
        index: index of the layer in the model.
        layer: vLLM's `Attention`.
        query: (tokens, heads, head_size) of the largest step.
        dtype: dtype of the output; queries may be fp8.
        log: the logger for names and times of compiled kernels.
    """
    plan, config = engine.plans.get(index), engine.config
    if plan is None or layer.sliding_window is not None or plan in engine.prepared or _capturing(query):
        return
    kind, chunk, longest = kind_of(plan), query.shape[0], config.model_config.max_model_len
    below, start = engine.policy.dense_below, engine.policy.sparse_from
    shapes = prefill_shapes(
        1 if plan.is_static else plan.block_size[0], below if start is None else start, chunk, longest
    )
    if kind in engine.prepared:
        shapes = shapes[:LARGEST]
    else:
        log.info("compiling prefill kernels: layer %d, steps of %d tokens, prompts of %d", index, chunk, longest)
    engine.prepared |= {plan, kind}
    shape = shape_of(layer, query.device, dtype)
    page_size, fp8 = int(config.cache_config.block_size or 1), config.cache_config.cache_dtype.startswith("fp8")
    in_place = not fp8 and page_size % plan.block_size[1] == 0

    def run() -> None:
        run_prefill(plan, shape, shapes, in_place=in_place)
        if not fp8:
            run_write(shape, page_size)
        run_chunks(index, engine.unguarded(), shape, zero_pages(shape, page_size, 16, fp8=fp8), shapes)

    _told(run, f"prefill kernels of layer {index}", log)


def prepare_decode(
    engine: Engine, layers: Sequence[tuple[PagedLayer, Any]], page_size: int, device: torch.device, log: logging.Logger
) -> None:
    """Run the decoding kernels of some layers for every batch size of a step.

    Args:
        engine: the engine.
        layers: the layers of one builder, each with vLLM's `Attention`.
        page_size: tokens per page.
        device: the device of the cache.
        log: the logger for names and times of compiled kernels.
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
    """Return the properties of one of vLLM's `Attention` layers for which kernels are compiled."""
    impl = layer.impl
    return LayerShape(impl.num_heads, impl.num_kv_heads, impl.head_size, dtype, device, softmax_of(impl))


def kind_of(plan: LayerPlan) -> str:
    """Return a plan without its numbers. Plans of one kind run the same kernels."""
    return re.sub(r"[\d.]+", "", repr([group.rule for group in plan.groups])) + repr(plan.block_size)


def _told(run: Callable[[], None], what: str, log: logging.Logger) -> None:
    begun = time.perf_counter()
    try:
        with compiled_kernels() as names:
            run()
    except Exception as error:  # do not fail the start; requests whose kernels fail run dense
        log.warning("%s could not be compiled ahead: %s", what, error, exc_info=error)
        return
    if names:
        log.info("%s: %d compiled or loaded in %.1f s", what, len(names), time.perf_counter() - begun)


def _capturing(query: Tensor) -> bool:
    return query.is_cuda and torch.cuda.is_current_stream_capturing()
