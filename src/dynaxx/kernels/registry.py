# SPDX-License-Identifier: Apache-2.0
"""The backends of each operation, and the reasons why a backend cannot serve a problem.

    ATTENTION.resolve(problem)             name of the first backend that can serve
    ATTENTION.reasons("triton", problem)   why a backend cannot serve; empty if it can
    ATTENTION.kernels("triton")            its functions, see `kernels.contract`

Asking for reasons loads no compiler. The kernels of a backend are loaded at first use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any, Generic, NamedTuple, TypeVar, cast

from dynaxx.errors import UnsupportedInputError
from dynaxx.kernels import trials
from dynaxx.kernels.contract import (
    AttentionKernels,
    DecodeKernels,
    IndexerKernels,
    IndexLossKernels,
    NsaDecodeKernels,
    NsaKernels,
    QueryScoresKernels,
    SelectionKernels,
    TokenDecodeKernels,
    TokenKernels,
)
from dynaxx.kernels.problem import (
    AttentionProblem,
    DecodeProblem,
    IndexerProblem,
    IndexLossProblem,
    QueryScoresProblem,
    SelectionProblem,
)
from dynaxx.layout.host import never_traced

P = TypeVar("P")  # type of problems
K = TypeVar("K")  # type of kernels


class Backend(NamedTuple):
    """The modules of one backend of an operation, relative to `dynaxx.kernels`."""

    kernels: str  # module
    reasons: str  # "module:function", where the function takes a problem


@dataclass(frozen=True)
class Operation(Generic[P, K]):
    """One operation and its backends, in the order of preference of "auto"."""

    name: str
    backends: dict[str, Backend]

    def kernels(self, backend: str) -> K:
        """Return a backend's kernels.

        Raises:
            ImportError: a dependency of the backend is not installed.
        """
        return cast("K", _never_traced_kernels(self.backends[backend].kernels))

    def reasons(self, backend: str, problem: P) -> list[str]:
        """Return the reasons why a backend cannot serve; if its import fails, that is the reason."""
        module, _, function = self.backends[backend].reasons.partition(":")
        try:
            ask: Callable[[P], list[str]] = getattr(_imported(module), function)
        except ImportError as error:
            return [f"not available: {error}"]
        return ask(problem) or trials.reasons(self.name, backend, problem)

    def explain(self, problem: P) -> dict[str, list[str]]:
        """Return the reasons of all backends."""
        return {backend: self.reasons(backend, problem) for backend in self.backends}

    def resolve(self, problem: P, backend: str = "auto") -> str:
        """Return the named backend, or for "auto" the first one that can serve the problem.

        Raises:
            ValueError: the name is unknown.
            UnsupportedInputError: the named backend, or every backend, cannot serve; lists the reasons of each.
        """
        self.check_name(backend)
        refused = {}
        for name in self.backends if backend == "auto" else (backend,):
            refused[name] = self.reasons(name, problem)
            if not refused[name]:
                return name
        raise UnsupportedInputError(str(problem), refused)

    def check_name(self, backend: str) -> None:
        """Raise ValueError if the backend is unknown."""
        if backend != "auto" and backend not in self.backends:
            raise ValueError(f"`backend` must be 'auto' or one of {tuple(self.backends)}, got {backend!r}")


def _imported(name: str) -> Any:
    found = _import_once(f"dynaxx.kernels.{name}")
    if isinstance(found, ImportError):
        raise found
    return found


@cache
def _import_once(name: str) -> Any:
    """Return the module, or the reason why its import fails; cached, because a failing import costs 50 us."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        return error


def _never_traced_kernels(name: str) -> Any:
    """Return a module of kernels. `torch.compile` must not trace its functions, which pass addresses of tensors on."""
    found = _imported(name)
    if name not in _marked and not name.startswith("reference."):
        for function in vars(found).values():
            if isinstance(function, FunctionType) and function.__module__.startswith(PASS_ADDRESSES):
                never_traced(function)
        _marked.add(name)
    return found


PASS_ADDRESSES = tuple(f"dynaxx.kernels.{name}" for name in ("cpu", "gpu", "triton", "hopper"))
_marked: set[str] = set()
ATTENTION: Operation[AttentionProblem, AttentionKernels] = Operation(
    "attention",
    {
        "hopper": Backend("hopper.attention.operators", "hopper.support:unsupported_reasons"),
        "triton": Backend("triton.attention.operators", "triton.support:unsupported_reasons"),
        "cpu": Backend("cpu", "cpu.support:unsupported_reasons"),
        "reference": Backend("reference.attention", "reference.attention:unsupported_reasons"),
    },
)
DECODE: Operation[DecodeProblem, DecodeKernels] = Operation(
    "decode",
    {
        "triton": Backend("triton.decode.launch", "triton.support:decode_reasons"),
        "cpu": Backend("cpu.decode", "cpu.decode:unsupported_reasons"),
        "reference": Backend("reference.decode", "reference.decode:unsupported_reasons"),
    },
)
NSA: Operation[AttentionProblem, NsaKernels] = Operation(
    "native sparse attention",
    {
        "hopper": Backend("hopper.nsa.operators", "hopper.support:nsa_reasons"),
        "triton": Backend("triton.nsa.operators", "triton.support:unsupported_reasons"),
        "cpu": Backend("cpu.nsa", "cpu.support:unsupported_reasons"),
        "reference": Backend("reference.nsa", "reference.attention:unsupported_reasons"),
    },
)
NSA_DECODE: Operation[DecodeProblem, NsaDecodeKernels] = Operation(
    "native sparse attention of a decode step",
    {
        "triton": Backend("triton.nsa.decode", "triton.support:decode_reasons"),
        "cpu": Backend("reference.nsa_decode", "cpu.decode:unsupported_reasons"),  # torch, with attention in the core
        "reference": Backend("reference.nsa_decode", "reference.decode:unsupported_reasons"),
    },
)
TOKENS: Operation[AttentionProblem, TokenKernels] = Operation(
    "attention over chosen tokens",
    {
        "hopper": Backend("hopper.tokens.operators", "hopper.support:token_reasons"),
        "triton": Backend("triton.tokens.operators", "triton.support:token_reasons"),
        "cpu": Backend("cpu.tokens", "cpu.support:unsupported_reasons"),
        "reference": Backend("reference.tokens", "reference.tokens:unsupported_reasons"),
    },
)
TOKEN_DECODE: Operation[DecodeProblem, TokenDecodeKernels] = Operation(
    "attention over chosen tokens of a decoding step",
    {
        "triton": Backend("triton.tokens.step", "triton.support:token_decode_reasons"),
        "cpu": Backend("cpu.token_decode", "cpu.decode:unsupported_reasons"),
        "reference": Backend("reference.tokens", "reference.decode:unsupported_reasons"),
    },
)
INDEXER: Operation[IndexerProblem, IndexerKernels] = Operation(
    "choice of tokens by an indexer",
    {
        "hopper": Backend("hopper.tokens.choose", "hopper.support:indexer_reasons"),
        "triton": Backend("triton.tokens.choose", "triton.support:indexer_reasons"),
        "cpu": Backend("cpu.indexer", "cpu.indexer:unsupported_reasons"),
        "reference": Backend("reference.indexer", "reference.indexer:unsupported_reasons"),
    },
)
INDEX_LOSS: Operation[IndexLossProblem, IndexLossKernels] = Operation(
    "the loss of an indexer",
    {
        "triton": Backend("triton.tokens.index_loss", "triton.support:index_loss_reasons"),
        "reference": Backend("reference.index_loss", "reference.index_loss:unsupported_reasons"),
    },
)
SELECTION: Operation[SelectionProblem, SelectionKernels] = Operation(
    "selection",
    {"triton": Backend("triton.selection.operators", "triton.support:selection_reasons")},  # torch serves the rest
)
QUERY_SCORES: Operation[QueryScoresProblem, QueryScoresKernels] = Operation(
    "scores of one query per row",
    {
        "hopper": Backend("hopper.selection.query_scores", "hopper.support:query_scores_reasons"),
        "triton": Backend("triton.selection.query_scores", "triton.support:query_scores_reasons"),
    },
)
