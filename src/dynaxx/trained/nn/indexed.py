# SPDX-License-Identifier: Apache-2.0
"""`IndexedSparseAttention`: each query attends to single tokens that a learned indexer chose."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from dynaxx.arguments import typed
from dynaxx.layout import CuSeqlens
from dynaxx.layout.host import never_traced
from dynaxx.layout.packed import host_lengths
from dynaxx.layout.paging import PagedCache
from dynaxx.ops.checks import looks_at_values
from dynaxx.ops.decode_checks import check_places
from dynaxx.trained.nn.cache import LayerCache
from dynaxx.trained.nn.projection import ProjectedAttention, Rotary, rotate_first_columns
from dynaxx.trained.selected import selected_attention
from dynaxx.trained.tokens.choice import TopKTokens
from dynaxx.trained.tokens.indexer import IndexLoss, Precision, index_loss, index_tokens
from dynaxx.trained.tokens.steps.attend import selected_decode
from dynaxx.trained.tokens.steps.choose import index_decode

FEWEST = 16  # columns of a kv head that are worth taking
WEIGHT = 0.5  # of each head
RIDGE = 0.05  # share of the mean square of hidden states; keeps weights small


class IndexerWeights(Protocol):
    """An `Indexer`, whose weights are set."""

    heads: int
    dim: int
    q_proj: nn.Linear
    k_proj: nn.Linear
    k_norm: nn.LayerNorm
    weight_proj: nn.Linear


@torch.no_grad()
def start_as_attention(
    indexer: IndexerWeights, q_proj: nn.Linear, k_proj: nn.Linear, heads: tuple[int, int, int], x: Tensor
) -> None:
    """Set an indexer's weights to those of some heads of attention.

    The first columns, which turn with positions, are those of kv head 0. Columns behind them are the slowest rotary
    pairs of other kv heads, because they match tokens at any distance. Weights of heads are close to a constant on x.

    Args:
        indexer: the indexer.
        q_proj: attention's projection to queries; its bias is left out.
        k_proj: attention's projection to keys; its bias is left out.
        heads: q heads, kv heads and head_dim.
        x: (..., hidden_size), hidden states as attention gets them, of a few hundred tokens or more.
    """
    q_heads, kv_heads, head_dim = heads
    x = x.detach().reshape(-1, x.shape[-1]).to(indexer.k_proj.weight.device).float()
    if len(x) < 2:
        raise ValueError(f"`x` must have at least 2 tokens, got {len(x)}")
    of_q = q_proj.weight.float().unflatten(0, (q_heads, head_dim))
    of_k = k_proj.weight.float().unflatten(0, (kv_heads, head_dim))
    queries = torch.zeros(indexer.heads, indexer.dim, x.shape[1], device=x.device, dtype=torch.float32)
    keys = indexer.k_proj.weight.float().clone()
    places = _places(indexer.dim, kv_heads, head_dim)
    for kv_head, (start, columns) in enumerate(places):
        keys[start : start + len(columns)] = of_k[kv_head, columns]
    for head in range(indexer.heads):
        kv_head, own = head % len(places), head // len(places)
        start, columns = places[kv_head]
        if own < q_heads // kv_heads:
            queries[head, start : start + len(columns)] = of_q[kv_head * (q_heads // kv_heads) + own, columns]
        else:  # more heads than attention has
            queries[head] = indexer.q_proj.weight.float().unflatten(0, (indexer.heads, indexer.dim))[head]
    products = x.T @ x
    products.diagonal().add_(RIDGE * products.diagonal().mean())
    weights = WEIGHT * torch.linalg.solve(products, x.sum(0))
    indexer.q_proj.weight.copy_(queries.flatten(0, 1))
    indexer.k_proj.weight.copy_(keys)
    indexer.k_norm.weight.copy_((x @ keys.T).std(0))
    indexer.k_norm.bias.zero_()
    indexer.weight_proj.weight.copy_(weights.expand(indexer.heads, -1))


def _places(dim: int, kv_heads: int, head_dim: int) -> list[tuple[int, list[int]]]:
    """Return, for the first kv heads, where their columns begin in an indexer's key, and which columns those are."""
    half, turning = head_dim // 2, min(head_dim, dim) // 2 * 2
    fastest = [*range(turning // 2), *range(half, half + turning // 2)]
    rest = dim - turning
    others = min(kv_heads - 1, rest // FEWEST)
    size = min(half, rest // others // 2) if others else 0
    slowest = [*range(half - size, half), *range(head_dim - size, head_dim)]
    return [(0, fastest), *((turning + 2 * size * i, slowest) for i in range(others))]


class IndexerOutput(NamedTuple):
    """An indexer's queries, keys and weights, for `index_tokens` and `index_loss`."""

    q: Tensor  # (..., seqlen, index_heads, index_dim)
    k: Tensor  # (..., seqlen, index_dim)
    weights: Tensor  # (..., seqlen, index_heads)


@typed
class Indexer(nn.Module):
    """Project hidden states to the queries, the keys and the weights of an indexer (DeepSeek-V3.2).

    The hidden states get no gradient from an indexer: the indexer learns from attention, but not the other way round.

    Args:
        hidden_size: of the hidden states.
        heads: of the queries.
        dim: of queries and keys.
    """

    def __init__(self, hidden_size: int, heads: int = 4, dim: int = 64) -> None:
        super().__init__()
        if hidden_size < 1 or heads < 1 or dim < 1:
            raise ValueError(f"`hidden_size`, `heads` and `dim` must be >= 1, got {hidden_size}, {heads} and {dim}")
        self.heads, self.dim = heads, dim
        self.q_proj = nn.Linear(hidden_size, heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, dim, bias=False)
        self.k_norm = nn.LayerNorm(dim)
        self.weight_proj = nn.Linear(hidden_size, heads, bias=False)

    @typed
    def forward(self, x: Tensor, rotary: Rotary | None = None) -> IndexerOutput:
        """Project (..., seqlen, hidden_size); `rotary` (cos, sin) rotates the first columns, as many as it has.

        Under autocast, q, k and weights have its dtype, so that kernels multiply q and k in it.
        """
        x = x.detach()
        q = self.q_proj(x).unflatten(-1, (self.heads, self.dim))
        k = self.k_norm(self.k_proj(x)).to(q.dtype)
        if rotary is not None:
            q, k = rotate_first_columns(q, rotary), rotate_first_columns(k.unsqueeze(-2), rotary).squeeze(-2)
        return IndexerOutput(q, k, self.weight_proj(x))


@typed
class IndexedSparseAttention(ProjectedAttention):
    """Attention over the tokens that an indexer chose for each query (DeepSeek Sparse Attention, DeepSeek-V3.2).

    Train the module in two stages. With `dense = True` attention is dense, and the indexer learns to predict it. With
    `dense = False` attention sees the tokens that the indexer chose, and both are trained. In training mode
    `index_loss` is the indexer's loss of the last call: add it to the model's loss.

    Args:
        hidden_size, q_heads, kv_heads, **projection: as `ProjectedAttention`.
        choice: the number of tokens to which a query attends; all heads attend to the same tokens.
        index_heads, index_dim: of the indexer.
        precision: of the indexer's scores, "fp32", "bf16", "fp8" or "int8"; see `index_tokens`.
    """

    def __init__(
        self,
        hidden_size: int,
        q_heads: int,
        kv_heads: int,
        *,
        choice: TopKTokens | None = None,
        index_heads: int = 4,
        index_dim: int = 64,
        precision: Precision = "fp32",
        **projection: Any,
    ) -> None:
        super().__init__(hidden_size, q_heads, kv_heads, **projection)
        self.choice = TopKTokens(2048) if choice is None else choice
        self.precision = precision
        self.indexer = Indexer(hidden_size, index_heads, index_dim)
        self.index_loss: IndexLoss | None = None

    @typed
    def forward(
        self,
        x: Tensor,
        rotary: Rotary | None = None,
        *,
        cu_seqlens: CuSeqlens | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Attend like `ProjectedAttention`, without a cache.

        Raises:
            ValueError: as `ProjectedAttention`, and for a cache.
        """
        if cache is not None:
            raise ValueError("`cache` must be None here: call `decode`, or generate with a converted Llama")
        q, k, v = self.projected(x, rotary, cu_seqlens)
        out = self.attend_indexed(self.indexer(x, rotary), q, k, v, cu_seqlens)
        return cast(Tensor, self.o_proj(out.flatten(-2)))

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the loss of the last call from copies and pickles, because it belongs to a graph."""
        return {**super().__getstate__(), "index_loss": None}

    @typed
    def start_indexer(self, x: Tensor) -> None:
        """Set the indexer's weights to those of some attention heads, so that it finds single tokens from the start.

        Use it if attention is trained already. Give the indexer more than head_dim columns, so that it has keys of
        several kv heads.

        Args:
            x: (..., hidden_size), hidden states as `forward` gets them, of a few hundred tokens or more.

        Raises:
            ValueError: less than 2 tokens.
        """
        start_as_attention(self.indexer, self.q_proj, self.k_proj, (self.q_heads, self.kv_heads, self.head_dim), x)

    @typed
    @torch.no_grad()
    def decode(self, x: Tensor, rotary: Rotary | None, cache: PagedCache, index_k: Tensor) -> Tensor:
        """Attend from the newest tokens of each sequence, after writing their keys and values into a cache's pages.

        Nothing is read on the host: `torch.compile(fullgraph=True)` traces a step, and a CUDA graph captures it.

        Args:
            x: (batch, seqlen, hidden_size), the last `seqlen` tokens of each sequence.
            rotary: (cos, sin) of their positions, each (batch, seqlen, head_dim).
            cache: pages of keys and values in the dtype of x, whose `seqused_k` counts these tokens already.
            index_k: (num_pages, page_size, index_dim), the indexer's keys in the same pages.

        Returns:
            A tensor of the shape of x.

        Raises:
            ValueError: a cache without a page table, or one that has no page for a new token; the latter is checked on
                a CPU, and on a GPU with DYNAXX_DEBUG=1.
        """
        if cache.page_table is None:
            raise ValueError("`cache` must have a page table, got a contiguous one")
        q, k, v = self.projected(x, rotary, None)
        indexed = self.indexer(x, rotary)
        position = cache.seqused_k[:, None] - x.shape[1] + torch.arange(x.shape[1], device=x.device)
        if not torch.compiler.is_compiling() and looks_at_values(x.device):
            check_places("page_table", cache.page_table, position, cache.page_size, cache.k, cache.v, index_k)
        page = cache.page_table.gather(1, position // cache.page_size)
        for pages, rows in ((cache.k, k), (cache.v, v), (index_k, indexed.k)):
            pages[page, position % cache.page_size] = rows.to(pages.dtype)
        chosen = index_decode(
            indexed.q, index_k, indexed.weights, self.choice, cache.seqused_k, page_table=cache.page_table,
            precision=self.precision,
        )  # fmt: skip
        out = selected_decode(q, cache, chosen, block_size=self.choice.block_size, scale=self.scale)
        assert isinstance(out, Tensor), "without `return_lse`"
        return cast(Tensor, self.o_proj(out.flatten(-2)))

    @override
    def attend(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: CuSeqlens | None, cache: LayerCache | None
    ) -> Tensor:
        raise NotImplementedError("`forward` calls `attend_indexed`, which also needs the indexer's output")

    @never_traced
    def attend_indexed(
        self, indexed: IndexerOutput, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: CuSeqlens | None
    ) -> Tensor:
        """Attend to everything if `dense`, else to the chosen tokens; in training mode, store the indexer's loss.

        In sequences that are not longer than the number of tokens to choose, the choice would be everything. Dense
        attention computes the same, and is faster.
        """
        if not self.dense and not self._chooses_everything(q, k, cu_seqlens):
            return self.attend_chosen(indexed, q, k, v, cu_seqlens)
        self._learn(indexed, q, k, None, cu_seqlens)
        return self.attend_dense(q, k, v, cu_seqlens)

    def _chooses_everything(self, q: Tensor, k: Tensor, cu_seqlens: CuSeqlens | None) -> bool:
        if q.shape[-3] != k.shape[-3]:  # a step of decoding
            return False
        ends = (0, k.shape[1]) if cu_seqlens is None else host_lengths("cu_seqlens", cu_seqlens)
        return all(end - start <= self.choice.k for start, end in pairwise(ends))

    def attend_chosen(
        self, indexed: IndexerOutput, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: CuSeqlens | None
    ) -> Tensor:
        """Attend to the tokens that the indexer chooses; in training mode, store its loss."""
        chosen = index_tokens(*indexed, self.choice, cu_seqlens_q=cu_seqlens, precision=self.precision)
        self._learn(indexed, q, k, chosen, cu_seqlens)
        out = selected_attention(
            q, k, v, chosen, block_size=self.choice.block_size, cu_seqlens_q=cu_seqlens, scale=self.scale
        )
        assert isinstance(out, Tensor), "without `return_lse`"
        return out

    def _learn(
        self, indexed: IndexerOutput, q: Tensor, k: Tensor, chosen: Tensor | None, cu_seqlens: CuSeqlens | None
    ) -> None:
        self.index_loss = None
        if not self.training or not torch.is_grad_enabled():
            return
        self.index_loss = index_loss(
            *indexed, q, k, block_indices=chosen, block_size=self.choice.block_size, cu_seqlens_q=cu_seqlens,
            scale=self.scale,
        )  # fmt: skip

    @override
    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.choice.k} tokens of {self.choice.block_size}"
