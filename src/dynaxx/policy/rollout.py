# SPDX-License-Identifier: Apache-2.0
"""Decide which requests run sparse: by a share of their ids, by layer, by length, or by a flag service.

A request's id is hashed together with the policy's seed, so the same ids are chosen in every process and on every day,
and a larger share keeps the ids of a smaller one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from pydantic import model_validator

from dynaxx.policy.document import Document, Indices, Int, Share, Total

NOT_CHOSEN = "request not in the rollout"
ASKED_DENSE = "request asked for dense"
Flags = Callable[[str, str, bool], bool]  # (flag, request id, default) -> whether the request runs sparse


class Rollout(Document):
    """The part of the traffic that a policy applies to, all of it by default; the rest is dense."""

    share: Share = 1.0  # of requests
    seed: Int = 0  # another seed chooses other requests
    layers: Indices = "all"
    min_tokens: Total = 0  # sequences of fewer keys are dense
    max_tokens: Total | None = None  # of more keys, too
    flag: str | None = None  # an OpenFeature flag that decides; `share` is its default value

    @model_validator(mode="after")
    def _lengths_in_order(self) -> Rollout:
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ValueError(f"`max_tokens` must be >= `min_tokens` = {self.min_tokens}, got {self.max_tokens}")
        return self

    def admits(self, request_id: str) -> bool:
        """Return whether the request of this id is in the share."""
        digest = hashlib.blake2b(f"{self.seed}:{request_id}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest) < self.share * 2**64

    def covers_layer(self, layer: int) -> bool:
        """Return whether the policy applies to a layer."""
        return self.layers == "all" or layer in self.layers

    def covers_length(self, seqlen_k: int) -> bool:
        """Return whether the policy applies to a sequence of so many keys."""
        return self.min_tokens <= seqlen_k and (self.max_tokens is None or seqlen_k <= self.max_tokens)


class Request(NamedTuple):
    """The caller's statement about the requests of a forward pass."""

    ids: tuple[str, ...] = ()  # one, or one per row of the batch
    sparse: bool | None = None  # the caller's own decision


_CURRENT: ContextVar[Request | None] = ContextVar("dynaxx_request", default=None)


@contextmanager
def request(*ids: str, sparse: bool | None = None) -> Iterator[None]:
    """Say whose request runs within the block, in this thread or task.

    Args:
        ids: one id for the whole batch, or one per row.
        sparse: True or False decides for these requests, whatever the share; None leaves it to the policy.

    Raises:
        TypeError: an id that is no string.
    """
    wrong = next((each for each in ids if not isinstance(each, str)), None)
    if wrong is not None:
        raise TypeError(f"a request's id must be a string, got {type(wrong).__name__} {wrong!r}")
    token = _CURRENT.set(Request(ids, sparse))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_request() -> Request | None:
    """Return what `request` said around this call."""
    return _CURRENT.get()


class Choice(NamedTuple):
    """The requests of a pass that run sparse."""

    sparse: tuple[bool, ...]  # one for all rows, or one per request; rows are shared evenly among them
    reason: str  # why the others do not

    @property
    def nothing(self) -> bool:
        """Whether no request runs sparse."""
        return not any(self.sparse)

    def row(self, row: int, rows: int) -> bool:
        """Return whether one row of a batch runs sparse; a row that fits no request is dense."""
        count = len(self.sparse)
        return rows % count == 0 and self.sparse[row * count // rows]


ALL = Choice((True,), "")


def choose(rollout: Rollout, said: Request | None, number: Callable[[], int], flags: Flags | None = None) -> Choice:
    """Decide which requests of a pass run sparse.

    Args:
        rollout: the part of the traffic that the policy applies to.
        said: the caller's statement about the requests.
        number: returns a number in this process that stands for the id of a request without one.
        flags: decides instead of the share where the policy names a flag.
    """
    if said is not None and said.sparse is not None:
        return ALL if said.sparse else Choice((False,), ASKED_DENSE)
    if rollout.flag is None and rollout.share == 1.0:
        return ALL
    ids = (said.ids if said is not None else ()) or (f"#{number()}",)
    chosen = tuple(_decide(rollout, each, flags) for each in ids)
    return Choice(chosen, "" if all(chosen) else NOT_CHOSEN)


def _decide(rollout: Rollout, request_id: str, flags: Flags | None) -> bool:
    default = rollout.admits(request_id)
    return default if rollout.flag is None or flags is None else flags(rollout.flag, request_id, default)


def open_feature() -> Flags:
    """Return flags from the application's OpenFeature provider; the request's id is the targeting key.

    Raises:
        ImportError: openfeature-sdk is not installed.
    """
    try:
        from openfeature import api
        from openfeature.evaluation_context import EvaluationContext
    except ImportError as error:
        raise ImportError(
            f"`rollout.flag` needs openfeature-sdk ({error}): pip install 'dynaxx[rollout]', or leave the flag out"
        ) from error
    client = api.get_client("dynaxx")

    def ask(flag: str, request_id: str, default: bool) -> bool:
        # The SDK gives the default, and logs why, where a provider fails.
        return client.get_boolean_value(flag, default, EvaluationContext(targeting_key=request_id))

    return ask
