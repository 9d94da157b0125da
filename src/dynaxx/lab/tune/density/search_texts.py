# SPDX-License-Identifier: Apache-2.0
"""Texts of a search: several stretches of one sample, or one stretch of each kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dynaxx.lab.texts import encode, split_text, started
from dynaxx.lab.tune.result import SAMPLE

SEARCH_TEXTS = 2  # stretches of a single text for trials, at least
MORE = 3  # stretches for trials per requested one; the later ones are only used where the first ones do not decide


@dataclass(frozen=True)
class Stretch:
    """One text of the search: its kind and its ids (1, tokens + 1)."""

    kind: str
    ids: Tensor


@dataclass(frozen=True)
class SearchTexts:
    """Texts for the costs of heads, and others for trials of budgets."""

    costs: tuple[Stretch, ...]
    search: tuple[Stretch, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of text, in the order of the search."""
        return tuple(dict.fromkeys(stretch.kind for stretch in self.costs))

    def first(self, count: int) -> tuple[Stretch, ...]:
        """Return the first stretches for trials of each kind."""
        of = lambda kind: [stretch for stretch in self.search if stretch.kind == kind][:count]
        return tuple(stretch for kind in self.kinds for stretch in of(kind))

    def key(self) -> Tensor:
        """Return all ids concatenated, as an identity of the texts."""
        return torch.cat([stretch.ids[0] for stretch in (*self.costs, *self.search)])


def search_texts(tokenizer: Any, text: str, kinds: Mapping[str, str], tokens: int, stretches: int = 1) -> SearchTexts:
    """Divide the calibration half of each text into stretches, the first ones for costs, the others for trials.

    Args:
        tokenizer: the tokenizer of the model.
        text: the sample.
        kinds: further kinds of text.
        tokens: tokens per stretch.
        stretches: stretches of each text for costs, as far as the text has twice as many. Up to `MORE` times as many
            are for trials, and at least `SEARCH_TEXTS` of a single text.

    Raises:
        ValueError: a text is too short; the message names it and gives its length.
    """
    if stretches < 1:
        raise ValueError(f"`stretches` must be >= 1, got {stretches}")
    fewest = 1 if kinds else SEARCH_TEXTS  # for trials
    most = stretches + MORE * max(fewest, stretches)
    costs: list[Stretch] = []
    found: list[Stretch] = []
    for kind, each in {SAMPLE: text, **kinds}.items():
        part = f"the half of {kind!r} to tune on" if kind != SAMPLE else "the half of the text to tune on"
        room = (1 + fewest) * tokens + 1, most * tokens + 1
        half = split_text(each).calibration
        ids = encode(tokenizer, half, room[0], part=part, most=room[1], stretches=1 + fewest)
        count = (ids.shape[1] - 1) // tokens
        made = [
            Stretch(kind, started(tokenizer, ids[:, start : start + tokens + 1]))
            for start in range(0, count * tokens, tokens)
        ]
        for_costs = min(stretches, count // 2, count - fewest)
        costs += made[:for_costs]
        found += made[for_costs:]
    return SearchTexts(tuple(costs), tuple(found))
