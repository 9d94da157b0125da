# SPDX-License-Identifier: Apache-2.0
"""vLLM's FlashAttention backend with a policy: sparse sequences on dynaxx's kernels, all others on FlashAttention.

Both read the same pages, so a layer may switch between them at any step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from dynaxx.integrations.runtime.paged_layer import Step
from dynaxx.integrations.runtime.summary_updates import write_chunk
from dynaxx.integrations.vllm import contract as vllm_contract
from dynaxx.integrations.vllm.backend import STEP, DenseCall, PolicyBuilder, PolicyImpl, pages_of, some_rows

vllm_contract.check(vllm_contract.CUDA)

from vllm.v1.attention.backends.flash_attn import (  # noqa: E402  (after the check of what it must be)
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

PARTS = "dynaxx_dense_parts"  # the attribute of vLLM's metadata that holds the dense part


class DensePart(NamedTuple):
    """The dense sequences of a step that also has sparse ones."""

    tokens: Tensor  # (n,) int64 indices of their queries among the step's tokens
    metadata: Any  # vLLM's metadata for these sequences


class CudaBuilder(PolicyBuilder, FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """The metadata builder on CUDA, with separate metadata for the dense part of a mixed step."""

    compiles = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # A builder owns buffers that graphs read, so dense parts need a second builder.
        self._parts = FlashAttentionMetadataBuilder(kv_cache_spec, layer_names, vllm_config, device)

    @staticmethod
    def largest_capture(vllm_config: Any) -> int:
        """Return the largest captured step. Larger steps run eagerly, as do all steps if vLLM captures pieces only."""
        compilation = vllm_config.compilation_config
        mode = compilation.cudagraph_mode
        whole = mode is not None and mode.has_full_cudagraphs()
        return int(compilation.max_cudagraph_capture_size or 0) if whole else 0

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Return the metadata of a step and of its dense part."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        parts: dict[int, DensePart] = {}
        for paged in self.bound:
            step: Step = getattr(metadata, STEP)
            if paged.does_all(step):
                continue
            split = step.split(paged.index)
            if split.runs_sparse and split.dense and id(split) not in parts:
                tokens, common = some_rows(common_attn_metadata, [row.index for row in split.dense])
                parts[id(split)] = DensePart(tokens, self._parts.build(0, common, fast_build))
        setattr(metadata, PARTS, parts)
        return metadata


class CudaImpl(PolicyImpl, FlashAttentionImpl):  # type: ignore[misc]
    """One attention layer."""

    compiles = True

    @override
    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Store keys and values (tokens, kv_heads, head_size) in their pages; those of a chunk on dynaxx's kernel."""
        if self.paged is None or not write_chunk(pages_of(layer, kv_cache), key, value, slot_mapping):
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def dense(self, call: DenseCall, *, all_of_it: bool) -> None:
        """Attend densely on FlashAttention, for the whole step or its dense part."""
        assert self.paged is not None, "layers without a rule must not call this"
        split = call.step.split(self.paged.index)
        if all_of_it or not split.runs_sparse:
            FlashAttentionImpl.forward(self, *call)
            return
        part: DensePart = getattr(call.attn_metadata, PARTS)[id(split)]
        out = torch.empty_like(call.output[part.tokens])  # queries may be in fp8
        some = (x[part.tokens] for x in (call.query, call.key, call.value))
        FlashAttentionImpl.forward(self, call.layer, *some, call.kv_cache, part.metadata, out)
        call.output[part.tokens] = out


class CudaBackend(FlashAttentionBackend):  # type: ignore[misc]
    """The backend registered as CUSTOM."""

    @staticmethod
    @override
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    @override
    def get_impl_cls() -> type[CudaImpl]:
        return CudaImpl

    @staticmethod
    @override
    def get_builder_cls() -> type[CudaBuilder]:
        return CudaBuilder
