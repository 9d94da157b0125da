# SPDX-License-Identifier: Apache-2.0
"""The two errors that dynaxx defines. Other bad values raise plain `ValueError` and `TypeError`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class UnsupportedInputError(ValueError):
    """No backend (or not the named one) can serve a problem.

    Args:
        problem: a description of the request.
        reasons: why each backend that was considered cannot serve it.
    """

    def __init__(self, problem: str, reasons: Mapping[str, Sequence[str]]) -> None:
        self.problem = problem
        self.reasons = {backend: list(why) for backend, why in reasons.items()}
        lines = [f"no backend can serve {problem}"]
        lines += [f"  {backend}: {'; '.join(why)}" for backend, why in self.reasons.items()]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        """Return how a copy is made, so that the error reaches the parent of a worker process."""
        return type(self), (self.problem, self.reasons)


class PolicyError(ValueError):
    """A policy document is malformed, of another model, or too new. The message names the field and the fix."""
