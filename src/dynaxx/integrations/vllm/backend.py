# SPDX-License-Identifier: Apache-2.0
"""Mixins for vLLM's dense backends on any device. They precede the vLLM class, which does everything else.

The metadata builder adds the step's lengths to vLLM's metadata. The implementation sends sparse sequences to
`PagedLayer`, and everything else to vLLM.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config, get_layers_from_vllm_config
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from dynaxx.errors import UnsupportedInputError
from dynaxx.integrations.runtime.paged import Pages, Sequences, on_device
from dynaxx.integrations.runtime.paged_decode import LayerLimits
from dynaxx.integrations.runtime.paged_layer import PagedLayer, Step
from dynaxx.integrations.runtime.summary_updates import JointUpdates
from dynaxx.integrations.vllm import contract as vllm_contract
from dynaxx.integrations.vllm.engine import Engine, engine_of
from dynaxx.integrations.vllm.preparing import prepare_decode, prepare_prefill

vllm_contract.check(vllm_contract.SHARED)

logger = init_logger("vllm.dynaxx")  # under "vllm", so that vLLM's logging shows it
STEP = "dynaxx_step"  # the attribute of vLLM's metadata that holds the step


class PolicyBuilder:
    """A mixin that precedes vLLM's `AttentionMetadataBuilder` of a device.

    Attributes:
        compiles: whether kernels are compiled, so that the engine must run them before the first request.
    """

    compiles = False

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        self.engine = engine_here(vllm_config)
        self.bound = (
            [] if self.engine is None else bind_layers(self.engine, vllm_config, layer_names, kv_cache_spec.block_size)
        )
        decoding = [] if self.engine is None else self.engine.decoding(self.bound)
        self.limits = LayerLimits(decoding, device)
        self.updates = JointUpdates(max(paged.index for paged in self.bound)) if self.bound else None
        self.most_captured = self.largest_capture(vllm_config) if decoding else 0
        if self.engine is not None:
            self.engine.captured |= self.most_captured > 0
        if self.compiles and self.engine is not None:
            attention = [(paged, layers_of(vllm_config, layer_names)[paged.index]) for paged in self.bound]
            prepare_decode(self.engine, attention, kv_cache_spec.block_size, device, logger)

    @staticmethod
    def largest_capture(vllm_config: Any) -> int:
        """Return the number of sequences in the largest decoding step that a CUDA graph captures whole, 0 for none."""
        return 0

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Allow the capture of steps with one token per sequence. Other steps depend on lengths that the host knows."""
        own = super().get_cudagraph_support(vllm_config, kv_cache_spec)  # type: ignore[misc]
        return min(own, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, key=lambda level: level.value)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        """Return vLLM's metadata with the step attached, if any layer follows a rule."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]
        step = self.engine.step(sequences_of(common_attn_metadata)) if self.engine is not None and self.bound else None
        setattr(metadata, STEP, step)
        if step is not None:
            self._prepare(step)
        return metadata

    def _prepare(self, step: Step) -> None:
        """Prepare a decoding step for capture, and count it here, since a replayed graph calls no layer."""
        step.updates = self.updates
        captured = len(step.sequences.seqused_k) <= self.most_captured
        if captured and step.capturable(self.limits):
            for paged in self.bound:
                if paged.index in self.limits.rows:
                    paged.count_step(step, "triton")

    def update_block_table(self, metadata: Any, blk_table: Tensor, slot_mapping: Tensor) -> Any:
        """Return metadata for layers with another page table."""
        other = super().update_block_table(metadata, blk_table, slot_mapping)  # type: ignore[misc]
        step = getattr(metadata, STEP)
        if step is not None:
            step = step.with_page_table(blk_table)
            self._prepare(step)
        setattr(other, STEP, step)
        return other


class DenseCall(NamedTuple):
    """The arguments of `PolicyImpl.forward`."""

    layer: Any
    query: Tensor
    key: Tensor
    value: Tensor
    kv_cache: Tensor
    attn_metadata: Any
    output: Tensor

    @property
    def step(self) -> Step:
        """The step under the policy."""
        step: Step = getattr(self.attn_metadata, STEP)
        return step


class PolicyImpl:
    """A mixin that precedes vLLM's `AttentionImpl` of a device. In layers without a rule `paged` is None.

    Attributes:
        compiles: whether kernels are compiled, so that the engine must run them before the first request.
    """

    paged: PagedLayer | None = None
    compiles = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.engine = engine_here(get_current_vllm_config())  # an invalid policy must fail before weights load

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend: query and output (tokens, heads, head_size), kv_cache (blocks, kv_heads, size, 2 * head_size)."""
        if attn_metadata is None and self.compiles and self.engine is not None:
            prepare_prefill(self.engine, extract_layer_index(layer.layer_name), layer, query, output.dtype, logger)
        if self.paged is None or attn_metadata is None:
            return super().forward(  # type: ignore[misc]
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("layers with a sparse rule do not support fused output quantization")
        step: Step = getattr(attn_metadata, STEP)
        worked = self.paged.sparse(widened(layer, query, output.dtype), pages_of(layer, kv_cache), step, output)
        if not worked or (not self.paged.does_all(step) and step.split(self.paged.index).dense):
            self.dense(DenseCall(layer, query, key, value, kv_cache, attn_metadata, output), all_of_it=not worked)
        return output

    def dense(self, call: DenseCall, *, all_of_it: bool) -> None:
        """Attend densely for the dense sequences of the step, or for the whole step."""
        raise NotImplementedError


def pages_of(layer: Any, kv_cache: Tensor) -> Pages:
    """Return a layer's cache with its scales."""
    return Pages.of(kv_cache, layer._k_scale, layer._v_scale)


def widened(layer: Any, query: Tensor, dtype: torch.dtype) -> Tensor:
    """Return queries (tokens, heads, head_size) in `dtype`. For fp8 caches, undo vLLM's division by their scale."""
    if query.dtype.itemsize > 1:
        return query
    scale = layer._q_scale.reshape(-1)  # one scale, or one per kv head
    by_head = scale.repeat_interleave(query.shape[1] // len(scale))
    return query.to(dtype).mul_(by_head[:, None])


def engine_here(vllm_config: Any) -> Engine | None:
    """Return the engine for this process's share of the heads."""
    ranks = vllm_config.parallel_config.tensor_parallel_size
    return engine_of(vllm_config, get_tensor_model_parallel_rank() if ranks > 1 else 0)


def bind_layers(engine: Engine, vllm_config: Any, layer_names: list[str], page_size: int) -> list[PagedLayer]:
    """Connect the implementations of some layers to the policy. Layers without a rule stay unchanged."""
    bound = []
    for index, layer in layers_of(vllm_config, layer_names).items():
        layer.impl.paged = engine.bind(index, layer, page_size)
        if layer.impl.paged is not None:
            bound.append(layer.impl.paged)
    if bound:
        kind, layers = type(layer.impl).__name__, engine.policy.model.layers
        logger.info("%s is active: %d of %d layers (%s)", engine.path, len(engine.layers), layers, kind)
    return bound


def layers_of(vllm_config: Any, layer_names: list[str]) -> dict[int, Any]:
    """Return vLLM's attention layers with these names, by their index in the model."""
    found = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
    return {extract_layer_index(name): layer for name, layer in found.items()}


def some_rows(common: CommonAttentionMetadata, rows: list[int]) -> tuple[Tensor, CommonAttentionMetadata]:
    """Return some sequences of a step as a separate step.

    Returns:
        (tokens, common): (n,) int64 indices of their queries on the device, and metadata for a builder.
    """
    starts = common.query_start_loc_cpu.tolist()
    device = common.block_table_tensor.device
    tokens = on_device(torch.cat([torch.arange(starts[row], starts[row + 1], device="cpu") for row in rows]), device)
    lengths = [starts[row + 1] - starts[row] for row in rows]
    ends = torch.tensor([0, *lengths], dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
    at = on_device(rows, device)
    bound = common.seq_lens_cpu_upper_bound
    requests = getattr(common, "req_idx", None)  # not in every version
    return tokens, common.replace(
        query_start_loc=on_device(ends, device),
        query_start_loc_cpu=ends,
        seq_lens=common.seq_lens[at],
        seq_lens_cpu_upper_bound=None if bound is None else bound[rows],
        block_table_tensor=common.block_table_tensor[at],
        slot_mapping=common.slot_mapping[tokens],
        num_reqs=len(rows),
        num_actual_tokens=len(tokens),
        max_query_len=max(lengths),
        positions=None if common.positions is None else common.positions[tokens],
        is_prefilling=None if common.is_prefilling is None else common.is_prefilling[rows],
        **({} if requests is None else {"req_idx": requests[rows]}),
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )


def sequences_of(common: CommonAttentionMetadata) -> Sequences:
    """Return the lengths of a step, without synchronising with a GPU.

    Raises:
        UnsupportedInputError: the attention is not causal.
    """
    if common.causal is not True:
        raise UnsupportedInputError("attention that is not causal", {"vllm": ["layers with a sparse rule are causal"]})
    lengths = common.seq_lens_cpu_upper_bound  # exact for sequences with more than one query
    if lengths is None:
        lengths = common.seq_lens
    count, prompts = common.num_reqs, common.is_prefilling
    starts = common.query_start_loc_cpu.tolist()[: count + 1]
    of_prompt = None if prompts is None or prompts.is_cuda else prompts.tolist()
    return Sequences(common.block_table_tensor, common.seq_lens, starts, lengths.tolist()[:count], of_prompt)
