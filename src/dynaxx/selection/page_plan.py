# SPDX-License-Identifier: Apache-2.0
"""`PagePlan`: the pages that a rule over positions reads at every length, worked out before the first step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.layout.grid import as_integer
from dynaxx.layout.host import on_host
from dynaxx.layout.pages import PAGE_SIZES
from dynaxx.patterns import Pattern

LARGEST_BLOCK = 128  # of layouts
TOKEN_PAGE_SIZES = tuple(size for size in PAGE_SIZES if size >= 16)  # smaller ones hold compressed tokens


@dataclass(frozen=True)
class PagePlan:
    """Causal pages of every step up to a largest length; a step looks its own up, on the device.

    For rules that `PageBudget` has no equal of, and without summaries. A page is read whole if the rule shows any key
    of it to any query in the page of the last token, or to one of the `seqlen_q - 1` tokens before.
    """

    table: Tensor  # (pages, slots) int32: row p is of steps whose last token is in page p; ascending, then -1
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
        """Work a plan out, from the rule's layout: O(visited blocks) on the host.

        Args:
            max_seqlen: keys of the longest sequence.
            page_size: of the cache, 16, 32, 64, 128 or 256.
            seqlen_q: the most query tokens of a step.

        Raises:
            TypeError, ValueError: no rule over positions alone, or sizes out of range.
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
        """Return the step's block_indices for `sparse_decode`, (batch, kv_heads, slots) int32; waits for no device.

        Args:
            seqused_k: (batch,) int32, as the cache's, on the plan's device. Longer ones than the plan has are read as
                its last page; on a CPU they are refused.

        Raises:
            TypeError, ValueError: other lengths than these, or no kv head.
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
