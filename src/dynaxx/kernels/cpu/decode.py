"""Decoding on a CPU."""

from __future__ import annotations

from dynaxx.kernels.decode_problem import DecodeProblem


def unsupported_reasons(problem: DecodeProblem) -> list[str]:
    """Why the core cannot serve."""
    return ["not there yet"]
