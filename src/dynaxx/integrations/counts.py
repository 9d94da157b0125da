"""Counting what calls did: the one place through which every outcome of a layer call goes."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any


class Counts:
    """Layer calls by outcome, since the start or `reset`. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sparse = 0
        self._dense: Counter[str] = Counter()
        self._sequences: Counter[str] = Counter()
        self._compiled: dict[str, int] = {}

    def sparse(self, layer: int) -> None:
        """A call had at least one sparse sequence."""
        with self._lock:
            self._sparse += 1

    def dense(self, layer: int, reason: str) -> None:
        """A whole call went the old way."""
        with self._lock:
            self._dense[reason] += 1

    def dense_sequences(self, layer: int, reason: str, sequences: int) -> None:
        """So many sequences of a call that is sparse otherwise were dense."""
        with self._lock:
            self._sequences[reason] += sequences

    def compiled(self) -> None:
        """A compiled model ran a layer, dense. Traced by torch.compile: no lock."""
        self._compiled["torch.compile"] = self._compiled.get("torch.compile", 0) + 1

    def reset(self) -> None:
        """Start from zero."""
        with self._lock:
            self._sparse = 0
            self._dense.clear()
            self._sequences.clear()
            self._compiled.clear()

    def to_dict(self) -> dict[str, Any]:
        """As `Handle.stats`."""
        with self._lock:
            return {
                "sparse_calls": self._sparse,
                "dense_calls": {**self._dense, **self._compiled},
                "dense_sequences": dict(self._sequences),
            }
