# SPDX-License-Identifier: Apache-2.0
"""Attention by a rule or over a layout, prepared once for calls of one shape: checked once, then replayed.

`select_blocks` and `sparse_attention` check their inputs and compute launch arguments at every call. On the host this
takes longer than a short call runs on a GPU. A `Prepared` call repeats one that they made: it takes memory and starts
the same kernels with the same arguments, so its results are equal bit by bit.

    rule     q, k, v, sinks --> [scores, choice, layout, attention: one recording] --> out
    layout   q, k, v, sinks --> [attention: one recording] --> out
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dynaxx.derivatives import transforms_active
from dynaxx.kernels.registry import ATTENTION
from dynaxx.kernels.scale import softmax_scale
from dynaxx.layout import BlockGrid, BlockLayout
from dynaxx.layout.derived import PerLayout
from dynaxx.ops.checks import check_softcap, looks_at_values
from dynaxx.ops.dispatch import backend_for, score_options
from dynaxx.ops.library import is_traced
from dynaxx.selection import Hybrid, Selector
from dynaxx.selection.device import SelectionInputs, select_within, selection_inputs, serves
from dynaxx.selection.scorers.base import GPU_MEMORY_BUDGET

if TYPE_CHECKING:
    from dynaxx.kernels.runtime.recorder import Recording

MAX_RECORDINGS = 16  # recordings that a prepared call keeps


class Prepared:
    """A call for tensors of one shape, dtype and device, from `prepare_rule` or `prepare_layout`.

    Args:
        q, k, v: tensors of the call that it repeats.
        backend: the backend that computed attention.
        call: a function for `record_or_replay`, which returns (out,).
        persistent: the inputs of `call` that stay the same, a rule or a layout.
        settings: the settings of `call`.

    Attributes:
        backend: the backend that computes attention.
    """

    __slots__ = ("_call", "_device", "_dtype", "_persistent", "_recordings", "_settings", "_shapes", "backend")

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, backend: str, call: Any, persistent: Any, settings: tuple[Hashable, ...]
    ) -> None:
        self.backend = backend
        self._call, self._persistent, self._settings = call, persistent, settings
        self._shapes, self._dtype, self._device = (q.shape, k.shape, v.shape), q.dtype, q.device
        self._recordings: dict[Hashable, Recording] = {}  # by `_variant`

    def serves(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> bool:
        """Return whether the call may run for these tensors: their forms are equal, and nothing records or traces."""
        if sinks is not None and not _fits(sinks, q):
            return False
        if (q.shape, k.shape, v.shape) != self._shapes or q.dtype is not self._dtype or q.device != self._device:
            return False
        return k.dtype is v.dtype is q.dtype and k.device == v.device == q.device and _is_plain(q, k, v)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Return out (batch, seqlen_q, q_heads, head_dim_v), for tensors that `serves` accepts."""
        from dynaxx.kernels.runtime.launch_cache import record_or_replay, replay

        tensors, variant = (q, k, v, sinks), _variant(q, k, v, sinks)
        known = self._recordings.get(variant)
        if known is not None:
            results = replay(known, self._persistent.kernel_inputs, tensors)
            if results is not None:
                return results[0]
        replayed: list[Recording] = []
        (out,) = record_or_replay(
            self._call, self._persistent, tensors, *self._settings, at_once=True, replayed=replayed
        )
        if replayed:
            if len(self._recordings) >= MAX_RECORDINGS:
                self._recordings.clear()
            self._recordings[variant] = replayed[0]
        return out

    def replay(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> LayerReplay | None:
        """Return the call for repetition by other layers of the same pass; None if such a call was not replayed yet.

        Args:
            q: (batch, q_heads, seqlen_q, head_dim); their transposes are tensors that `serves` accepts.
            k: (batch, kv_heads, seqlen_k, head_dim).
            v: (batch, kv_heads, seqlen_k, head_dim_v).
            sinks: (q_heads,) or None.
        """
        from dynaxx.kernels.runtime.launcher import is_watched

        known = self._recordings.get(_variant(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), sinks))
        if known is None or is_watched():
            return None
        persistent = self._persistent.kernel_inputs
        addresses = tuple([x.data_ptr() for x in persistent])
        if any(address & 15 for address in addresses):
            return None
        return LayerReplay(known, q.get_device(), persistent, addresses, form_of_call(q, k, v, sinks))


def _variant(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Hashable:
    """Return what may differ between the recordings of one `Prepared`: strides, and the dtype of sinks."""
    return q.stride(), k.stride(), v.stride(), None if sinks is None else sinks.dtype


class LayerReplay(NamedTuple):
    """A call of a `Prepared`, for other layers of the same pass.

    What cannot change within a pass was checked when the call ran before: tracers, transforms, profilers.
    """

    recording: Recording
    device: int  # index of the GPU
    persistent: tuple[Tensor, ...]  # kept alive, so that their addresses stay valid
    addresses: tuple[int, ...]  # of `persistent`
    form: Hashable  # see `form_of_call`

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor | None:
        """Return out (batch, seqlen_q, q_heads, head_dim_v); None if the tensors are of another form, or not plain.

        Args:
            q: (batch, q_heads, seqlen_q, head_dim).
            k: (batch, kv_heads, seqlen_k, head_dim).
            v: (batch, kv_heads, seqlen_k, head_dim_v).
            sinks: (q_heads,) or None.
        """
        if form_of_call(q, k, v, sinks) != self.form or type(q) is not Tensor or q.is_neg() or k.is_neg() or v.is_neg():
            return None
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks)):
            return None
        q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
        addresses, bits = [*self.addresses, q_at, k_at, v_at], q_at | k_at | v_at
        if sinks is not None:
            addresses.append(sinks.data_ptr())
            bits |= addresses[-1]
        results = None if bits & 15 else self.recording.start(addresses, self.device, [])
        return None if results is None else results[0]


def form_of_call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Hashable:
    """Return what must be equal in layers that repeat one another's call."""
    found = (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, q.device)
    return found if sinks is None else (*found, sinks.shape, sinks.stride(), sinks.dtype, sinks.device)


def prepare_rule(
    rule: Selector | Hybrid,
    layout: BlockLayout,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> Prepared | None:
    """Prepare `sparse_attention(q, k, v, select_blocks(q, k, rule))` with the block size of `layout`.

    Args:
        rule: a rule that depends on the data.
        layout: its layout for these tensors; `sparse_attention` has served the call.
        q: (batch, seqlen_q, q_heads, head_dim).
        k: (batch, seqlen_k, kv_heads, head_dim).
        v: (batch, seqlen_k, kv_heads, head_dim_v).
        scale: softmax scale, default head_dim ** -0.5.
        softcap: cap of the scores, or None.

    Returns:
        The prepared call; None if its launches cannot be repeated.
    """
    pattern, selector = (rule.pattern, rule.selector) if isinstance(rule, Hybrid) else (None, rule)
    grid = BlockGrid(q.shape[1], k.shape[1], layout.block_size, causal=True)
    if not _repeats(q, k, v) or not serves(q, grid, selector):
        return None
    persistent, capacity = selection_inputs(pattern, selector, grid, q, k)
    if not persistent.is_recorded(q, GPU_MEMORY_BUDGET):
        return None
    softcap = None if softcap is None else check_softcap(softcap)
    backend, _ = backend_for(q, k, v, layout, softcap, "auto")
    settings = (softmax_scale(scale, q.shape[3]), softcap, capacity, backend)
    return Prepared(q, k, v, backend, _choose_and_attend, persistent, settings)


def prepare_layout(
    layout: BlockLayout, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, softcap: float | None = None
) -> Prepared | None:
    """Prepare `sparse_attention(q, k, v, layout)`, which has served the call; see `prepare_rule`."""
    if not _repeats(q, k, v):
        return None
    from dynaxx.kernels.schedule.split import split_lists

    softcap = None if softcap is None else check_softcap(softcap)
    backend, _ = backend_for(q, k, v, layout, softcap, "auto")
    key, kept = (q.shape, k.shape, v.shape, q.dtype, scale, softcap), _prepared.of(layout)
    if key not in kept:
        order = () if layout.kv_order is None else (layout.kv_order,)
        persistent = LayoutInputs(layout, object(), (*layout.tensors, *order, *split_lists(layout)))
        settings = (softmax_scale(scale, q.shape[3]), softcap, backend)
        kept[key] = Prepared(q, k, v, backend, _attend, persistent, settings)
    found: Prepared = kept[key]
    return found


def prepared_layout(
    layout: BlockLayout, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, softcap: float | None = None
) -> Prepared | None:
    """Return the result of an earlier `prepare_layout` for such tensors, or None."""
    if layout.derived.is_stale():
        return None
    return _prepared.of(layout).get((q.shape, k.shape, v.shape, q.dtype, scale, softcap))


_prepared = PerLayout(by_form=False)  # a prepared call reads the tensors of one layout


class LayoutInputs(NamedTuple):
    """A layout as the persistent inputs of `record_or_replay`."""

    layout: BlockLayout
    form: Hashable
    kernel_inputs: tuple[Tensor, ...]


def _repeats(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether a call can be recorded: it runs on a GPU, without checks that read values."""
    return q.is_cuda and not looks_at_values(q.device) and _is_plain(q, k, v)


def _is_plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether nothing but the contents of the tensors matters: no gradients, tracers, transforms, or views."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return False
    if is_traced(q) or transforms_active() or forward_ad._current_level >= 0:
        return False
    return not (q.is_neg() or k.is_neg() or v.is_neg())


def _fits(sinks: Tensor, q: Tensor) -> bool:
    """Return whether sinks are plain (q_heads,) logits on q's device, without gradients."""
    if sinks.shape != q.shape[2:3] or sinks.device != q.device or not sinks.is_floating_point():
        return False
    return sinks.is_contiguous() and not (torch.is_grad_enabled() and sinks.requires_grad) and not is_traced(sinks)


def _choose_and_attend(
    given: SelectionInputs,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    capacity: int,
    backend: str,
) -> tuple[Tensor]:
    layout = select_within(given, q, k, scale, GPU_MEMORY_BUDGET, capacity)
    return (ATTENTION.kernels(backend).attention_forward(q, k, v, layout, scale, **score_options(softcap, sinks))[0],)


def _attend(
    given: LayoutInputs,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    backend: str,
) -> tuple[Tensor]:
    found = ATTENTION.kernels(backend).attention_forward(q, k, v, given.layout, scale, **score_options(softcap, sinks))
    return (found[0],)
