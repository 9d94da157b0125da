# SPDX-License-Identifier: Apache-2.0
"""A step of transformers' continuous batching: the requests of its tokens, and the positions of their keys.

The cache is a `PagedAttentionCache`. It has an allocator per kind of layer, which knows the blocks of every request.
`read_index` and `write_index` of a step give the row of each token in a layer's keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dynaxx.integrations.transformers.masks.runs import MaskRun


@dataclass(slots=True)
class CachedRequest:
    """A request in the cache, as known from previous steps."""

    blocks: list[int]  # its blocks of the cache, in order
    seqlen: int = 0  # number of its keys
    generates: bool = False  # whether its prompt is complete
    summarized: dict[int, int] = field(default_factory=dict)  # by layer, number of first keys that summaries cover

    def advance(self, row: MaskRun, blocks: list[int], page_size: int, *, generates: bool) -> bool:
        """Record a step of the request.

        Args:
            row: the request's part of the step.
            blocks: the blocks that hold its keys now. If a block changed, its keys may have changed.
            page_size: tokens per block.
            generates: whether the step generates a token.

        Returns:
            Whether the step decodes: it adds a single token to known keys, for a request that generates.
        """
        past = row.seqlen_k - row.seqlen_q
        same = len(self.blocks)
        if blocks[:same] != self.blocks:
            same = next((i for i, (a, b) in enumerate(zip(blocks, self.blocks, strict=False)) if a != b), len(blocks))
        kept = min(past, self.seqlen, same * page_size)
        self.summarized = {layer: min(keys, kept) for layer, keys in self.summarized.items()}
        decodes = self.generates and row.seqlen_q == 1 and past == self.seqlen
        self.blocks, self.seqlen, self.generates = blocks, row.seqlen_k, generates
        return decodes


@dataclass(frozen=True, eq=False, slots=True)
class BatchRow:
    """One request of a step."""

    run: MaskRun  # its queries, and its keys in `read_index`
    request: CachedRequest
    decodes: bool


class CachedRequests:
    """The requests of an allocator."""

    def __init__(self) -> None:
        self._by_id: dict[str, CachedRequest] = {}

    def forget_summaries(self) -> None:
        """Mark all summaries as invalid."""
        for request in self._by_id.values():
            request.summarized.clear()

    def rows(self, allocator: Any, arguments: dict[str, Any]) -> list[BatchRow]:
        """Return the requests of a step, in order. Call it once per step.

        A step does not name its requests, but the block of a request's last token belongs to that request only.

        Args:
            allocator: the allocator.
            arguments: the arguments of an attention call.
        """
        q, k = arguments["cu_seq_lens_q"].tolist(), arguments["cu_seq_lens_k"][allocator.layer_type].tolist()
        bounds = zip(q[:-1], q[1:], k[:-1], k[1:], strict=True)
        runs = [MaskRun(*each, True) for each in bounds if each[0] < each[1]]
        last = torch.tensor([run.q_stop - 1 for run in runs], dtype=torch.int64, device="cpu")
        written = arguments["write_index"][allocator.index]
        last_blocks = (written[last.to(written.device)] // allocator.block_physical_stride).tolist()
        sampled = set(arguments["logits_indices"].tolist())
        known, page_size = allocator.block_table, allocator.tokens_per_page
        owners = {block: name for name, blocks in known.items() for block in blocks[-2:]}
        self._by_id = {name: request for name, request in self._by_id.items() if name in known}
        rows = []
        for run, last_block in zip(runs, last_blocks, strict=True):
            name = owners.get(last_block)
            request = CachedRequest([]) if name is None else self._by_id.setdefault(name, CachedRequest([]))
            blocks = [] if name is None else known[name][: -(-run.seqlen_k // page_size)]
            decodes = request.advance(run, list(blocks), page_size, generates=run.q_stop - 1 in sampled)
            rows.append(BatchRow(run, request, decodes))
        return rows


class BatchStep:
    """A step, for the layers of one allocator.

    Attributes:
        rows: its requests, in order.
        read_index: (keys,) int64 row of each key; empty if no request has cached keys.
        mask: (1, 1, queries, keys) of transformers, 0 where a query sees a key.
    """

    def __init__(self, rows: Sequence[BatchRow], read_index: Tensor, mask: Tensor) -> None:
        self.rows = tuple(rows)
        self.read_index = read_index
        self.mask = mask
        self._visible: Tensor | None = None
        self._tables: dict[int, Tensor] = {}
        self._without: dict[tuple[int, ...], PartOfStep] = {}

    @property
    def visible(self) -> Tensor:
        """`mask` as bool."""
        if self._visible is None:
            self._visible = self.mask == 0
        return self._visible

    @property
    def runs(self) -> list[MaskRun]:
        """Return the runs of all queries. Padding sees nothing."""
        runs, seqlen_q = [row.run for row in self.rows], self.mask.shape[2]
        q_stop, k_stop = (runs[-1].q_stop, runs[-1].k_stop) if runs else (0, 0)
        return runs + ([MaskRun(q_stop, seqlen_q, k_stop, k_stop, False)] if q_stop < seqlen_q else [])

    def page_table(self, rows: Sequence[BatchRow], page_size: int) -> Tensor:
        """Return (rows, pages) int32, the page table of some decoding rows, padded with -1.

        Args:
            rows: the requests.
            page_size: tokens per page, a divisor of the cache's block size.
        """
        every = [row for row in self.rows if row.decodes]
        if page_size not in self._tables:
            starts = torch.tensor([row.run.k_start for row in every], dtype=torch.int64, device="cpu")
            counts = torch.tensor([-(-row.run.seqlen_k // page_size) for row in every], dtype=torch.int64, device="cpu")
            page = torch.arange(int(counts.max()), device="cpu")
            there = page < counts[:, None]
            at = torch.where(there, starts[:, None] + page * page_size, 0).to(self.read_index.device)
            table = torch.where(there.to(at.device), self.read_index[at] // page_size, -1)
            self._tables[page_size] = table.to(torch.int32)
        table = self._tables[page_size]
        if len(rows) == len(every):
            return table
        places = {row.run.q_start: place for place, row in enumerate(every)}
        return table[
            torch.tensor([places[row.run.q_start] for row in rows], dtype=torch.int64, device="cpu").to(table.device)
        ]

    def without(self, rows: Sequence[BatchRow]) -> PartOfStep:
        """Return the requests other than `rows`."""
        left_out = {row.run.q_start for row in rows}
        key = tuple(sorted(left_out))
        if key not in self._without:
            self._without[key] = PartOfStep.of(self, [row for row in self.rows if row.run.q_start not in left_out])
        return self._without[key]


@dataclass(frozen=True, eq=False, slots=True)
class PartOfStep:
    """Some requests of a step, as a smaller step."""

    rows: tuple[BatchRow, ...]
    runs: list[MaskRun]  # within the part
    queries: Tensor  # (n,) int64 indices of its queries in the step
    read_index: Tensor  # (m,) int64 rows of its keys in the cache
    visible: Tensor  # (1, 1, n, m) bool

    @classmethod
    def of(cls, step: BatchStep, rows: Sequence[BatchRow]) -> PartOfStep:
        """Return the part of a step with these requests."""
        runs, q_stop, k_stop = [], 0, 0
        for row in rows:
            runs.append(MaskRun(q_stop, q_stop + row.run.seqlen_q, k_stop, k_stop + row.run.seqlen_k, True))
            q_stop, k_stop = q_stop + row.run.seqlen_q, k_stop + row.run.seqlen_k
        device, nothing = step.mask.device, torch.arange(0, device="cpu")
        queries = torch.cat(
            [nothing, *(torch.arange(row.run.q_start, row.run.q_stop, device="cpu") for row in rows)]
        ).to(device)
        keys = torch.cat([nothing, *(torch.arange(row.run.k_start, row.run.k_stop, device="cpu") for row in rows)]).to(
            device
        )
        visible = step.mask.index_select(2, queries).index_select(3, keys) == 0
        return cls(tuple(rows), runs, queries, step.read_index[keys], visible)
