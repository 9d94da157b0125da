# SPDX-License-Identifier: Apache-2.0
"""Attention over a static rule in plain tensor operations: gather blocks of keys, matmul, softmax, matmul.

Exporters support every operation, all shapes derive from the shapes of the inputs, and no branch depends on data, so
one graph serves any length. The result is that of `sparse_attention` over the rule's layout.

B batch, H kv heads, G q heads of each, N / M queries and keys, D head_dim; n tiles of T queries, W keys gathered for
each: S chunks of keys that all tiles see, then C chunks of the band, each of CHUNK keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dynaxx.engines.portable.plans import PortableRules
from dynaxx.engines.portable.rules import GatherRule, inside

CHUNK = 64  # keys that a gather copies in one piece
HIDDEN = -1e30  # far below any score, and finite, so that a row that sees no key has no NaN


class Tiles(NamedTuple):
    """The gather of the keys of each tile of queries."""

    tile: int  # queries of a tile, a multiple of CHUNK
    before: int  # keys of the band before a tile's first query
    band: int  # chunks of the band
    shared: tuple[int, ...]  # positions of the keys that all tiles see, padded to whole chunks with -1

    @classmethod
    def of(cls, rule: GatherRule) -> Tiles:
        """Choose the tile size. Larger tiles copy less, but compute more pairs that the mask hides."""
        lo, hi = rule.reach.band if rule.reach.band is not None else (0, -1)
        lo, hi = min(lo, 0), max(hi, 0)
        tile = 2 * CHUNK if hi - lo >= 4 * CHUNK else CHUNK
        band = -(-(tile + hi - lo) // CHUNK) if rule.reach.band is not None else 0
        keys = [key for first, end in rule.reach.keys for key in range(first, end)]
        return cls(tile, hi, band, (*keys, *[-1] * (-len(keys) % CHUNK)))


def gathered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: GatherRule,
    *,
    scale: float,
    bias: Tensor | None = None,
) -> Tensor:
    """Attend over the visible pairs of a rule.

    Args:
        q: (B, Hq, N, D), aligned to the last keys.
        k: (B, H, M, D), with M >= N.
        v: (B, H, M, D).
        rule: the visible pairs.
        scale: softmax scale.
        bias: the result of `gather_bias` for these lengths; None computes it.

    Returns:
        (B, N, Hq, D). A query that sees no key gets zeros, but for one whose own key is hidden as padding.
    """
    tiles = Tiles.of(rule)
    batch, q_heads, seqlen_q, head_dim = q.shape
    kv_heads, seqlen_k = k.shape[1], k.shape[2]
    group, count = q_heads // kv_heads, (seqlen_q + tiles.tile - 1) // tiles.tile
    padded = F.pad(q * scale, (0, 0, 0, count * tiles.tile - seqlen_q))
    queries = padded.reshape(batch, kv_heads, group, count, tiles.tile, head_dim).transpose(2, 3)
    queries = queries.reshape(batch, kv_heads, count, group * tiles.tile, head_dim)
    chosen = _chunks(tiles, count)
    keys, values = (_gathered(x, chosen, tiles, count, seqlen_q) for x in (k, v))
    if bias is None:
        bias = gather_bias(rule, seqlen_q, seqlen_k, q.dtype)
    width = keys.shape[3]
    scores = torch.matmul(queries, keys.transpose(-1, -2))
    scores = scores.reshape(batch, kv_heads, count, group, tiles.tile, width) + bias
    weights = torch.softmax(scores, dim=-1).reshape(batch, kv_heads, count, group * tiles.tile, width)
    out = torch.matmul(weights, values).reshape(batch, kv_heads, count, group, tiles.tile, v.shape[-1])
    if not rule.sees_itself:
        out = out * (bias.amax(-1, keepdim=True) > HIDDEN / 2)
    out = out.permute(0, 2, 4, 1, 3, 5).reshape(batch, count * tiles.tile, q_heads, v.shape[-1])[:, :seqlen_q]
    if not rule.reach.queries:
        return out
    return _with_whole_rows(out, q, k, v, rule, scale)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, scale: float) -> Tensor:
    """Attend to all keys with a bias that broadcasts to (B, H, G, N, M). Shapes as in `gathered_attention`."""
    batch, q_heads, seqlen_q, head_dim = q.shape
    kv_heads = k.shape[1]
    queries = (q * scale).reshape(batch, kv_heads, q_heads // kv_heads * seqlen_q, head_dim)
    scores = torch.matmul(queries, k.transpose(-1, -2))
    scores = scores.reshape(batch, kv_heads, q_heads // kv_heads, seqlen_q, k.shape[2])
    scores = scores if bias is None else scores + bias
    weights = torch.softmax(scores, dim=-1)
    out = torch.matmul(weights.reshape(batch, kv_heads, -1, k.shape[2]), v)
    return out.reshape(batch, q_heads, seqlen_q, v.shape[-1]).transpose(1, 2)


def dense_bias(
    seqlen_q: Any, seqlen_k: Any, dtype: torch.dtype, *, causal: bool, key_mask: Tensor | None = None
) -> Tensor | None:
    """Return the bias of attention to all keys; None if it hides nothing.

    (B or 1, 1, 1, N or 1, M): the keys after each query if `causal`, queries being the last of the keys, and those that
    a (B, M) bool mask hides.
    """
    bias = None
    if causal:
        rows = torch.arange(seqlen_q, device="cpu") + (seqlen_k - seqlen_q)
        bias = _as_bias(rows[:, None] >= torch.arange(seqlen_k, device="cpu"), dtype)[None, None, None]
    if key_mask is not None:
        hidden = _as_bias(key_mask[:, None, None, None], dtype)
        bias = hidden if bias is None else bias + hidden
    return bias


def _as_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    zero = torch.zeros((), dtype=dtype, device=visible.device)
    return torch.where(visible, zero, torch.full_like(zero, HIDDEN))


def _chunks(tiles: Tiles, count: Any) -> Tensor:
    """Return the chunks that each tile reads, shared ones first, (n, S + C) int64."""
    shared = len(tiles.shared) // CHUNK
    step = tiles.tile // CHUNK
    band = shared + torch.arange(count, device="cpu")[:, None] * step + torch.arange(tiles.band, device="cpu")
    return torch.cat([torch.arange(shared, device="cpu").expand(count, shared), band], dim=1) if shared else band


def _gathered(x: Tensor, chosen: Tensor, tiles: Tiles, count: Any, seqlen_q: Any) -> Tensor:
    """Gather the chunks of each tile, (B, H, M, D) -> (B, H, n, W, D)."""
    batch, heads, seqlen, dim = x.shape
    parts = []
    if tiles.shared:
        at = torch.tensor(tiles.shared, dtype=torch.int64, device="cpu").clamp(min=0)
        parts.append(x.index_select(2, torch.minimum(at, at.new_zeros(()) + (seqlen - 1))))
    if tiles.band:
        before = F.pad(x, (0, 0, tiles.before, 0))[:, :, seqlen - seqlen_q :]
        total = (count - 1) * tiles.tile + tiles.band * CHUNK
        parts.append(F.pad(before, (0, 0, 0, total - seqlen_q - tiles.before)))
    chunks = (torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]).reshape(batch, heads, -1, CHUNK, dim)
    return chunks.index_select(2, chosen.flatten()).reshape(batch, heads, count, -1, dim)


def _positions(tiles: Tiles, count: Any, seqlen_q: Any, seqlen_k: Any) -> tuple[Tensor, Tensor]:
    """Return the positions of queries (n, T) and gathered keys (n, W), -1 for the padding of the shared keys."""
    first = torch.arange(count, device="cpu")[:, None] * tiles.tile + (seqlen_k - seqlen_q)
    band = first - tiles.before + torch.arange(tiles.band * CHUNK, device="cpu")
    shared = torch.tensor(tiles.shared, dtype=torch.int64, device="cpu").expand(count, len(tiles.shared))
    return first + torch.arange(tiles.tile, device="cpu"), torch.cat([shared, band], dim=1) if tiles.shared else band


def gather_bias(
    rule: GatherRule, seqlen_q: Any, seqlen_k: Any, dtype: torch.dtype, key_mask: Tensor | None = None
) -> Tensor:
    """Return the bias of a rule, (B or 1, 1, n, 1, T, W): 0 where a query sees a gathered key, else HIDDEN.

    `key_mask` is (B, M) bool and hides further keys; None hides none.
    """
    tiles = Tiles.of(rule)
    count = (seqlen_q + tiles.tile - 1) // tiles.tile
    q_pos, k_pos = _positions(tiles, count, seqlen_q, seqlen_k)
    there = (k_pos >= 0) & (k_pos < seqlen_k)
    if tiles.shared and tiles.band:  # hide the second copy of a shared key that is also in the band
        band = torch.arange(k_pos.shape[1], device="cpu") >= len(tiles.shared)
        there = there & ~(band & inside(k_pos, rule.reach.keys))
    seen = rule.visible(q_pos[..., None], k_pos[:, None], seqlen_k - seqlen_q) & there[:, None]
    bias = _as_bias(seen, dtype)[None, None, :, None]
    if key_mask is None:
        return bias
    shown = _gathered(key_mask[:, None, :, None].to(dtype), _chunks(tiles, count), tiles, count, seqlen_q)
    return bias + ((1 - shown) * HIDDEN).reshape(key_mask.shape[0], 1, count, 1, 1, -1)


def _with_whole_rows(out: Tensor, q: Tensor, k: Tensor, v: Tensor, rule: GatherRule, scale: float) -> Tensor:
    """Return `out` with the rows of the queries that may see any key computed over all keys."""
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    rows = torch.tensor(
        [row for first, end in rule.reach.queries for row in range(first, end)], dtype=torch.int64, device="cpu"
    )
    own = torch.minimum(rows, rows.new_zeros(()) + (seqlen_q - 1))
    positions = torch.arange(seqlen_k, device="cpu")
    bias = _as_bias(rule.visible((own + (seqlen_k - seqlen_q))[:, None], positions, seqlen_k - seqlen_q), q.dtype)
    whole = dense_attention(q.index_select(2, own), k, v, bias, scale=scale)  # (B, R, Hq, D)
    at = torch.arange(seqlen_q, device="cpu")
    place = (rows[:, None] < at).sum(0).clamp(max=len(rows) - 1)
    return torch.where(inside(at, rule.reach.queries)[:, None, None], whole.index_select(1, place), out)


Known = dict[GatherRule | None, Tensor | None]  # bias by rule; None is the rule of heads that see all keys


def attend_by_rules(
    rules: PortableRules,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Tensor | None,
    *,
    causal: bool,
    known: Known,
) -> Tensor:
    """Attend: q (B, Hq, N, D), k and v (B, H, M, D), mask (B, M) bool or None; to (B, N, Hq, D).

    `known` caches the biases of this forward pass for all layers. Missing ones are computed and added.
    """
    for part in rules.parts:
        if part.rule not in known:
            known[part.rule] = bias_of(part.rule, q.shape[2], k.shape[2], q.dtype, causal=causal, key_mask=mask)
    if len(rules.parts) == 1:
        return _attend(rules.parts[0].rule, q, k, v, scale, known)
    group, outs = q.shape[1] // k.shape[1], []
    order: list[int] = []
    for part in rules.parts:
        heads = torch.tensor(part.heads, dtype=torch.int64, device="cpu")
        of_head = [head // group for head in part.heads]
        used = sorted(set(of_head))
        evenly = all(of_head.count(each) * len(used) == len(of_head) for each in used)
        own = torch.tensor(used if evenly else of_head, dtype=torch.int64, device="cpu")
        keys, values = k.index_select(1, own), v.index_select(1, own)
        outs.append(_attend(part.rule, q.index_select(1, heads), keys, values, scale, known))
        order += part.heads
    back = torch.tensor(sorted(range(len(order)), key=order.__getitem__), dtype=torch.int64, device="cpu")
    return torch.cat(outs, dim=2).index_select(2, back)


def bias_of(
    rule: GatherRule | None,
    seqlen_q: Any,
    seqlen_k: Any,
    dtype: torch.dtype,
    *,
    causal: bool,
    key_mask: Tensor | None = None,
) -> Tensor | None:
    """Return the bias of a rule for `seqlen_q` queries aligned to the last of `seqlen_k` keys; None hides nothing."""
    if rule is None:
        return dense_bias(seqlen_q, seqlen_k, dtype, causal=causal, key_mask=key_mask)
    return gather_bias(rule, seqlen_q, seqlen_k, dtype, key_mask)


def _attend(rule: GatherRule | None, q: Tensor, k: Tensor, v: Tensor, scale: float, known: Known) -> Tensor:
    if rule is not None:
        return gathered_attention(q, k, v, rule, scale=scale, bias=known[rule])
    return dense_attention(q, k, v, known[None], scale=scale)
