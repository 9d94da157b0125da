# SPDX-License-Identifier: Apache-2.0
"""Texts of a search: several stretches of one sample, or one stretch of each kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dynaxx.lab.texts import encode, split_text, started

SEARCH_TEXTS = 2  # evaluated stretches of a single text
SAMPLE = "sample"  # name of the user's own text


@dataclass(frozen=True)
class Stretch:
    """One text of the search: its kind and its ids (1, tokens + 1)."""

    kind: str
    ids: Tensor


@dataclass(frozen=True)
class SearchTexts:
    """Texts for the costs of heads, and others for the evaluation of budgets."""

    costs: tuple[Stretch, ...]
    search: tuple[Stretch, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of text, in the order of the search."""
        return tuple(dict.fromkeys(stretch.kind for stretch in self.costs))

    def key(self) -> Tensor:
        """Return all ids concatenated, as an identity of the texts."""
        return torch.cat([stretch.ids[0] for stretch in (*self.costs, *self.search)])


def search_texts(tokenizer: Any, text: str, kinds: Mapping[str, str], tokens: int, stretches: int = 1) -> SearchTexts:
    """Divide the calibration half of each text into stretches, the first ones for costs, the others for the search.

    Args:
        tokenizer: the tokenizer of the model.
        text: the sample.
        kinds: further kinds of text.
        tokens: tokens per stretch.
        stretches: stretches of each text for costs, and as many for the search, as far as the text has them. The search
            gets more if they are odd, and at least `SEARCH_TEXTS` of a single text.

    Raises:
        ValueError: a text is too short; the message names it and gives its length.
    """
    if stretches < 1:
        raise ValueError(f"`stretches` must be >= 1, got {stretches}")
    fewest = 1 if kinds else SEARCH_TEXTS  # of the search
    most = stretches + max(fewest, stretches)
    costs: list[Stretch] = []
    found: list[Stretch] = []
    for kind, each in {SAMPLE: text, **kinds}.items():
        part = f"the half of {kind!r} to tune on" if kind != SAMPLE else "the half of the text to tune on"
        room = (1 + fewest) * tokens + 1, most * tokens + 1
        ids = encode(tokenizer, split_text(each).calibration, room[0], part=part, most=room[1])
        count = (ids.shape[1] - 1) // tokens
        made = [
            Stretch(kind, started(tokenizer, ids[:, start : start + tokens + 1]))
            for start in range(0, count * tokens, tokens)
        ]
        for_costs = min(count // 2, count - fewest)
        costs += made[:for_costs]
        found += made[for_costs:]
    return SearchTexts(tuple(costs), tuple(found))
