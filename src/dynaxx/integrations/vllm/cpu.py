# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU backend with a policy. Layers with a rule keep plain pages and run on dynaxx's kernels, dense calls, too.

vLLM's own CPU kernel stores keys in an order that depends on the instruction set, so a layer is either all its or all
ours.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dynaxx.integrations.runtime.paged import dense_attention, write
from dynaxx.integrations.runtime.paged_layer import Step
from dynaxx.integrations.vllm import contract as vllm_contract
from dynaxx.integrations.vllm.backend import STEP, PolicyBuilder, PolicyImpl, pages_of

vllm_contract.check(vllm_contract.CPU)

from vllm.v1.attention.backends.cpu_attn import (  # noqa: E402  (after the check of what it must be)
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)


class CpuImpl(PolicyImpl, CPUAttentionBackendImpl):  # type: ignore[misc]
    """One attention layer."""

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Store this step's keys and values, before `forward`."""
        if self.paged is None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        else:
            write(pages_of(layer, kv_cache), key, value, slot_mapping)

    def dense(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *,
        all_of_it: bool,
    ) -> None:
        """Dense, by dynaxx's kernels."""
        assert self.paged is not None, "layers without a rule never come here"
        step: Step = getattr(attn_metadata, STEP)
        rows = step.sequences.rows if all_of_it else step.split(self.paged.index).dense
        dense_attention(query, pages_of(layer, kv_cache), step.sequences, rows, self.paged.softmax, output)


class CpuBuilder(PolicyBuilder, CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Metadata of a step."""


class CpuBackend(CPUAttentionBackend):  # type: ignore[misc]
    """What is registered over `CPU_ATTN`, whose name it must keep: on a CPU vLLM ignores every other."""

    @staticmethod
    def get_impl_cls() -> type[CpuImpl]:
        return CpuImpl

    @staticmethod
    def get_builder_cls() -> type[CpuBuilder]:
        return CpuBuilder
