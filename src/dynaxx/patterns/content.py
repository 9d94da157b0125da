# SPDX-License-Identifier: Apache-2.0
"""Global tokens by content, which become positions once the tokens of a request are known."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from typing_extensions import override

from dynaxx.arguments import typed
from dynaxx.layout import BlockGrid
from dynaxx.layout.host import never_traced
from dynaxx.patterns.base import Pattern
from dynaxx.patterns.global_tokens import GlobalTokens
from dynaxx.patterns.runs import Visited
from dynaxx.settings import Count

TokenSequence = tuple[Count, ...]


@typed
@dataclass(frozen=True)
class GlobalContent(Pattern, kind="global_content"):
    """Keys by content, such as section headings: `token_ids` or `sequences` of them, and `span` tokens after each.

    The pattern has no positions until `resolve(input_ids)` finds them in a request. A policy under `dynaxx.apply`
    resolves it for every sequence. A combination such as `a | GlobalContent(...)` resolves as a whole.

    Args:
        token_ids: each of these tokens is a match.
        sequences: each run of exactly these tokens is a match; `content_tokens` makes them from text.
        span: number of tokens after a match that are global too, for example the clause below a heading.
        symmetric: whether the global tokens also see every key.
    """

    token_ids: tuple[Count, ...] = ()
    sequences: tuple[TokenSequence, ...] = ()
    span: Count = 0
    symmetric: bool = False

    def __post_init__(self) -> None:
        """Sort and check the tokens and sequences, so that equal rules have equal hashes."""
        object.__setattr__(self, "token_ids", tuple(sorted({int(token) for token in self.token_ids})))
        sequences = {tuple(int(token) for token in sequence) for sequence in self.sequences}
        object.__setattr__(self, "sequences", tuple(sorted(sequences)))
        if not self.token_ids and not self.sequences:
            raise ValueError("`GlobalContent` must have `token_ids` or `sequences`, got neither")
        if () in sequences:
            raise ValueError("`sequences` must not hold an empty sequence, which would match everywhere")
        super().__post_init__()

    @override
    @classmethod
    def random(cls, rng: random.Random, seqlen_k: int) -> Self:
        return cls((rng.randrange(9),), span=rng.randrange(3), symmetric=rng.random() < 0.5)

    @property
    @override
    def needs_tokens(self) -> bool:
        return True

    @never_traced
    @typed
    def resolve(self, input_ids: Tensor | Sequence[int]) -> GlobalTokens:
        """Return the positions of the matches in one sequence, `GlobalTokens(())` if there are none.

        Args:
            input_ids: (seqlen,) or (1, seqlen) token ids of all tokens up to the last key, cached ones included.
                Ids on a GPU are read back, which synchronizes.
        """
        ids = torch.as_tensor(input_ids, device="cpu")
        if ids.numel() == 0:
            return GlobalTokens((), self.symmetric)
        whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
        if not whole or ids.ndim > 2 or (ids.ndim == 2 and ids.shape[0] != 1):
            raise ValueError(
                f"`input_ids` must be integers (seqlen,) of one sequence, got {ids.dtype} {tuple(ids.shape)}; "
                "call `resolve` once per sequence of a batch"
            )
        ids = ids.flatten().cpu()
        # A cumulative sum over edges (+1 at the start of a global range, -1 at its end) marks the global tokens.
        edges = torch.zeros(len(ids) + 1, dtype=torch.int64, device="cpu")
        largest = torch.iinfo(ids.dtype).max  # a larger id cannot occur in the request
        single = [token for token in self.token_ids if token <= largest]
        singles = torch.isin(ids, torch.tensor(single, dtype=ids.dtype, device="cpu")).nonzero().flatten()
        span = min(self.span, len(ids))
        _mark(edges, singles, 1 + span)
        for sequence in self.sequences:
            if len(sequence) <= len(ids) and max(sequence, default=0) <= largest:
                found = (ids.unfold(0, len(sequence), 1) == torch.tensor(sequence, dtype=ids.dtype, device="cpu")).all(
                    1
                )
                _mark(edges, found.nonzero().flatten(), len(sequence) + span)
        return GlobalTokens(tuple(edges.cumsum(0)[:-1].nonzero().flatten().tolist()), self.symmetric)

    @override
    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        self._refuse()

    @override
    def visited(self, grid: BlockGrid) -> Visited:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ValueError(
            "`GlobalContent` has no positions until it has seen the tokens of a request; use "
            "`pattern.resolve(input_ids)`, or run it in a policy with `dynaxx.apply`, which resolves every sequence"
        )


def _mark(edges: Tensor, starts: Tensor, length: int) -> None:
    edges.index_add_(0, starts, torch.ones_like(starts))
    edges.index_add_(0, (starts + length).clamp(max=len(edges) - 1), -torch.ones_like(starts))


# Text before and after a match. Tokenisers merge a text with its neighbours and split it differently in a new line.
BEFORE = ("", " ", "\n", "\n\n", "a ", "a\n", "a\n\n", ". ", "(", '"', "\t")
AFTER = ("", " a", "\n", "\n\n", "\na", ".", ":", ", a", ")", '"')


@never_traced
@typed
def content_tokens(tokenizer: Any, texts: Sequence[str]) -> tuple[TokenSequence, ...]:
    """Return token sequences for `GlobalContent` from texts, with the tokenizer of the model.

    The tokens of a text depend on its surroundings: "DEFINITIONS" may become other tokens after a space, at the start
    of a line, or before a colon. This function tokenises each text in many surroundings and returns every result.

    Args:
        tokenizer: a transformers tokenizer; only its `encode` and `decode` are used.
        texts: literal, case-sensitive texts ("[SEP]", "Definitions", "DEFINITIONS"). A short text also matches inside
            longer words that start with the same tokens.

    Returns:
        The distinct token sequences of all texts, for `GlobalContent(sequences=...)`.

    Raises:
        TypeError: `texts` is one string instead of a sequence of strings.
        ValueError: a text is empty, or the tokenizer cannot represent it (it returns its unknown token).
    """
    if isinstance(texts, str):
        raise TypeError(f"`texts` must be a sequence of texts, got the one text {texts!r}; put it in a list")
    found: set[TokenSequence] = set()
    for text in texts:
        wanted = _decode(tokenizer, tokenizer.encode(text, add_special_tokens=False)).strip()
        if not text.strip() or not wanted:
            raise ValueError(f"`texts` must not hold empty texts, got {text!r}")
        ways = {
            _covering(tokenizer, tokenizer.encode(before + text + after, add_special_tokens=False), wanted)
            for before in BEFORE
            for after in AFTER
        } - {()}
        unknown = getattr(tokenizer, "unk_token_id", None)
        if not ways or any(unknown in way for way in ways if text != getattr(tokenizer, "unk_token", None)):
            raise ValueError(f"`texts` must be texts that this tokenizer can represent, got {text!r}")
        found |= ways
    return tuple(sorted(found))


def _covering(tokenizer: Any, ids: list[int], wanted: str) -> TokenSequence:
    """Return the shortest run of tokens that decodes to the wanted text, or () if there is none."""
    if wanted not in _decode(tokenizer, ids):
        return ()
    start, stop = 0, len(ids)
    while wanted in _decode(tokenizer, ids[start : stop - 1]):
        stop -= 1
    while wanted in _decode(tokenizer, ids[start + 1 : stop]):
        start += 1
    return tuple(ids[start:stop])


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
