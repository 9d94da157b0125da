# SPDX-License-Identifier: Apache-2.0
"""Time what the vLLM plugin does on the host in a step that runs dense, without a GPU and without vLLM's own calls.

    VENV_OF_VLLM/bin/python benchmarks/serving/vllm_host.py

Calls the plugin's metadata builder and the layers of Llama-3.1-8B's shape under a policy with prefill and decode rules,
for one prompt below the border. vLLM's parent classes are replaced by functions that do nothing, and the launch that
updates page summaries is left out, since it needs a GPU. Prints medians in us of processor time, as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

import dynaxx as dx
from dynaxx.integrations.runtime.counts import Counts
from dynaxx.integrations.runtime.deployed import Deployed
from dynaxx.integrations.runtime.paged import Softmax
from dynaxx.integrations.runtime.paged_graph import LayerLimits
from dynaxx.integrations.runtime.paged_layer import PagedLayer, Step
from dynaxx.integrations.runtime.summary_updates import JointUpdates
from dynaxx.integrations.vllm import cuda as vllm_cuda
from dynaxx.policy import ModelFacts
from dynaxx.telemetry import recorder

LAYERS, PAGES, PAGE = 32, 20, 128


class NoUpdates(JointUpdates):
    """Updates that are left out."""

    def run(self, *given: Any) -> None:
        """Do nothing."""


def step_of(tokens: int) -> CommonAttentionMetadata:
    """Return vLLM's description of a step with one prompt."""
    starts, used = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=used, num_reqs=1, num_actual_tokens=tokens,
        max_query_len=tokens, max_seq_len=tokens, block_table_tensor=torch.zeros(1, PAGES, dtype=torch.int32),
        slot_mapping=torch.arange(tokens), seq_lens_cpu_upper_bound=used,
    )  # fmt: skip


def measure(tokens: int, repeats: int) -> dict[str, float]:
    """Return us of processor time of a builder's call, and of a layer's."""
    numbers = recorder().bind(model_name="model", engine="0")
    facts = ModelFacts(model_type="llama", layers=LAYERS, q_heads=32, kv_heads=8, head_dim=128)
    rule = dx.Sink(128) | dx.TopK(0.1)
    rules = (dx.Rule.of(rule), dx.Rule.of(rule, phase="decode", block_size=PAGE))
    deployed = Deployed(dx.Policy(model=facts, block_size=128, rules=rules, dense_below=2048), numbers, None)  # type: ignore[arg-type]
    counts = Counts(numbers)
    builder = object.__new__(vllm_cuda.CudaBuilder)
    builder.bound = [PagedLayer(index, Softmax(0.1), counts) for index in range(LAYERS)]
    builder.limits, builder.most_captured = LayerLimits(list(range(LAYERS)), "cpu"), 0
    builder.updates = NoUpdates(LAYERS - 1)
    builder.engine = SimpleNamespace(step=lambda sequences: Step(sequences, deployed))
    vllm_cuda.FlashAttentionMetadataBuilder.build = lambda *given: SimpleNamespace()
    vllm_cuda.FlashAttentionImpl.forward = lambda *given: None
    impls = []
    for paged in builder.bound:
        impl = object.__new__(vllm_cuda.CudaImpl)
        impl.paged, impl.engine = paged, None
        impls.append(impl)
    caches = [torch.zeros(PAGES, 8, PAGE, 2 * 128, dtype=torch.bfloat16) for _ in range(LAYERS)]
    q, k = (torch.zeros(tokens, heads, 128, dtype=torch.bfloat16) for heads in (32, 8))
    out, layer, common = torch.empty_like(q), SimpleNamespace(_k_scale=None, _v_scale=None), step_of(tokens)
    build, each = [], []
    for _ in range(repeats):
        begun = time.thread_time()
        metadata = builder.build(0, common)
        built = time.thread_time()
        for impl, cache in zip(impls, caches, strict=True):
            impl.forward(layer, q, k, k, cache, metadata, out)
        each.append((time.thread_time() - built) / LAYERS)
        build.append(built - begun)
    return {name: round(1e6 * statistics.median(times[1:]), 1) for name, times in (("build", build), ("layer", each))}


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=200)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.tokens, arguments.repeats)))


if __name__ == "__main__":
    main()
