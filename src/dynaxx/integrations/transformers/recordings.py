# SPDX-License-Identifier: Apache-2.0
"""Recordings of autograd within an op of a compiled model, so that its backward op need not compute the call again.

The forward op records the call and returns a ticket, a tensor of one byte, beside its result. The compiler keeps the
ticket for the backward op, which finds the recording by the ticket's address. A recording without a ticket is dropped.
If there is none, as after a second backward pass over one graph, the backward op computes the call again.

A recording must not hold inputs or the result of its op: the compiler may write other values into their memory, and
gives its own copies to the backward op. It holds their places instead, and everything else that autograd saved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Given = Sequence[Tensor | None]


class _View(NamedTuple):
    """A view of one of the tensors that the backward op gets."""

    place: int  # among those tensors
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int  # from the first element of that tensor


class Recording:
    """An attention call that autograd has recorded; see `record`."""

    def __init__(self) -> None:
        self._saved: list[Tensor | _View] = []
        self._given: Given = ()
        self._forms: list[tuple[torch.Size, tuple[int, ...]] | None] = []  # shapes and strides in the forward op
        self._leaves: list[Tensor] = []
        self._edge: torch.autograd.graph.GradientEdge | None = None  # of the result; None if it has no gradients

    @classmethod
    def of(
        cls, attend: Callable[..., Tensor], inputs: Sequence[Tensor], others: Given = ()
    ) -> tuple[Tensor, Recording]:
        """Call `attend(*inputs)` and return its result, contiguous, and its recording.

        Args:
            attend: the call, which reads no other tensors of its op than those given here.
            inputs: the tensors that need gradients.
            others: other tensors of the op.
        """
        found = cls()
        found._leaves = [x.detach().requires_grad_() for x in inputs]
        with recording(), torch.autograd.graph.saved_tensors_hooks(found._pack, found._unpack):
            result = attend(*found._leaves)
            result = result.view_as(result)  # torch 2.11 reads no shapes from functions in Python
        if result.requires_grad:
            found._edge = torch.autograd.graph.get_gradient_edge(result)
        out = result.detach().contiguous()
        found._let_go((*inputs, *others, out))
        return out, found

    def gradients(self, do: Tensor, given: Given) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs. `given` are the inputs, the others and the result again."""
        if self._edge is None:
            return (None,) * len(self._leaves)
        self._given = [_in_form(x, form) for x, form in zip(given, self._forms, strict=True)]
        try:
            return torch.autograd.grad(self._edge, self._leaves, do, allow_unused=True)
        finally:
            self._given = ()

    def _pack(self, x: Tensor) -> int:
        self._saved.append(x.detach())
        return len(self._saved) - 1

    def _unpack(self, number: int) -> Tensor:
        found = self._saved[number]
        if isinstance(found, Tensor):
            return found
        whole = self._given[found.place]
        assert whole is not None, "it was given in the forward op"
        return whole.as_strided(found.shape, found.stride, whole.storage_offset() + found.offset)

    def _let_go(self, held: Given) -> None:
        """Replace what was saved of these tensors by its place in them."""
        self._forms = [None if x is None else (x.shape, x.stride()) for x in held]
        for number, x in enumerate(self._saved):
            assert isinstance(x, Tensor), "nothing was replaced yet"
            memory = x.untyped_storage().data_ptr()
            same = [(i, y) for i, y in enumerate(held) if y is not None and y.untyped_storage().data_ptr() == memory]
            if same:
                place, whole = next(((i, y) for i, y in same if _contains(y, x)), (0, None))
                if whole is None:
                    self._saved[number] = x.clone()
                else:
                    first = int(x.storage_offset() - whole.storage_offset())
                    self._saved[number] = _View(place, x.shape, x.stride(), first)
        for leaf in self._leaves:
            leaf.data = leaf.data.new_empty(0)  # autograd needs the leaf, not its values


class Recordings:
    """The recordings whose tickets are alive, by the address of the ticket."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[StorageWeakRef, Recording]] = {}

    def keep(self, recording: Recording, device: torch.device) -> Tensor:
        """Keep a recording, and return its ticket."""
        for address, (known, _) in list(self._kept.items()):
            if known.expired():
                self._kept.pop(address, None)
        ticket = torch.empty(1, dtype=torch.uint8, device=device)
        self._kept[ticket.data_ptr()] = StorageWeakRef(ticket.untyped_storage()), recording
        return ticket

    def take(self, ticket: Tensor) -> Recording | None:
        """Return the recording of a ticket, and drop it; None if there is none."""
        kept, found = self._kept.pop(ticket.data_ptr(), (None, None))
        return None if kept is None or kept.expired() else found

    def __len__(self) -> int:
        """Return the number of recordings."""
        return len(self._kept)


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Let autograd record within an op, where the dispatcher otherwise skips it."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    keys = torch._C.DispatchKey
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor, keys.ADInplaceOrView):
        exclude = exclude.remove(key)
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        yield


def _contains(whole: Tensor, part: Tensor) -> bool:
    """Return whether a tensor fills its memory without gaps, and another of the same memory lies within it."""
    if torch.empty_like(whole, device="meta").stride() != whole.stride() or whole.dtype != part.dtype:
        return False
    first = part.storage_offset() - whole.storage_offset()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    return first >= 0 and first + extent <= whole.numel()


def _in_form(x: Tensor | None, form: tuple[torch.Size, tuple[int, ...]] | None) -> Tensor | None:
    """Return a tensor with the strides that it had in the forward op."""
    if x is None or form is None or x.stride() == form[1]:
        return x
    return torch.empty_strided(*form, dtype=x.dtype, device=x.device).copy_(x)
