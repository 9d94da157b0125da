# SPDX-License-Identifier: Apache-2.0
"""Decide which requests run sparse: by a share of their ids, by layer, by length, or by a flag service.

The id of a request is hashed together with the policy's seed. Every process therefore chooses the same ids at any time,
and a larger share includes the ids of a smaller one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from pydantic import model_validator

from dynaxx.arguments import typed
from dynaxx.policy.document import Document, Indices, Int, Share, Total

NOT_CHOSEN = "request not in the rollout"
ASKED_DENSE = "request asked for dense"
Flags = Callable[[str, str, bool], bool]  # (flag, request id, default) -> whether the request runs sparse


class Rollout(Document):
    """The part of the traffic that a policy applies to, by default all of it. The rest runs dense."""

    share: Share = 1.0  # share of requests
    seed: Int = 0  # another seed chooses other requests
    layers: Indices = "all"
    min_tokens: Total = 0  # sequences of fewer keys run dense
    max_tokens: Total | None = None  # sequences of more keys run dense
    flag: str | None = None  # an OpenFeature flag that decides; `share` is its default value

    @model_validator(mode="after")
    def _lengths_in_order(self) -> Rollout:
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ValueError(f"`max_tokens` must be >= `min_tokens` = {self.min_tokens}, got {self.max_tokens}")
        return self

    def admits(self, request_id: str) -> bool:
        """Return whether the request with this id is in the share."""
        digest = hashlib.blake2b(f"{self.seed}:{request_id}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest) < self.share * 2**64

    def covers_layer(self, layer: int) -> bool:
        """Return whether the policy applies to a layer."""
        return self.layers == "all" or layer in self.layers

    def covers_length(self, seqlen_k: int) -> bool:
        """Return whether the policy applies to a sequence of `seqlen_k` keys."""
        return self.min_tokens <= seqlen_k and (self.max_tokens is None or seqlen_k <= self.max_tokens)


class DeclaredRequests(NamedTuple):
    """The requests of a forward pass, as declared with `request`."""

    ids: tuple[str, ...] = ()  # one id, or one per row of the batch
    sparse: bool | None = None  # the caller's decision, which overrides the share


_CURRENT: ContextVar[DeclaredRequests | None] = ContextVar("dynaxx_request", default=None)


@contextmanager
def request(*ids: str, sparse: bool | None = None) -> Iterator[None]:
    """Declare the requests that run within the block, in this thread or task.

    Args:
        ids: one id for the whole batch, or one per row.
        sparse: True or False decides for these requests and overrides the share; None leaves it to the policy.

    Raises:
        TypeError: an id is not a string.
    """
    wrong = next((each for each in ids if not isinstance(each, str)), None)
    if wrong is not None:
        raise TypeError(f"a request's id must be a string, got {type(wrong).__name__} {wrong!r}")
    token = _CURRENT.set(DeclaredRequests(ids, sparse))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_request() -> DeclaredRequests | None:
    """Return the requests declared around this call, or None."""
    return _CURRENT.get()


class ChosenRequests(NamedTuple):
    """The requests of a pass that run sparse."""

    sparse: tuple[bool, ...]  # one value for all rows, or one per request; requests have equal numbers of rows
    reason: str  # why the other requests run dense

    @property
    def nothing(self) -> bool:
        """Return whether no request runs sparse."""
        return not any(self.sparse)

    def row(self, row: int, rows: int) -> bool:
        """Return whether one row of a batch runs sparse. A row without a request runs dense."""
        count = len(self.sparse)
        return rows % count == 0 and self.sparse[row * count // rows]


ALL = ChosenRequests((True,), "")


def choose(
    rollout: Rollout, declared: DeclaredRequests | None, number: Callable[[], int], flags: Flags | None = None
) -> ChosenRequests:
    """Decide which requests of a pass run sparse.

    Args:
        rollout: the part of the traffic that the policy applies to.
        declared: the requests that the caller declared, or None.
        number: a function that returns a number in place of the id of an undeclared request.
        flags: a flag service, which decides instead of the share if the policy names a flag.
    """
    if declared is not None and declared.sparse is not None:
        return ALL if declared.sparse else ChosenRequests((False,), ASKED_DENSE)
    if rollout.flag is None and rollout.share == 1.0:
        return ALL
    ids = (declared.ids if declared is not None else ()) or (f"#{number()}",)
    chosen = tuple(_decide(rollout, each, flags) for each in ids)
    return ChosenRequests(chosen, "" if all(chosen) else NOT_CHOSEN)


def _decide(rollout: Rollout, request_id: str, flags: Flags | None) -> bool:
    default = rollout.admits(request_id)
    return default if rollout.flag is None or flags is None else flags(rollout.flag, request_id, default)


def open_feature() -> Flags:
    """Return flags from the application's OpenFeature provider. The targeting key is the id of the request.

    Raises:
        ImportError: openfeature-sdk is not installed.
    """
    try:
        from openfeature import api
        from openfeature.evaluation_context import EvaluationContext
    except ImportError as error:
        raise ImportError(
            f"`rollout.flag` needs openfeature-sdk ({error}): pip install 'dynaxx[rollout]', or remove the flag"
        ) from error
    client = api.get_client("dynaxx")

    def ask(flag: str, request_id: str, default: bool) -> bool:
        # If a provider fails, the SDK logs the error and returns the default.
        return client.get_boolean_value(flag, default, EvaluationContext(targeting_key=request_id))

    return ask


def is_long(seqlen_k: int, dense_below: int, sparse_from: int | None = None, *, before: bool = False) -> bool:
    """Return whether a sequence of `seqlen_k` keys runs sparse. See `Policy`.

    Args:
        seqlen_k: number of keys of the sequence.
        dense_below: number of keys below which a sequence runs dense.
        sparse_from: number of keys from which a sequence runs sparse; None means `dense_below`.
        before: the answer for the previous sequence, which holds between the borders. Engines whose sequences only grow
            leave it False.
    """
    if seqlen_k >= (dense_below if sparse_from is None else sparse_from):
        return True
    return before and seqlen_k >= dense_below


@typed
class LengthSwitch:
    """The state of `is_long`: it stores the last answer.

    Attributes:
        last: the last answer, False at first.
    """

    __slots__ = ("dense_below", "last", "sparse_from")

    def __init__(self, dense_below: int, sparse_from: int | None = None) -> None:
        self.dense_below = dense_below
        self.sparse_from = dense_below if sparse_from is None else sparse_from
        self.last = False

    def sparse(self, seqlen_k: int) -> bool:
        """Return whether a sequence of `seqlen_k` keys runs sparse, and store the answer."""
        self.last = is_long(seqlen_k, self.dense_below, self.sparse_from, before=self.last)
        return self.last

    def reset(self) -> None:
        """Forget the last answer."""
        self.last = False
