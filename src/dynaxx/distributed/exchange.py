# SPDX-License-Identifier: Apache-2.0
"""Point-to-point exchange of keys, values and their gradients, according to an `ExchangePlan`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dynaxx.distributed.group import peer_errors
from dynaxx.distributed.plan import Sent, Stage


@dataclass
class Traffic:
    """Bytes and messages that this process has sent and received since it started."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages: int = 0


_TOTAL = Traffic()


def traffic() -> Traffic:
    """Return a copy of the current counts. Subtract two copies to measure an interval."""
    return replace(_TOTAL)


Messages: TypeAlias = list[tuple[int, Tensor]]  # (peer rank, contiguous tensor), in the same order on both sides


def count_traffic(sends: Messages, receives: Messages) -> None:
    """Add messages to the counts of this process."""
    _TOTAL.bytes_sent += sum(x.nbytes for _, x in sends)
    _TOTAL.bytes_received += sum(x.nbytes for _, x in receives)
    _TOTAL.messages += len(receives) + len(sends)


class Transfer:
    """Messages in transit. Call `wait` before reading received buffers or writing sent ones."""

    def __init__(self, sends: Messages, receives: Messages, group: ProcessGroup, doing: str) -> None:
        self._group, self._doing, self._held = group, doing, (sends, receives)
        receives = [(rank, x) for rank, x in receives if x.numel()]
        sends = [(rank, x) for rank, x in sends if x.numel()]
        count_traffic(sends, receives)
        with peer_errors(doing, group):
            self._works: list[Any] = _started(sends, receives, group) if sends or receives else []

    def wait(self) -> None:
        """Wait for the messages. On a GPU, the current stream waits, and the host does not."""
        with peer_errors(self._doing, self._group):
            for work in self._works:
                work.wait()
        self._works, self._held = [], ([], [])


def _started(sends: Messages, receives: Messages, group: ProcessGroup) -> list[Any]:
    """Start messages as `torch.distributed.batch_isend_irecv` does, without checking each on the host again."""
    device = (receives or sends)[0][1].device
    together = type(group) is ProcessGroup and group._get_backend(device).supports_coalescing
    if together:
        group._start_coalescing(device)
    works = [group.recv([x], rank, 0) for rank, x in receives] + [group.send([x], rank, 0) for rank, x in sends]
    return [group._end_coalescing(device)] if together else works


class Buffers:
    """Memory of the stages of a call: two buffers that take turns, each as long as the longest stage that used it."""

    by_copy_engines = False  # whether exchanges need few multiprocessors

    def __init__(self) -> None:
        self._flat: dict[int, Tensor] = {}

    def take(self, turn: int, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Return buffer number turn % 2 as an uninitialised tensor. Its last user must be done with it."""
        size, known = prod(shape), self._flat.get(turn % 2)
        if known is None or known.numel() < size:
            self._flat.pop(turn % 2, None)  # before another is allocated
            known = self._flat[turn % 2] = like.new_empty(size)
        return known[:size].view(*shape)

    def open(self, turn: int, sources: Iterable[int]) -> None:
        """Let other ranks write to the buffer of a turn, if they do that themselves."""

    def exchange(
        self, turn: int, sends: Messages, places: Sequence[int], receives: Messages, group: ProcessGroup, doing: str
    ) -> Transfer:
        """Start messages between the buffers of a turn.

        Args:
            turn: the turn.
            sends: tensors for other ranks.
            places: for each of them, its first byte in the receiver's buffer.
            receives: parts of this rank's buffer.
            group: the ranks.
            doing: what this is, for error messages.
        """
        return Transfer(sends, receives, group, doing)

    def free(self) -> None:
        """Drop the memory. All users must be done with it, in the order of the current stream."""
        self._flat.clear()


class Gathering:
    """Keys and values of one stage in transit to this rank's buffer.

    Args:
        k: own keys of all kv heads.
        v: own values of all kv heads.
        stage: the stage.
        group: the ranks.
        buffers: memory for what arrives; None allocates it.
        turn: which of the buffers to use.
    """

    def __init__(
        self, k: Tensor, v: Tensor, stage: Stage, group: ProcessGroup, buffers: Buffers | None = None, turn: int = 0
    ) -> None:
        heads = slice(*stage.kv_heads)
        k, v = k[:, :, heads], v[:, :, heads]
        self._dims = (k.shape[-1], v.shape[-1])
        shape = (stage.tokens, k.shape[0], k.shape[2], sum(self._dims))
        buffers = Buffers() if buffers is None else buffers
        self._buffer = buffers.take(turn, k, shape)
        buffers.open(turn, stage.received)
        own = _pack(k, v, stage.own_tokens, self._buffer[slice(*stage.own)])
        sends = []
        for rank, sent in stage.sends.items():
            if stage.inner is not None:
                sends.append((rank, _pack(k, v, sent)))
            else:
                run = own[sent.first : sent.first + sent.tokens]
                sends.append((rank, run if sent.index is None else own.index_select(0, sent.index)))
        receives = [(rank, self._buffer[slice(*span)]) for rank, span in stage.received.items()]
        token = prod(shape[1:]) * k.itemsize
        places = [stage.places[rank] * token for rank in stage.sends]
        self._transfer = buffers.exchange(turn, sends, places, receives, group, "exchanging keys and values")

    def wait(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values in the buffer as views, each (batch, tokens, heads, dim)."""
        self._transfer.wait()
        k, v = self._buffer.transpose(0, 1).split(self._dims, dim=-1)
        return k, v


def _pack(k: Tensor, v: Tensor, sent: Sent, out: Tensor | None = None) -> Tensor:
    """Copy tokens into `out`, (tokens, batch, heads, head_dim + head_dim_v), keys before values; None: allocate it."""
    dims = (k.shape[-1], v.shape[-1])
    if out is None:
        out = k.new_empty(sent.tokens, k.shape[0], k.shape[2], sum(dims))
    for part, x in zip(out.split(dims, dim=-1), (k, v), strict=True):
        copy_rows(part, _taken(x, sent).transpose(0, 1))
    return out


def copy_rows(out: Tensor, x: Tensor) -> None:
    """Copy x to `out`, both (..., dim) of one dtype, in elements of 16 bytes where all rows are aligned to them.

    A GPU copies the heads of a slice in about half the time this way.
    """
    wide = torch.complex128.itemsize // x.itemsize
    places = (x.shape[-1], out.storage_offset(), x.storage_offset(), *out.stride()[:-1], *x.stride()[:-1])
    aligned = (
        all(place % wide == 0 for place in places) and (x.data_ptr() | out.data_ptr()) % torch.complex128.itemsize == 0
    )
    if aligned and x.stride(-1) == out.stride(-1) == 1:
        out, x = out.view(torch.complex128), x.view(torch.complex128)
    out.copy_(x)


def _taken(x: Tensor, sent: Sent) -> Tensor:
    """Return the tokens of (batch, tokens, ...) that `sent` names."""
    return x[:, sent.first : sent.first + sent.tokens] if sent.index is None else x.index_select(1, sent.index)


class Returning:
    """Gradients of one stage's keys and values in transit to the ranks that own them."""

    def __init__(self, dk: Tensor, dv: Tensor, stage: Stage, group: ProcessGroup) -> None:
        self._stage = stage
        self._grads = [x.transpose(0, 1).contiguous() for x in (dk, dv)]  # (tokens, batch, heads, dim) each
        self._received = {
            rank: [x.new_empty(sent.tokens, *x.shape[1:]) for x in self._grads] for rank, sent in stage.sends.items()
        }
        sends = [(rank, x[slice(*span)]) for rank, span in stage.received.items() for x in self._grads]
        receives = [(rank, x) for rank, parts in self._received.items() for x in parts]
        self._transfer = Transfer(sends, receives, group, "returning gradients of keys and values")

    def wait(self, dk: Tensor, dv: Tensor) -> None:
        """Write the summed gradients of own tokens into this stage's heads of dk and dv.

        Ranks are summed in ascending order. If the stage has inner rows, dk and dv already contain their gradients, and
        the sums are added to them.
        """
        self._transfer.wait()
        stage, heads = self._stage, slice(*self._stage.kv_heads)
        for i, (total, grads) in enumerate(zip((dk, dv), self._grads, strict=True)):
            out, own = total[:, :, heads], grads[slice(*stage.own)]
            parts = [(sent, self._received[rank][i]) for rank, sent in sorted(stage.sends.items())]
            if stage.inner is not None:
                for sent, part in ((stage.own_tokens, own), *parts):
                    _add(sent, part, out)
            else:
                _write_sum(own, parts, out)
        self._grads, self._received = [], {}


def _write_sum(own: Tensor, parts: list[tuple[Sent, Tensor]], out: Tensor) -> None:
    """Write the sum of (tokens, batch, heads, dim) gradients, rounded once, to (batch, tokens, heads, dim)."""
    if not parts:
        out.copy_(own.transpose(0, 1))
    elif len(parts) == 1 and parts[0][0].index is None and parts[0][0].tokens == len(own):
        torch.add(own.transpose(0, 1), parts[0][1].transpose(0, 1), out=out)
    else:
        total = own.to(torch.promote_types(own.dtype, torch.float32), copy=True)
        for sent, part in parts:
            if sent.index is None:
                total[sent.first : sent.first + sent.tokens] += part
            else:
                total.index_add_(0, sent.index, part.to(total.dtype))  # deterministic: no token occurs twice
        out.copy_(total.transpose(0, 1))


def _add(sent: Sent, grads: Tensor, total: Tensor) -> None:
    """Add (tokens, batch, heads, dim) gradients to the tokens of a (batch, tokens, heads, dim) total, rounded once."""
    found = _taken(total, sent) + grads.transpose(0, 1)
    if sent.index is None:
        total[:, sent.first : sent.first + sent.tokens] = found
    else:
        total.index_copy_(1, sent.index, found)
