# SPDX-License-Identifier: Apache-2.0
"""`PagePlan`: the pages that a rule over positions reads at every length, computed before the first step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dynaxx.arguments import as_integer, typed
from dynaxx.layout.host import on_host
from dynaxx.layout.paging.pages import PAGE_SIZES
from dynaxx.patterns import Pattern

LARGEST_BLOCK = 128  # largest block size of a layout
TOKEN_PAGE_SIZES = tuple(size for size in PAGE_SIZES if size >= 16)  # smaller ones hold compressed tokens


@dataclass(frozen=True)
class PagePlan:
    """The pages to read at every step up to a largest length. Each step looks its pages up on the device.

    Use it for rules over positions that `PageBudget` cannot express; it needs no summaries. A page is read whole if
    the rule shows any of its keys to any query in the page of the last token, or to one of the `seqlen_q - 1` tokens
    before it.
    """

    table: Tensor  # (pages, slots) int32: row p holds the pages for a last token in page p, ascending, then -1
    page_size: int

    @classmethod
    @typed
    @on_host
    def of(
        cls,
        rule: Pattern,
        max_seqlen: int,
        *,
        page_size: int = 64,
        seqlen_q: int = 1,
        device: torch.device | str = "cpu",
    ) -> PagePlan:
        """Compute a plan from the layout of a rule, in O(visited blocks) on the host.

        Args:
            rule: a pattern.
            max_seqlen: number of keys of the longest sequence.
            page_size: page size of the cache, 16, 32, 64, 128 or 256.
            seqlen_q: largest number of query tokens in a step.
            device: the device of the plan's table.

        Raises:
            TypeError: `rule` is not a pattern, or a size is not an integer.
            ValueError: a size is out of range, or the rule needs the tokens of a request.
        """
        max_seqlen, seqlen_q = as_integer("max_seqlen", max_seqlen), as_integer("seqlen_q", seqlen_q)
        if max_seqlen < 1 or seqlen_q < 1:
            raise ValueError(f"`max_seqlen` and `seqlen_q` must be at least 1, got {max_seqlen} and {seqlen_q}")
        if not seqlen_q <= max_seqlen < 2**31:
            raise ValueError(f"`seqlen_q` must be up to `max_seqlen` < 2^31, got {seqlen_q} and {max_seqlen}")
        if as_integer("page_size", page_size) not in TOKEN_PAGE_SIZES:
            raise ValueError(f"`page_size` must be one of {TOKEN_PAGE_SIZES}, got {page_size}")
        block = min(page_size, LARGEST_BLOCK)
        layout = rule.layout(max_seqlen, block_size=block)
        rows = torch.arange(layout.q_blocks).repeat_interleave(layout.kv_num_blocks.flatten())
        rows, pages = (x * block // page_size for x in (rows, layout.kv_indices[: len(rows)].long()))
        count = -(-max_seqlen // page_size)
        pairs = [rows + back for back in range((seqlen_q + page_size - 2) // page_size + 1)]
        pairs = torch.cat([row * count + pages for row in pairs]).unique()  # ascending
        rows, pages = pairs // count, pairs % count
        own, kept = torch.bincount(rows, minlength=count), rows < count
        table = torch.full((count, int(own[:count].max())), -1, dtype=torch.int32)
        place = torch.arange(len(rows)) - (own.cumsum(0) - own)[rows]
        table[rows[kept], place[kept]] = pages[kept].int()
        return cls(table.to(device), page_size)

    @typed
    def pages(self, seqused_k: Tensor, kv_heads: int) -> Tensor:
        """Return the step's `block_indices` for `sparse_decode`, (batch, kv_heads, slots) int32, without synchronizing.

        Args:
            seqused_k: (batch,) int32 lengths of the cache, on the plan's device. A length beyond the plan raises on a
                CPU; a GPU uses the plan's last row.
            kv_heads: number of kv heads.

        Raises:
            TypeError: `seqused_k` is not a tensor, or `kv_heads` is not an integer.
            ValueError: `seqused_k` has another shape, dtype or device, is too long, or `kv_heads` is below 1.
        """
        if seqused_k.ndim != 1 or seqused_k.dtype != torch.int32 or seqused_k.device != self.table.device:
            raise ValueError(
                f"`seqused_k` must be (batch,) int32 on {self.table.device}, got {seqused_k.dtype} "
                f"{tuple(seqused_k.shape)} on {seqused_k.device}"
            )
        if as_integer("kv_heads", kv_heads) < 1:
            raise ValueError(f"`kv_heads` must be at least 1, got {kv_heads}")
        most = len(self.table) * self.page_size
        if seqused_k.device.type == "cpu" and seqused_k.numel() and int(seqused_k.max()) > most:
            raise ValueError(f"`seqused_k` must be at most the {most} keys of the plan, got {int(seqused_k.max())}")
        last = ((seqused_k.long() - 1) // self.page_size).clamp(0, len(self.table) - 1)
        return self.table[last][:, None].expand(-1, kv_heads, -1).contiguous()
