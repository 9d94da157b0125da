# SPDX-License-Identifier: Apache-2.0
"""Write the keys and values of a chunk of a prompt into an engine's pages, faster than engines do."""

from __future__ import annotations

from torch import Tensor

from dynaxx.integrations.runtime.paged import Pages
from dynaxx.kernels.device import interpreted
from dynaxx.kernels.registry import SELECTION
from dynaxx.kernels.selection.contract import SelectionProblem

FEWEST = 1024  # tokens; for fewer, an engine's kernel, which has a program per token, is as fast


def write_chunk(pages: Pages, k: Tensor, v: Tensor, slots: Tensor) -> bool:
    """Store many tokens in their pages on a GPU. Return False, without doing anything, if the engine must store them.

    Args:
        pages: the cache; fp8 caches are left to the engine.
        k: (>= tokens, kv_heads, head_dim); tokens past the last slot are padding.
        v: (>= tokens, kv_heads, head_dim).
        slots: (tokens,) int64, page * page_size + place in the page; negative values are padding.
    """
    if len(slots) < FEWEST or not pages.read_in_place or not k.dtype == v.dtype == pages.memory.dtype:
        return False
    on_gpu = not SELECTION.reasons("triton", SelectionProblem(k.device)) if k.is_cuda else interpreted()
    if not on_gpu or k.stride(2) != 1 or v.stride(2) != 1:
        return False
    from dynaxx.kernels.decode.triton.write import write_pages  # needs Triton

    write_pages(k, v, slots, *pages.tokens_first())
    return True
