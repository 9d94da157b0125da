# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU backend with a policy. Layers with a rule use plain pages and dynaxx's kernels, also for dense calls.

vLLM's CPU kernel stores keys in an order that depends on the instruction set, so a layer runs either entirely on vLLM
or entirely on dynaxx.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import override

from dynaxx.integrations.runtime.paged import dense_attention, write
from dynaxx.integrations.vllm import contract as vllm_contract
from dynaxx.integrations.vllm.backend import DenseCall, PolicyBuilder, PolicyImpl, pages_of

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
        """Store the step's keys and values. vLLM calls it before `forward`."""
        if self.paged is None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        else:
            write(pages_of(layer, kv_cache), key, value, slot_mapping)

    def dense(self, call: DenseCall, *, all_of_it: bool) -> None:
        """Attend densely on dynaxx's kernels."""
        assert self.paged is not None, "layers without a rule must not call this"
        step, pages = call.step, pages_of(call.layer, call.kv_cache)
        rows = step.sequences.rows if all_of_it else step.split(self.paged.index).dense
        dense_attention(call.query, pages, step.sequences, rows, self.paged.softmax, call.output)


class CpuBuilder(PolicyBuilder, CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """The metadata builder on a CPU."""


class CpuBackend(CPUAttentionBackend):  # type: ignore[misc]
    """The backend registered over `CPU_ATTN`. It keeps that name, since vLLM ignores all others on a CPU."""

    @staticmethod
    @override
    def get_impl_cls() -> type[CpuImpl]:
        return CpuImpl

    @staticmethod
    @override
    def get_builder_cls() -> type[CpuBuilder]:
        return CpuBuilder
