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
        return tuple(stretch.kind for stretch in self.costs)

    def key(self) -> Tensor:
        """Return all ids concatenated, as an identity of the texts."""
        return torch.cat([stretch.ids[0] for stretch in (*self.costs, *self.search)])


def search_texts(tokenizer: Any, text: str, kinds: Mapping[str, str], tokens: int) -> SearchTexts:
    """Divide the calibration half of each text into stretches, the first for costs, the others for the search.

    Raises:
        ValueError: a text is too short; the message names it and gives its length.
    """
    if not kinds:
        ids = calibration_ids(tokenizer, text, tokens)
        starts = range(tokens, tokens * (1 + SEARCH_TEXTS), tokens)
        made = [Stretch(SAMPLE, started(tokenizer, ids[:, start : start + tokens + 1])) for start in (0, *starts)]
        return SearchTexts((made[0],), tuple(made[1:]))
    costs: list[Stretch] = []
    found: list[Stretch] = []
    for kind, each in {SAMPLE: text, **kinds}.items():
        part = f"the half of {kind!r} to tune on" if kind != SAMPLE else "the half of the text to tune on"
        ids = encode(tokenizer, split_text(each).calibration, 2 * tokens + 1, part=part)
        costs.append(Stretch(kind, started(tokenizer, ids[:, : tokens + 1])))
        found.append(Stretch(kind, started(tokenizer, ids[:, tokens:])))
    return SearchTexts(tuple(costs), tuple(found))


def calibration_ids(tokenizer: Any, text: str, tokens: int) -> Tensor:
    """Return the token ids to tune on, from the calibration half of a text: (1, ...) int64.

    Raises:
        ValueError: the text is too short; the message gives its length.
    """
    part = split_text(text).calibration
    return encode(tokenizer, part, (1 + SEARCH_TEXTS) * tokens + 1, part="the half of the text to tune on")
