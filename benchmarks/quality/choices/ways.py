# SPDX-License-Identifier: Apache-2.0
"""Ways to choose blocks: scores of blocks, and the blocks that a head keeps by them.

H / Hk q and kv heads, N tokens, D head_dim, R / C rows and columns of blocks.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

LAST = 64  # queries at the end that see everything
GRIDS = {
    "share": (0.0, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0),
    "top_p": (0.0, 0.5, 0.65, 0.75, 0.83, 0.89, 0.93, 0.96, 0.98, 0.993, 1.0),
    "bounded": (0.0, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0),
    "even": (0.0, 0.06, 0.12, 0.25, 0.5, 0.8, 1.3, 2.2, 4.0, 10.0, math.inf),  # 1 / share of an even spread
}


@dataclass(frozen=True)
class Choice:
    """A way to choose blocks.

    Attributes:
        q_block, kv_block: tokens per block.
        scorer: "mass" for true attention, "mean N" for mean queries of N tokens, "spread N" with the variance of their
            logits, "bound X" for bounds of keys at X times their distance from the mean, "middle X" from the middle of
            the range, "moments X" for mean and X times the variance of keys (0.5 for normal logits), "root X" for mean
            and X deviations of the logit, "axis" for mean and widest direction of keys, "rest" for the key farthest
            from the mean and the mean of the others, "tokens N" for N numbers per key, "anti N" for anti-diagonals of
            tiles of N tokens, "probe N" for vertical and slash lines of the last N queries, several joined by " + "
            for the mean of their masses.
        rule: "share" keeps a share of the visible blocks of every row, "top_p" blocks up to a share of the mass, "even"
            blocks with a multiple of the mass of an even spread, "bounded" blocks up to `mass`, but at least half
            and at most twice a share.
        mass: the mass of "bounded".
        local: tokens before each q block that are always visible.
        sharpness: factor on the scores.
        group: whether the q heads of a kv head choose together, with one budget, by the mean of their masses.
        logits: whether a group chooses by the mean of the logarithms of its masses, as decode kernels do.
        values: whether a block's mass counts by the length of its mean value.
        last: queries at the end that see everything.
        decode: whether only queries of the second half choose, and all others see everything.
        omitted: what stands in for omitted blocks in the same softmax: "" for nothing, "means" for the mean key and
            value of each, "query" for what the row's mean query reads in them, with its logits, "query share" with its
            share of the mass, "row" for what the row's middle query reads in them, with its share.
        dense_layers: layers that see everything; negative ones count from the last.
    """

    q_block: int = 32
    kv_block: int = 32
    scorer: str = "mean 32"
    rule: str = "share"
    mass: float = 0.9
    local: int = 96
    sharpness: float = 0.75
    group: bool = False
    logits: bool = False
    values: bool = False
    last: int = LAST
    decode: bool = False
    omitted: str = ""
    dense_layers: tuple[int, ...] = ()


MASS, MEAN = Choice(scorer="mass"), Choice()
TILE = {"q_block": 16, "kv_block": 16, "local": 112}  # a smaller tile with as many local tokens


@lru_cache(maxsize=32)
def grid_of(choice, tokens, device):
    """Return (visible, forced) (R, C) bool and (R,) the number of visible blocks."""
    rows = torch.arange(-(-tokens // choice.q_block), device=device)
    cols = torch.arange(-(-tokens // choice.kv_block), device=device)
    first, last = rows * choice.q_block, (rows * choice.q_block + choice.q_block).clamp(max=tokens) - 1
    visible = cols * choice.kv_block <= last[:, None]
    forced = (cols + 1) * choice.kv_block > first[:, None] - choice.local
    forced |= (cols * choice.kv_block < 32) | (last[:, None] >= tokens - choice.last)
    if choice.decode:
        forced |= (first < tokens // 2)[:, None]
    return visible, forced & visible, visible.sum(1)


def block_mass(choice, p):
    """Return the mean share of every block's mass over the queries of its row, (H, R, C)."""
    heads, tokens, _ = p.shape
    return p.view(heads, tokens // choice.q_block, choice.q_block, -1, choice.kv_block).sum((2, 4)) / choice.q_block


def estimated(choice, q, k, scale, gate=None):
    """Return the mass of every block as a scorer estimates it, (H, R, C), of sum 1 per row.

    Args:
        choice: the way to choose.
        q: (H, N, D).
        k: (Hk, N, D).
        scale: the softmax scale.
        gate: (H, D, D) matrices that mean queries are multiplied by (`gates.py`).
    """
    found = [_ESTIMATES[name.split()[0]](choice, name, q, k, scale, gate) for name in choice.scorer.split(" + ")]
    return torch.stack(found).mean(0) if len(found) > 1 else found[0]


def mean_queries(choice, scorer, q, scale):
    """Return tiles (H, tiles, tokens, D) of queries, and the mean of each times the scale and the sharpness."""
    tiles = q.view(q.shape[0], -1, int(scorer.split()[1]), q.shape[2])
    return tiles, tiles.mean(2) * (scale * choice.sharpness)


def _of_mean_queries(choice, scorer, q, k, scale, gate):
    heads, tokens, dim = q.shape
    tiles, queries = mean_queries(choice, scorer, q, scale)
    if gate is not None:
        queries = queries @ gate
    logits = torch.matmul(queries.view(k.shape[0], -1, dim), k.transpose(1, 2)).view(heads, -1, tokens)
    if scorer.startswith("spread"):  # the mean of an exponential of normal logits; dimensions count as independent
        spread = tiles.var(2) * (scale * choice.sharpness) ** 2 / 2
        logits += torch.matmul(spread.view(k.shape[0], -1, dim), k.square().transpose(1, 2)).view_as(logits)
    ends = (torch.arange(queries.shape[1], device=q.device) + 1) * tiles.shape[2]
    logits.masked_fill_(torch.arange(tokens, device=q.device) >= ends[:, None], -torch.inf)
    mass = torch.softmax(logits, -1).view(heads, queries.shape[1], -1, choice.kv_block).sum(-1)
    return mass.view(heads, tokens // choice.q_block, -1, mass.shape[-1]).mean(2)


def _of_bounds(choice, scorer, q, k, scale, gate):
    heads, tokens, dim = q.shape
    visible = grid_of(choice, tokens, q.device)[0]
    queries = q.view(heads, tokens // choice.q_block, choice.q_block, dim).mean(2) * (scale * choice.sharpness)
    blocks = k.view(k.shape[0], -1, choice.kv_block, dim)
    largest, smallest, mean = blocks.amax(2), blocks.amin(2), blocks.mean(2)
    if scorer.startswith("middle"):
        mean = (largest + smallest) / 2
    part = float(scorer.partition(" ")[2] or 1.0)
    largest, smallest = mean + part * (largest - mean), mean + part * (smallest - mean)
    grouped = queries.view(k.shape[0], -1, dim)
    logits = grouped.clamp(min=0) @ largest.transpose(1, 2) + grouped.clamp(max=0) @ smallest.transpose(1, 2)
    return logits.view(heads, -1, blocks.shape[1]).masked_fill(~visible, -torch.inf).softmax(-1)


def _of_moments(choice, scorer, q, k, scale, gate):
    heads, tokens, dim = q.shape
    visible = grid_of(choice, tokens, q.device)[0]
    queries = q.view(heads, tokens // choice.q_block, choice.q_block, dim).mean(2) * (scale * choice.sharpness)
    blocks, grouped = k.view(k.shape[0], -1, choice.kv_block, dim), queries.view(k.shape[0], -1, dim)
    of_mean, part = grouped @ blocks.mean(2).transpose(1, 2), float(scorer.partition(" ")[2] or 0.5)
    if scorer.startswith(("moments", "root")):
        spread = grouped.square() @ blocks.var(2, correction=0).transpose(1, 2)
        logits = of_mean + part * (spread.sqrt() if scorer.startswith("root") else spread)
    elif scorer == "axis":
        logits = of_mean + log_cosh(grouped @ widest(blocks).transpose(1, 2))
    else:
        away = (blocks - blocks.mean(2, keepdim=True)).square().sum(-1).argmax(2)[..., None, None]
        farthest, count = blocks.gather(2, away.expand(-1, -1, 1, dim))[:, :, 0], choice.kv_block
        others = (blocks.sum(2) - farthest) / (count - 1)
        logits = torch.logaddexp(
            grouped @ farthest.transpose(1, 2) - math.log(count),
            grouped @ others.transpose(1, 2) + math.log((count - 1) / count),
        )
    return logits.view(heads, -1, blocks.shape[1]).masked_fill(~visible, -torch.inf).softmax(-1)


def widest(blocks, steps=3):
    """Return the direction in which the keys of each block (Hk, C, tokens, D) spread most, times their deviation."""
    away = blocks - blocks.mean(2, keepdim=True)
    first = away.square().sum(-1).argmax(2)[..., None, None]
    axis = away.gather(2, first.expand(-1, -1, 1, blocks.shape[3]))[:, :, 0]
    for _ in range(steps):
        axis = torch.nn.functional.normalize(axis, dim=-1)
        axis = ((away @ axis[..., None]) * away).mean(2)
    axis = torch.nn.functional.normalize(axis, dim=-1)
    return axis * (away @ axis[..., None]).square().mean(2).sqrt()


def log_cosh(x):
    return x.abs() + torch.log1p((-2 * x.abs()).exp()) - math.log(2)


def _of_tokens(choice, scorer, q, k, scale, gate):
    heads, tokens, dim = q.shape
    visible, size = grid_of(choice, tokens, q.device)[0], int(scorer.split()[1])
    grouped, found = q.view(k.shape[0], -1, dim) * scale, []
    for queries, keys in zip(grouped, k, strict=True):  # the directions in which products of queries and keys are large
        root = torch.linalg.cholesky(covariance(queries))
        axes = torch.linalg.eigh(root.T @ covariance(keys) @ root).eigenvectors[:, -size:]
        few = torch.linalg.solve_triangular(root, queries.T, upper=False).T @ axes
        found.append((few @ (keys @ root @ axes).T).unflatten(-1, (-1, choice.kv_block)).logsumexp(-1))
    logits = torch.stack(found).view(heads, tokens, -1)
    return logits.masked_fill(~visible, -torch.inf).softmax(-1)


def covariance(rows):
    found = rows.T @ rows / rows.shape[0]
    return found + 1e-5 * found.diagonal().mean() * torch.eye(rows.shape[1], device=rows.device)


def _of_anti_diagonals(choice, scorer, q, k, scale, gate):
    heads, tokens, dim = q.shape
    size = min(int(scorer.split()[1]), choice.q_block, choice.kv_block)
    read = q.view(heads, -1, size, dim).flip(2).reshape(k.shape[0], -1, size * dim) * (scale / size)
    logits = torch.matmul(read, k.reshape(k.shape[0], -1, size * dim).transpose(1, 2))
    logits = logits.view(heads, tokens // size, tokens // size)
    row = torch.arange(tokens // size, device=q.device)
    logits.masked_fill_(row > row[:, None], -torch.inf)
    mass = torch.softmax(logits, -1).view(heads, -1, choice.q_block // size, tokens // choice.kv_block,
                                          choice.kv_block // size)  # fmt: skip
    return mass.sum(-1).mean(2)


def _of_lines(choice, scorer, q, k, scale, gate):
    heads, tokens, dim = q.shape
    count = min(int(scorer.split()[1]), tokens)
    logits = torch.matmul(q[:, -count:].reshape(k.shape[0], -1, dim) * scale, k.transpose(1, 2))
    position = torch.arange(tokens, device=q.device)
    distance = position[-count:, None] - position  # (count, N)
    p = logits.view(heads, count, tokens).masked_fill(distance < 0, -torch.inf).softmax(-1)
    vertical = p.sum(1).view(heads, 1, -1, choice.kv_block).sum(-1)  # (H, 1, C)
    by_distance = p.new_zeros(heads, tokens).scatter_add_(
        1, distance.clamp(min=0).flatten().expand(heads, -1), p.flatten(1)
    )
    below = torch.nn.functional.pad(by_distance.cumsum(1), (1, 0))  # (H, N + 1), of distances less than the index
    first = position[:: choice.q_block, None] - position[:: choice.kv_block] - choice.kv_block + 1
    last = first + choice.q_block + choice.kv_block - 2
    slash = below[:, (last + 1).clamp(0, tokens)] - below[:, first.clamp(0, tokens)]  # (H, R, C)
    found = (vertical + slash) * grid_of(choice, tokens, q.device)[0]
    return found / found.sum(-1, keepdim=True).clamp(min=1e-30)


_ESTIMATES = {
    "mean": _of_mean_queries,
    "spread": _of_mean_queries,
    "bound": _of_bounds,
    "middle": _of_bounds,
    "moments": _of_moments,
    "root": _of_moments,
    "axis": _of_moments,
    "rest": _of_moments,
    "tokens": _of_tokens,
    "anti": _of_anti_diagonals,
    "probe": _of_lines,
}


class OwnMasses:
    """The masses of a layer's blocks from the layer's own queries and keys."""

    def read(self, layer, choices, q, k, scale):
        """Take the queries and keys of a layer, in the order of the forward pass."""

    def of(self, layer, choice, q, k, p, scale):
        """Return the mass of every block (H, R, C)."""
        return block_mass(choice, p) if choice.scorer == "mass" else estimated(choice, q, k, scale)


def ranked(choice, mass, k, v):
    """Return V (H, R, C) so that a block of a mass (H, R, C) is kept if V < the head's amount."""
    tokens = k.shape[1]
    visible, forced, count = grid_of(choice, tokens, k.device)
    if choice.values:
        size = v.view(v.shape[0], -1, choice.kv_block, v.shape[2]).mean(2).norm(dim=-1)
        mass = mass * size.repeat_interleave(mass.shape[0] // v.shape[0], 0)[:, None]
        mass = mass / mass.sum(-1, keepdim=True)
    if choice.group:
        heads, group = mass.shape[0], mass.shape[0] // k.shape[0]
        of_heads = mass.view(k.shape[0], group, *mass.shape[1:])
        mass = of_heads.clamp(min=1e-30).log().mean(1).exp() if choice.logits else of_heads.mean(1)
        mass = mass.repeat_interleave(group, 0)
        assert mass.shape[0] == heads
    if choice.rule == "even":
        return 1 / (mass * count[:, None]).clamp(min=1e-9)
    best, where = mass.masked_fill(forced | ~visible, -1.0).sort(dim=-1, descending=True)
    if choice.rule == "share":
        floor = 0 if choice.decode else tokens // choice.kv_block // 2
        before = torch.arange(mass.shape[-1], device=k.device) / count.clamp(min=floor)[:, None]
        before = before.expand_as(best)
    else:
        best = best.clamp(min=0)
        covered = mass.masked_fill(~forced, 0.0).sum(-1, keepdim=True)
        before = covered + best.cumsum(-1) - best
        if choice.rule == "bounded":
            rank = (
                torch.arange(mass.shape[-1], device=k.device) / count.clamp(min=tokens // choice.kv_block // 2)[:, None]
            )
            before = torch.where(before < choice.mass, rank / 2, rank * 2)
    return torch.empty_like(mass).scatter_(-1, where, before.contiguous())


def kept_blocks(choice, values, amounts, tokens):
    """Return (H, R, C) bool: the blocks that each head visits, for amounts (H,); nothing for a negative amount."""
    visible, forced, _ = grid_of(choice, tokens, values.device)
    amounts = amounts.to(values)[:, None, None]
    chosen = (values < amounts) | (amounts >= max(GRIDS[choice.rule])) | forced
    return chosen & visible & (amounts >= 0)


def extra_pairs(choice, density):
    """Return the pairs that stand-ins cost, as a density."""
    if not choice.omitted:
        return 0.0
    return (1 - density) / choice.kv_block if choice.omitted == "means" else 1 / choice.q_block
