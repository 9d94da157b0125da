# SPDX-License-Identifier: Apache-2.0
"""The errors of dynaxx. Bad values raise `ValueError` / `TypeError`; these two add what those cannot say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class UnsupportedInputError(ValueError):
    """No backend (or not the named one) can serve a problem.

    Args:
        problem: what was asked for, in words.
        reasons: for each backend that was considered, why it cannot serve.
    """

    def __init__(self, problem: str, reasons: Mapping[str, Sequence[str]]) -> None:
        self.problem = problem
        self.reasons = {backend: list(why) for backend, why in reasons.items()}
        lines = [f"no backend can serve {problem}"]
        lines += [f"  {backend}: {'; '.join(why)}" for backend, why in self.reasons.items()]
        super().__init__("\n".join(lines))


class PolicyError(ValueError):
    """A policy document is broken, foreign, or too new; the message names the field and the fix."""
