# SPDX-License-Identifier: Apache-2.0
"""A decode step over a contiguous cache, prepared once for all steps and layers of one form; see `layer`.

    k --> [summaries of the last pages, scores, choice, attention: one recording] --> out

A growing cache has other strides at every step. They are arguments of the recorded kernels, so that one recording
serves the steps until the cache has another page.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from dynaxx.derivatives import transforms_active
from dynaxx.kernels.registry import DECODE
from dynaxx.kernels.scale import softmax_scale
from dynaxx.layout.form import Form, form_of
from dynaxx.layout.paging import PagedCache, PageSummaries
from dynaxx.layout.paging.pages import PageStrides
from dynaxx.ops.checks import check_softcap, looks_at_values
from dynaxx.ops.decode_checks import decode_problem
from dynaxx.ops.library import is_traced
from dynaxx.ops.prepared.layer import form_of_call
from dynaxx.selection.pages import PageBudget

if TYPE_CHECKING:
    from dynaxx.kernels.runtime.launch_list import Sizes
    from dynaxx.kernels.runtime.recorder import Recording


class PreparedStep:
    """A decode step for queries and caches of one form, from `prepare_step`."""

    __slots__ = ("_budget", "_form", "_last", "_page_size", "_scale", "_slots", "_softcap", "_wanted")

    def __init__(self, budget: PageBudget, q: Tensor, cache: PagedCache, scale: float, softcap: float | None) -> None:
        assert cache.summaries is not None, "a step that selects pages needs summaries"
        self._budget, self._page_size = budget, cache.page_size
        self._scale, self._softcap = scale, softcap
        self._wanted = budget.wanted(cache.kv_heads, cache.device)
        self._slots = budget.slots(cache, q.shape[1])
        sizes = (cache.batch, cache.max_pages, cache.kv_heads, cache.head_dim, cache.head_dim_v)
        kinds = (cache.k.dtype, cache.summaries.low.dtype, cache.device)
        self._form = form_of(
            (), "decode step", *sizes, *kinds, cache.summaries.low.shape, cache.page_size, budget.bound
        )
        self._last: LastStep | None = None

    def serves(self, q: Tensor) -> bool:
        """Return whether the step may run now; shapes, dtypes and device are the caller's key."""
        return not (is_traced(q) or transforms_active() or looks_at_values(q.device))

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seqused_k: Tensor,
        summaries: PageSummaries,
        sinks: Tensor | None,
        new_tokens: int,
    ) -> Tensor:
        """Update the summaries and attend to selected pages, (batch, seqlen_q, q_heads, head_dim_v).

        Args:
            q: (batch, seqlen_q, q_heads, head_dim).
            k: (batch, seqlen_k, kv_heads, head_dim), with as many pages as the step was prepared for.
            v: (batch, seqlen_k, kv_heads, head_dim_v).
            seqused_k: (batch,) int32.
            summaries: the summaries of the cache.
            sinks: (q_heads,) or None.
            new_tokens: number of keys that the summaries lack.
        """
        from dynaxx.kernels.runtime.launch_cache import record_or_replay, replay

        keys, page, last = k.shape[1], self._page_size, self._last
        inputs, tensors = StepInputs(k, v, seqused_k, summaries, page, self._form), (q, self._wanted, sinks)
        variant = (q.stride(), k.stride(), v.stride(), keys, new_tokens, None if sinks is None else sinks.dtype)
        if last is not None and last.variant == variant:
            results = replay(last.recording, inputs.kernel_inputs, tensors, last.sizes)
            if results is not None:
                return results[0]
        strides: Sizes = {"k_strides": _strides(k, page), "v_strides": _strides(v, page)}
        replayed: list[Recording] = []
        (out,) = record_or_replay(
            _update_and_attend,
            inputs,
            tensors,
            self._softcap,
            min(new_tokens, keys),
            min(self._budget.sinks, keys),
            min(self._budget.window, keys),
            self._slots,
            self._scale,
            at_once=True,
            sizes=strides,
            replayed=replayed,
        )
        self._last = LastStep(variant, replayed[0], strides) if replayed else None
        return out

    def replay(self, q: Tensor, k: Tensor, v: Tensor, seqused_k: Tensor, sinks: Tensor | None) -> StepReplay | None:
        """Return the last call for repetition by other layers of the same step; None if it was not replayed.

        Args:
            q: (batch, q_heads, seqlen_q, head_dim), the queries of the last call.
            k: (batch, kv_heads, seqlen_k, head_dim).
            v: (batch, kv_heads, seqlen_k, head_dim_v).
            seqused_k: (batch,) int32.
            sinks: (q_heads,) or None.
        """
        from dynaxx.kernels.runtime.launch_list import flat_sizes
        from dynaxx.kernels.runtime.launcher import is_watched

        last = self._last
        if last is None or not q.device == k.device == v.device or is_watched():
            return None
        form, sizes = form_of_call(q, k, v, sinks), flat_sizes(last.sizes)
        persistent = (self._wanted, seqused_k)
        addresses = (self._wanted.data_ptr(), seqused_k.data_ptr())
        return StepReplay(last.recording, sizes, q.get_device(), persistent, addresses, form)


def prepare_step(
    budget: PageBudget, q: Tensor, cache: PagedCache, *, scale: float | None = None, softcap: float | None = None
) -> PreparedStep | None:
    """Prepare `sparse_decode(q, summarize_pages(cache), budget)`, which has served the call.

    Args:
        budget: a budget that selects pages.
        q: (batch, seqlen_q, q_heads, head_dim).
        cache: a contiguous cache with summaries, not quantized.
        scale: softmax scale, default head_dim ** -0.5.
        softcap: cap of the scores, or None.

    Returns:
        The prepared step; None if its launches cannot be repeated.
    """
    plain = cache.page_table is None and cache.k_scale is None and cache.leftpad_k is None and cache.exact is None
    if not plain or not q.is_cuda or looks_at_values(q.device) or is_traced(q):
        return None
    if DECODE.resolve(decode_problem(cache, q), "auto") != "triton":
        return None
    softcap = None if softcap is None else check_softcap(softcap)
    return PreparedStep(budget, q, cache, softmax_scale(scale, q.shape[-1]), softcap)


def _strides(x: Tensor, page_size: int) -> PageStrides:
    batch, token, head, _ = x.stride()
    return PageStrides(batch, token * page_size, token, head)


class LastStep(NamedTuple):
    """The recording that the last call replayed, for the other layers of the same step."""

    variant: Hashable  # what may differ between steps that the prepared step serves
    recording: Recording
    sizes: Sizes


class StepReplay(NamedTuple):
    """The last call of a prepared step, for other layers of the same step; see `LayerReplay`."""

    recording: Recording
    sizes: list[int]
    device: int  # index of the GPU
    persistent: tuple[Tensor, Tensor]  # pages wanted by each kv head, and lengths; kept alive
    addresses: tuple[int, int]  # of `persistent`
    form: Hashable  # see `form_of_call`

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, summaries: PageSummaries, sinks: Tensor | None
    ) -> Tensor | None:
        """Return out (batch, seqlen_q, q_heads, head_dim_v); None if tensors differ.

        Args:
            q: (batch, q_heads, seqlen_q, head_dim).
            k: (batch, kv_heads, seqlen_k, head_dim).
            v: (batch, kv_heads, seqlen_k, head_dim_v).
            summaries: the summaries of the cache, of the same shape as in the last call.
            sinks: (q_heads,) or None.
        """
        if form_of_call(q, k, v, sinks) != self.form or type(q) is not Tensor:
            return None
        low, high, scale = summaries.low, summaries.high, summaries.scale
        wanted, seqused_k = self.addresses
        addresses = [k.data_ptr(), v.data_ptr(), seqused_k, low.data_ptr()]  # as in `StepInputs`
        if high is not low:
            addresses.append(high.data_ptr())
        if scale is not None:
            addresses.append(scale.data_ptr())
        addresses += (q.data_ptr(), wanted)
        if sinks is not None:
            addresses.append(sinks.data_ptr())
        bits = 0
        for address in addresses:
            bits |= address
        results = None if bits & 15 else self.recording.start(addresses, self.device, self.sizes)
        return None if results is None else results[0]


class StepInputs(NamedTuple):
    """A cache and its summaries as the persistent inputs of `record_or_replay`."""

    k: Tensor
    v: Tensor
    seqused_k: Tensor
    summaries: PageSummaries
    page_size: int
    form: Form | Hashable

    @property
    def kernel_inputs(self) -> tuple[Tensor, ...]:
        """Return every tensor once."""
        k, v, seqused_k, summaries, _, _ = self
        high = () if summaries.high is summaries.low else (summaries.high,)
        scale = () if summaries.scale is None else (summaries.scale,)
        return (k, v, seqused_k, summaries.low, *high, *scale)


def _update_and_attend(
    given: StepInputs,
    q: Tensor,
    wanted: Tensor,
    sink_logits: Tensor | None,
    softcap: float | None,
    new_tokens: int,
    sinks: int,
    window: int,
    slots: int,
    scale: float,
) -> tuple[Tensor]:
    kernels = DECODE.kernels("triton")
    cache = PagedCache.contiguous(given.k, given.v, page_size=given.page_size, seqused_k=given.seqused_k)
    cache = replace(cache, summaries=given.summaries)
    kernels.summarize_pages(cache, given.summaries, new_tokens)
    assert kernels.select_and_attend is not None, "kernels on GPUs have one"
    return (kernels.select_and_attend(q, cache, wanted, sinks, window, slots, scale, softcap, sink_logits)[0],)
