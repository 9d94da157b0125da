# SPDX-License-Identifier: Apache-2.0
"""The backends of each operation, and the reasons why a backend cannot serve a problem.

    ATTENTION.resolve(problem)             name of the first backend that can serve
    ATTENTION.reasons("triton", problem)   why a backend cannot serve; empty if it can
    ATTENTION.kernels("triton")            its functions, see the operator's `contract`

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
from dynaxx.kernels.attention.contract import AttentionKernels, AttentionProblem
from dynaxx.kernels.decode.contract import DecodeKernels, DecodeProblem
from dynaxx.kernels.selection.contract import QueryScoresKernels, QueryScoresProblem, SelectionKernels, SelectionProblem
from dynaxx.layout.host import never_traced

ROOT = __name__.rpartition(".kernels.")[0]  # `dynaxx`, or the name of a copy of it
P = TypeVar("P")  # type of problems
K = TypeVar("K")  # type of kernels


class Backend(NamedTuple):
    """The modules of one backend of an operation, relative to `dynaxx`."""

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
    found = _import_once(f"{ROOT}.{name}")
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
    if name not in _marked and "reference" not in name:
        for function in vars(found).values():
            if isinstance(function, FunctionType) and _passes_addresses(function.__module__):
                never_traced(function)
        _marked.add(name)
    return found


def _passes_addresses(module: str) -> bool:
    inside = module.removeprefix(f"{ROOT}.")
    return inside != module and not PASS_ADDRESSES.isdisjoint(inside.split("."))


PASS_ADDRESSES = {"cpu", "gpu", "triton", "hopper", "runtime", "schedule", "primitives"}  # folders and modules
_marked: set[str] = set()
ATTENTION: Operation[AttentionProblem, AttentionKernels] = Operation(
    "attention",
    {
        "hopper": Backend("kernels.attention.hopper.operators", "kernels.support.hopper:unsupported_reasons"),
        "triton": Backend("kernels.attention.triton.operators", "kernels.support.triton:unsupported_reasons"),
        "cpu": Backend("kernels.attention.cpu", "kernels.attention.cpu.support:unsupported_reasons"),
        "reference": Backend("kernels.attention.reference", "kernels.attention.reference:unsupported_reasons"),
    },
)
DECODE: Operation[DecodeProblem, DecodeKernels] = Operation(
    "decode",
    {
        "triton": Backend("kernels.decode.triton.launch", "kernels.support.triton:decode_reasons"),
        "cpu": Backend("kernels.decode.cpu", "kernels.decode.cpu:unsupported_reasons"),
        "reference": Backend("kernels.decode.reference", "kernels.decode.reference:unsupported_reasons"),
    },
)
SELECTION: Operation[SelectionProblem, SelectionKernels] = Operation(
    "selection",
    {
        "triton": Backend("kernels.selection.triton.operators", "kernels.support.triton:selection_reasons")
    },  # torch serves the rest
)
QUERY_SCORES: Operation[QueryScoresProblem, QueryScoresKernels] = Operation(
    "scores of one query per row",
    {
        "hopper": Backend("kernels.selection.hopper.query_scores", "kernels.support.hopper:query_scores_reasons"),
        "triton": Backend("kernels.selection.triton.query_scores", "kernels.support.triton:query_scores_reasons"),
    },
)
