"""`PagePlan`: the pages that a rule over positions reads at every length, worked out before the first step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dynaxx.layout.host import on_host
from dynaxx.layout.tensors import check_tensors
from dynaxx.patterns import Pattern

LARGEST_BLOCK = 128  # of layouts


@dataclass(frozen=True)
class PagePlan:
    """Causal pages of every step up to a largest length; a step looks its own up, on the device.

    For rules that `PageBudget` has no equal of, and without summaries. A page is read whole if the rule shows any key
    of it to any query in the page of the last token, or to one of the `seqlen_q - 1` tokens before.
    """

    table: Tensor  # (pages, slots) int32: row p is of steps whose last token is in page p; ascending, then -1
    page_size: int

    @classmethod
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
        """
        if not isinstance(rule, Pattern):
            raise TypeError(f"`rule` must be a Pattern, over positions alone, got {type(rule).__name__}")
        if max_seqlen < 1 or seqlen_q < 1:
            raise ValueError(f"`max_seqlen` and `seqlen_q` must be at least 1, got {max_seqlen} and {seqlen_q}")
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

    def pages(self, seqused_k: Tensor, kv_heads: int) -> Tensor:
        """The step's block_indices for `sparse_decode`, (batch, kv_heads, slots) int32; waits for no device.

        Args:
            seqused_k: (batch,) int32, as the cache's, on the plan's device. Longer ones than the plan has are read as
                its last page; on a CPU they are refused.
        """
        check_tensors(1, seqused_k=seqused_k)
        most = len(self.table) * self.page_size
        if seqused_k.device.type == "cpu" and seqused_k.numel() and int(seqused_k.max()) > most:
            raise ValueError(f"`seqused_k` must be at most the {most} keys of the plan, got {int(seqused_k.max())}")
        last = ((seqused_k.long() - 1) // self.page_size).clamp(0, len(self.table) - 1)
        return self.table[last][:, None].expand(-1, kv_heads, -1).contiguous()
