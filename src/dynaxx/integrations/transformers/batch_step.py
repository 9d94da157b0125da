# SPDX-License-Identifier: Apache-2.0
"""A step of transformers' continuous batching: whose tokens it holds, and where their keys lie.

The cache is a `PagedAttentionCache`. Each kind of layer has an allocator in it, which knows the blocks of every
request, and a step says by `read_index` and `write_index` in which row of a layer's keys each token is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dynaxx.integrations.transformers.masks import Run


@dataclass(slots=True)
class Tenant:
    """A request in the cache, as far as the steps before showed it."""

    blocks: list[int]  # of the cache, in order
    seqlen: int = 0  # its keys
    generates: bool = False  # whether its prompt is done
    summarized: dict[int, int] = field(default_factory=dict)  # by layer, how many of its first keys summaries cover

    def advance(self, row: Run, blocks: list[int], page_size: int, *, generates: bool) -> bool:
        """Take in a step of it.

        Args:
            blocks: those that hold its keys now. Where they are others than before, so may the keys be.
            page_size: tokens of a block.
            generates: whether the step makes a token.

        Returns:
            Whether the step decodes: a single token after those that are known, by a request that makes tokens.
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
class Row:
    """One request of a step."""

    run: Run  # its queries, and its keys in `read_index`
    tenant: Tenant
    decodes: bool


class Tenants:
    """The requests in an allocator's part of a cache."""

    def __init__(self) -> None:
        self._by_id: dict[str, Tenant] = {}

    def forget_summaries(self) -> None:
        """Nothing is summarized any more."""
        for tenant in self._by_id.values():
            tenant.summarized.clear()

    def rows(self, allocator: Any, arguments: dict[str, Any]) -> list[Row]:
        """Return the requests of a step, in order; called once for each step.

        A step names no request, but the block that its last token goes to belongs to one alone.

        Args:
            arguments: of an attention call, as transformers passes them.
        """
        q, k = arguments["cu_seq_lens_q"].tolist(), arguments["cu_seq_lens_k"][allocator.layer_type].tolist()
        bounds = zip(q[:-1], q[1:], k[:-1], k[1:], strict=True)
        runs = [Run(*each, True) for each in bounds if each[0] < each[1]]
        last = torch.tensor([run.q_stop - 1 for run in runs])
        written = arguments["write_index"][allocator.index]
        last_blocks = (written[last.to(written.device)] // allocator.block_physical_stride).tolist()
        making = set(arguments["logits_indices"].tolist())
        known, page_size = allocator.block_table, allocator.tokens_per_page
        owners = {block: name for name, blocks in known.items() for block in blocks[-2:]}
        self._by_id = {name: tenant for name, tenant in self._by_id.items() if name in known}
        rows = []
        for run, last_block in zip(runs, last_blocks, strict=True):
            name = owners.get(last_block)
            tenant = Tenant([]) if name is None else self._by_id.setdefault(name, Tenant([]))
            blocks = [] if name is None else known[name][: -(-run.seqlen_k // page_size)]
            decodes = tenant.advance(run, list(blocks), page_size, generates=run.q_stop - 1 in making)
            rows.append(Row(run, tenant, decodes))
        return rows


class BatchStep:
    """A step, for the layers of one allocator.

    Attributes:
        rows: its requests, in order.
        read_index: (keys,) int64, where each key is; empty if nobody has keys from before.
        mask: (1, 1, queries, keys) as transformers made it, 0 where a query sees a key.
    """

    def __init__(self, rows: Sequence[Row], read_index: Tensor, mask: Tensor) -> None:
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
    def runs(self) -> list[Run]:
        """Of all queries; what pads the step sees nothing."""
        runs, seqlen_q = [row.run for row in self.rows], self.mask.shape[2]
        q_stop, k_stop = (runs[-1].q_stop, runs[-1].k_stop) if runs else (0, 0)
        return runs + ([Run(q_stop, seqlen_q, k_stop, k_stop, False)] if q_stop < seqlen_q else [])

    def page_table(self, rows: Sequence[Row], page_size: int) -> Tensor:
        """(rows, pages) int32: where the pages of some rows that decode are among those of a layer, -1 behind the last.

        Args:
            page_size: tokens; divides that of the cache's blocks.
        """
        every = [row for row in self.rows if row.decodes]
        if page_size not in self._tables:
            starts = torch.tensor([row.run.k_start for row in every])
            counts = torch.tensor([-(-row.run.seqlen_k // page_size) for row in every])
            page = torch.arange(int(counts.max()))
            there = page < counts[:, None]
            at = torch.where(there, starts[:, None] + page * page_size, 0).to(self.read_index.device)
            table = torch.where(there.to(at.device), self.read_index[at] // page_size, -1)
            self._tables[page_size] = table.to(torch.int32)
        table = self._tables[page_size]
        if len(rows) == len(every):
            return table
        places = {row.run.q_start: place for place, row in enumerate(every)}
        return table[torch.tensor([places[row.run.q_start] for row in rows]).to(table.device)]

    def without(self, rows: Sequence[Row]) -> PartOfStep:
        """Return the requests beside those of `rows`."""
        left_out = {row.run.q_start for row in rows}
        key = tuple(sorted(left_out))
        if key not in self._without:
            self._without[key] = PartOfStep.of(self, [row for row in self.rows if row.run.q_start not in left_out])
        return self._without[key]


@dataclass(frozen=True, eq=False, slots=True)
class PartOfStep:
    """Some requests of a step, as a smaller step."""

    rows: tuple[Row, ...]
    runs: list[Run]  # within the part
    queries: Tensor  # (n,) int64, where its queries are in the step
    read_index: Tensor  # (m,) int64, where its keys are in the cache
    visible: Tensor  # (1, 1, n, m) bool

    @classmethod
    def of(cls, step: BatchStep, rows: Sequence[Row]) -> PartOfStep:
        """Cut it out."""
        runs, q_stop, k_stop = [], 0, 0
        for row in rows:
            runs.append(Run(q_stop, q_stop + row.run.seqlen_q, k_stop, k_stop + row.run.seqlen_k, True))
            q_stop, k_stop = q_stop + row.run.seqlen_q, k_stop + row.run.seqlen_k
        device, nothing = step.mask.device, torch.arange(0)
        queries = torch.cat([nothing, *(torch.arange(row.run.q_start, row.run.q_stop) for row in rows)]).to(device)
        keys = torch.cat([nothing, *(torch.arange(row.run.k_start, row.run.k_stop) for row in rows)]).to(device)
        visible = step.mask.index_select(2, queries).index_select(3, keys) == 0
        return cls(tuple(rows), runs, queries, step.read_index[keys], visible)
