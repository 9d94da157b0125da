"""Which backend serves a problem, and why the others do not."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.errors import UnsupportedInputError
from dynaxx.kernels.problem import AttentionProblem
from dynaxx.layout import BlockLayout, PackedLayout
from dynaxx.layout.origin import KeptWithLayouts
from dynaxx.ops.checks import check_inputs, check_layout, check_packed, check_values

MOST_CHOICES = 64  # kept per layout
BACKENDS = ("hopper", "triton", "cpu", "reference")  # in the order that "auto" prefers

P = TypeVar("P")  # a problem


def load_backend(name: str) -> ModuleType:
    """Import a backend's module; only then does triton or the compiled core load."""
    found = _import_once(name)
    if isinstance(found, ImportError):
        raise found
    return found


@cache
def _import_once(name: str) -> ModuleType | ImportError:
    """The module, or why it does not import: a failing import costs 50 us, and would at every call."""
    try:
        return importlib.import_module(f"dynaxx.kernels.{name}")
    except ImportError as error:
        return error


def unsupported_reasons(name: str, problem: AttentionProblem) -> list[str]:
    """Why the backend cannot serve; a backend whose import fails says so instead of failing the others."""
    try:
        module = load_backend(name)
    except ImportError as error:
        return [f"not available: {error}"]
    reasons: list[str] = module.unsupported_reasons(problem)
    return reasons


def choose_backend(problem: AttentionProblem, backend: str = "auto") -> str:
    """The named backend, or the first that can serve.

    Raises:
        ValueError: an unknown name.
        UnsupportedInputError: the named backend, or all of them, cannot serve; with the reasons of each.
    """
    return first_that_serves(problem, BACKENDS, backend, unsupported_reasons)


def first_that_serves(
    problem: P, backends: Sequence[str], backend: str, reasons_of: Callable[[str, P], list[str]]
) -> str:
    """The named one of some backends, or with "auto" the first against which there are no reasons.

    Raises:
        ValueError, UnsupportedInputError: as `choose_backend`.
    """
    check_name(backend, backends)
    reasons = {}
    for name in backends if backend == "auto" else (backend,):
        reasons[name] = reasons_of(name, problem)
        if not reasons[name]:
            return name
    raise UnsupportedInputError(str(problem), reasons)


def backend_for(
    q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, softcap: float | None, backend: str
) -> tuple[str, bool]:
    """Check the inputs of a call and choose its backend; and whether a gradient will be asked for.

    What was found is kept with the layout, or its form: a call whose tensors have the same shapes, dtypes and devices
    asks for nothing else. Raises as `check_inputs` and `choose_backend`.
    """
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    tensors = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device)
    if not isinstance(layout, BlockLayout):
        check_layout(layout)
    known = _chosen.of(layout)
    name = known.get((*tensors, softcap, backend, needs_grad))
    if name is not None and layout.form is not None:
        check_values(layout)
    if name is None:
        name = choose_backend(check_inputs(q, k, v, layout, softcap=softcap), backend)
        if len(known) < MOST_CHOICES:
            known[(*tensors, softcap, backend, needs_grad)] = name
    return name, needs_grad


_chosen = KeptWithLayouts()


def score_options(softcap: float | None) -> dict[str, float]:
    """What a backend's functions are given beside the scale: nothing that is not asked for."""
    return {} if softcap is None else {"softcap": softcap}


def check_name(backend: str, backends: Sequence[str] = BACKENDS) -> None:
    """Raise ValueError for an unknown backend."""
    if backend != "auto" and backend not in backends:
        raise ValueError(f"`backend` must be 'auto' or one of {backends}, got {backend!r}")


@dataclass(frozen=True)
class Explanation:
    """What `explain` found: print it, or read `chosen` and `reasons`."""

    problem: AttentionProblem
    chosen: str
    reasons: dict[str, list[str]]  # by backend; empty where it could serve
    density: float

    def __str__(self) -> str:
        lines = [str(self.problem), f"visited blocks: {self.density:.1%} of the causally visible ones"]
        for name, why in self.reasons.items():
            verdict = "would run" if name == self.chosen else "; ".join(why) or "could serve, comes later in the order"
            lines.append(f"  {name:<10} {verdict}")
        return "\n".join(lines)


@typed
def explain(
    q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, *, softcap: float | None = None, backend: str = "auto"
) -> Explanation:
    """Say which backend `sparse_attention` would run on the same arguments, and why the others would not.

    Args:
        q, k, v, layout, softcap, backend: as `sparse_attention`; packed, too. Nothing else that it takes matters.

    Raises:
        ValueError, TypeError, UnsupportedInputError: as `sparse_attention` would.
    """
    if isinstance(layout, PackedLayout) and q.ndim == 3:
        check_packed(q, k, v, layout, None, None)
        q, k, v = q[None], k[None], v[None]
    problem = check_inputs(q, k, v, layout, softcap=softcap)
    reasons = {name: unsupported_reasons(name, problem) for name in BACKENDS}
    return Explanation(problem, choose_backend(problem, backend), reasons, layout.density())
