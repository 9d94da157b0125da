# SPDX-License-Identifier: Apache-2.0
"""Models that are born sparse: native sparse attention, mixture of blocks, chosen tokens and their indexers.

Each operator has a folder with its kernels; `nn` has the modules of models. The core never imports this wing.
"""

from typing import TYPE_CHECKING

from dynaxx.lazy import load_at_first_use

if TYPE_CHECKING:
    from dynaxx.trained.nsa.attention import compress, compression_windows, native_sparse_attention, select_nsa
    from dynaxx.trained.nsa.compressed_pages import CompressedPages
    from dynaxx.trained.nsa.decode import compress_pages, nsa_decode
    from dynaxx.trained.nsa.spans import NsaSizes, nsa_spans
    from dynaxx.trained.selected import explain_selected, selected_attention
    from dynaxx.trained.tokens.choice import TopKTokens
    from dynaxx.trained.tokens.indexer import IndexLoss, index_loss, index_tokens
    from dynaxx.trained.tokens.steps.attend import selected_decode
    from dynaxx.trained.tokens.steps.choose import index_decode

__all__ = [
    "CompressedPages",
    "IndexLoss",
    "NsaSizes",
    "TopKTokens",
    "compress",
    "compress_pages",
    "compression_windows",
    "explain_selected",
    "index_decode",
    "index_loss",
    "index_tokens",
    "native_sparse_attention",
    "nsa_decode",
    "nsa_spans",
    "select_nsa",
    "selected_attention",
    "selected_decode",
]

__getattr__ = load_at_first_use(
    __name__,
    {
        "nsa.attention": ("compress", "compression_windows", "native_sparse_attention", "select_nsa"),
        "nsa.compressed_pages": ("CompressedPages",),
        "nsa.decode": ("compress_pages", "nsa_decode"),
        "nsa.spans": ("NsaSizes", "nsa_spans"),
        "selected": ("explain_selected", "selected_attention"),
        "tokens.choice": ("TopKTokens",),
        "tokens.indexer": ("IndexLoss", "index_loss", "index_tokens"),
        "tokens.steps.attend": ("selected_decode",),
        "tokens.steps.choose": ("index_decode",),
    },
)
