# SPDX-License-Identifier: Apache-2.0
"""`Draw`: draw the parts of a random problem (dtypes, lengths, heads, blocks, rules, memory) and its visible pairs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dynaxx import patterns as p
from dynaxx.layout import BLOCK_SIZES, BlockGrid, BlockLayout
from dynaxx.ops.position_bias import Alibi, PositionBias, T5Bias
from dynaxx.patterns.base import Intersection, Union
from dynaxx.selection import Hybrid, Selector, select_blocks
from dynaxx.testing.cases import make_qkv, random_pattern, random_selector
from dynaxx.testing.patterns import definition


def _among(x: Tensor, dim: int, before: int, after: int, step: int = 1) -> Tensor:
    """Copy x into a slice along `dim` of a larger tensor of NaN."""
    shape = list(x.shape)
    shape[dim] = before + step * shape[dim] + after
    view = x.new_full(shape, torch.nan).narrow(dim, before, step * x.shape[dim])
    view = view[(slice(None),) * dim + (slice(None, None, step),)]
    return view.copy_(x)


def _order(x: Tensor, *dims: int) -> Tensor:
    """Copy x to memory with its dimensions in the order `dims`, outermost first."""
    return x.permute(dims).contiguous().permute([dims.index(dim) for dim in range(x.ndim)])


MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": torch.Tensor.contiguous,
    "heads outside": lambda x: _order(x, 0, 2, 1, 3),
    "batch inside": lambda x: _order(x, 1, 2, 0, 3),
    "head_dim outside": lambda x: _order(x, 3, 0, 1, 2),
    "among other heads": lambda x: _among(x, 2, 1, 2),
    "part of head_dim": lambda x: _among(x, 3, 3, 5),
    "odd rows": lambda x: _among(x, 3, 0, 1),
    "every second token": lambda x: _among(x, 1, 1, 0, step=2),
    "every second number": lambda x: _among(x, 3, 0, 1, step=2),
    "odd address": lambda x: torch.cat([x.new_full((1,), torch.nan), x.flatten()])[1:].view(x.shape),
}


def random_memory(rng: random.Random, x: Tensor, kinds: Sequence[str] = tuple(MEMORY)) -> tuple[Tensor, str]:
    """Copy a (batch, seqlen, heads, head_dim) tensor to a random layout of `MEMORY`; return it and its name."""
    name = rng.choice(kinds)
    return MEMORY[name](x), name


DTYPES = (torch.float32,) * 4 + (torch.bfloat16, torch.float16) * 2 + (torch.float64,)
HEAD_DIMS = (1, 5, 16, 16, 24, 24, 32, 32, 64, 64, 80, 96, 128, 256)
SHORT = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100)
MEDIUM = (127, 128, 129, 200, 257)
LONG = (500, 777, 1024)
RAGGED = (0, 0, 1, 5, 16, 17, 33, 64, 70)
MAX_PAIRS = 100_000  # upper bound for batch * q_heads * N * M; larger problems are cut to one or two heads

Rule = p.Pattern | Selector | Hybrid
Piece = tuple[slice, slice]  # queries and keys of one sequence on the packed axis


@dataclass
class Draw:
    """The random state of one seed. Methods draw parts of a problem, record its traits or define visible pairs."""

    rng: random.Random
    seed: int
    device: torch.device
    dtype: torch.dtype
    block_size: tuple[int, int]
    causal: bool
    heads: tuple[int, int]  # q_heads, kv_heads
    head_dims: tuple[int, int]  # head_dim of q and k, head_dim of v
    traits: dict[str, list[str]] = field(default_factory=dict)  # what the problem covers, for coverage counts
    rules: list[Rule] = field(default_factory=list)  # the patterns and selectors drawn so far
    from_data: float = 0.5  # probability that a rule is a selector or hybrid, which read the data
    softcaps: tuple[float | None, ...] = ()  # softcaps to draw from; () for the default choice
    biased: float = 0.1  # probability of a bias by position
    memories: tuple[str, ...] = tuple(MEMORY)  # memory layouts to draw from

    @classmethod
    def of(cls, seed: int, device: torch.device, **fixed: Any) -> Draw:
        """Draw the basic parts from a seed; `fixed` sets fields instead of drawing them."""
        rng = random.Random(seed)
        dtype, kv_heads, head_dim = rng.choice(DTYPES), rng.choice((1, 2)), rng.choice(HEAD_DIMS)
        heads = (rng.choice((1, 1, 2, 3, 3, 4, 5, 7, 8)) * kv_heads, kv_heads)
        head_dims = (head_dim, head_dim if rng.random() < 0.7 else rng.choice(HEAD_DIMS))
        blocks = (rng.choice(BLOCK_SIZES), rng.choice(BLOCK_SIZES))
        draw = replace(cls(rng, seed, device, dtype, blocks, rng.random() < 0.7, heads, head_dims), **fixed)
        draw.note("dtype", str(draw.dtype).removeprefix("torch."))
        draw.note("causal", "yes" if draw.causal else "no")
        return draw

    def note(self, kind: str, name: str) -> None:
        """Record a trait, once per problem."""
        names = self.traits.setdefault(kind, [])
        if name not in names:
            names.append(name)

    def describe(self) -> str:
        """Return the rules and traits of the drawn case in one line."""
        rules = list(dict.fromkeys(map(repr, self.rules)))
        traits = ", ".join(
            f"{kind} {' '.join(self.traits[kind])}" for kind in ("call", "layout") if kind in self.traits
        )
        return f"{traits}; {' / '.join(rules)}; causal={self.causal}"

    # ---- rules -----------------------------------------------------------------------------------------------------

    @property
    def blocks(self) -> dict[str, Any]:
        """Keyword arguments that every rule takes."""
        return {"causal": self.causal, "block_size": self.block_size}

    def pattern(self, seqlen_k: int, without: type[p.Pattern] | None = None) -> p.Pattern:
        """Draw a pattern for `seqlen_k` keys, or for any number of keys if `without` is `Documents`."""
        rule = random_pattern(self.rng, max(1, seqlen_k))
        while (not seqlen_k or without is not None) and any(isinstance(leaf, p.Documents) for leaf in leaves(rule)):
            rule = random_pattern(self.rng, 1)
        for leaf in leaves(rule):
            self.note("pattern", type(leaf).__name__)
        self.rules.append(rule)
        return rule

    def rule(self, seqlen_k: int, from_data: bool | None = None, without: type[p.Pattern] | None = None) -> Rule:
        """Draw a pattern, a selector, or a hybrid of both."""
        if not (self.rng.random() < self.from_data if from_data is None else from_data):
            return self.pattern(seqlen_k, without)
        selector = random_selector(self.rng)
        self.note("selector", type(selector).__name__)
        self.note("scorer", type(selector.scorer).__name__)
        if self.rng.random() < 0.3:
            self.rules.append(selector)
            return selector
        self.note("selector", "Hybrid")
        self.rules[-1:] = [Hybrid(self.pattern(seqlen_k, without), selector)]
        return self.rules[-1]

    # ---- sizes and tensors -----------------------------------------------------------------------------------------

    def lengths(self) -> tuple[int, int, int]:
        """Draw the batch size, N and M."""
        (sizes,) = self.rng.choices((SHORT, MEDIUM, LONG, (0,)), (80, 15, 2, 3))
        seqlen_q = seqlen_k = self.rng.choice(sizes)
        if self.rng.random() < 0.35:
            seqlen_q = self.rng.choice(SHORT + MEDIUM)
        self._note_lengths([seqlen_q], [seqlen_k])
        batch = self.rng.choice((1, 1, 2, 3))
        if self._cut_heads(batch * seqlen_q * seqlen_k):
            batch = 1
        return batch, seqlen_q, seqlen_k

    def ragged(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Draw cumulative lengths, from 0, for the queries and the keys of several sequences."""
        seqlens_q = [self.rng.choice(RAGGED) for _ in range(self.rng.randint(1, 6))]
        if self.rng.random() < 0.03:
            seqlens_q[0] = self.rng.choice(LONG)
        seqlens_k = [n if self.rng.random() < 0.6 else self.rng.choice(RAGGED) for n in seqlens_q]
        self._note_lengths(seqlens_q, seqlens_k)
        self._cut_heads(sum(seqlens_q) * sum(seqlens_k))
        return tuple(cumulative(seqlens_q)), tuple(cumulative(seqlens_k))

    def _cut_heads(self, pairs: int) -> bool:
        """Reduce the heads if a problem with this many pairs per head is too large; return whether it was."""
        if self.heads[0] * pairs <= MAX_PAIRS:
            return False
        self.heads = (2, 1) if 2 * pairs <= MAX_PAIRS else (1, 1)
        return True

    def _note_lengths(self, seqlens_q: list[int], seqlens_k: list[int]) -> None:
        pairs = list(zip(seqlens_q, seqlens_k, strict=True))
        for name, found in (
            ("several lengths", len(set(pairs)) > 1),
            ("no queries or no keys", any(0 in pair for pair in pairs)),
            ("fewer queries than keys", any(q < k for q, k in pairs)),
            ("more queries than keys", any(q > k for q, k in pairs)),
            ("all lengths equal", len(set(seqlens_q + seqlens_k)) == 1),
        ):
            if found:
                self.note("lengths", name)

    def tensors(self, batch: int, seqlen_q: int, seqlen_k: int) -> dict[str, Tensor]:
        """Draw q, k and v, each in a memory layout of its own."""
        drawn = make_qkv(batch, seqlen_q, seqlen_k, *self.heads, *self.head_dims,
                         dtype=self.dtype, device=self.device, seed=self.seed)  # fmt: skip
        inputs = {}
        for name, x in zip("qkv", drawn, strict=True):
            inputs[name], memory = random_memory(self.rng, x, self.memories)
            self.note("memory", memory)
        return inputs

    def scale(self) -> float | None:
        """Draw a softmax scale, usually the default."""
        return self.rng.choice((None,) * 7 + (0.3, -0.5, 0.0))

    def score_options(self, inputs: dict[str, Tensor]) -> dict[str, Any]:
        """Draw scale and softcap, and sometimes sinks, which are added to `inputs`."""
        softcap = self.rng.choice(self.softcaps or (None,) * 9 + (self.rng.choice((0.5, 3.0, 30.0)),))
        self.note("scores", "plain" if softcap is None else "softcap")
        if inputs and self.rng.random() < 0.1:
            inputs["sinks"] = torch.randn(
                self.heads[0], generator=self.generator, dtype=torch.float32, device="cpu"
            ).to(inputs["q"])
            self.note("scores", "sinks")
        return {"scale": self.scale(), "softcap": softcap}

    def bias(self, batch: int) -> PositionBias | None:
        """Draw a bias by position, usually none."""
        if self.rng.random() >= self.biased:
            return None
        self.note("scores", "bias")
        draw = partial(torch.rand, generator=self.generator, dtype=torch.float32, device="cpu")
        heads = self.heads[0]
        if self.rng.random() < 0.5:
            return Alibi(draw(self.rng.choice(((heads,), (batch, heads)))).to(self.device))
        return T5Bias(draw(32, heads).to(self.device), self.rng.random() < 0.5, self.rng.choice((20, 128)))

    @property
    def generator(self) -> torch.Generator:
        """Return the generator on the device of the case."""
        return torch.Generator().manual_seed(self.rng.getrandbits(32))

    def dense_mask(self, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> Tensor:
        """Draw an unstructured mask, shared or not."""
        shape = (self.rng.choice((1, batch)), self.rng.choice((1, heads)), seqlen_q, seqlen_k)
        share = self.rng.choice((0.0, 0.02, 0.5, 0.98, 1.0))
        return (torch.rand(shape, generator=self.generator, dtype=torch.float32, device="cpu") < share).to(self.device)

    def block_indices(self, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> tuple[Tensor, Tensor]:
        """Draw block indices in random order with empty slots, and return them with the pairs that they show."""
        grid = BlockGrid(seqlen_q, seqlen_k, self.block_size, self.causal)
        shape = (self.rng.choice((1, batch)), self.rng.choice((1, heads)), grid.q_blocks)
        order = torch.rand(*shape, grid.kv_blocks, generator=self.generator, dtype=torch.float32, device="cpu").argsort(
            -1
        )
        kept = torch.rand(order.shape, generator=self.generator, dtype=torch.float32, device="cpu") < self.rng.choice(
            (0.0, 0.3, 1.0)
        )
        indices = order.where(kept, -1)
        table = torch.zeros(*shape, grid.kv_blocks + 1, dtype=torch.bool, device="cpu").scatter_(
            -1, indices % (grid.kv_blocks + 1), True
        )
        shown = table[..., :-1].repeat_interleave(self.block_size[0], -2).repeat_interleave(self.block_size[1], -1)
        visible = shown[..., :seqlen_q, :seqlen_k] & self._definition(p.Full(), seqlen_q, seqlen_k).cpu()
        return indices.to(self.device), visible.to(self.device)

    # ---- visible pairs ---------------------------------------------------------------------------------------------

    def visible(self, rule: Rule, q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
        """Return a pattern's visible pairs or a selector's checked result, (batch | 1, heads | 1, N, M) bool."""
        shape = (q.shape[1], k.shape[1])
        if isinstance(rule, p.Pattern):
            return self._definition(rule, *shape)[None, None]
        chosen = select_blocks(q, k, rule, **self.blocks, scale=scale).validate().to_dense()
        assert not (chosen & ~self._definition(p.Full(), *shape)).any(), f"{rule} shows keys after the query"
        if isinstance(rule, Hybrid):
            assert (chosen | ~self._definition(rule.pattern, *shape)).all(), f"{rule} hides a pair of its pattern"
        return chosen

    def block_diagonal(
        self, rules: Sequence[Rule], pieces: Sequence[Piece], q: Tensor, k: Tensor, scale: float | None = None
    ) -> Tensor:
        """Return (1, heads | 1, N, M) bool: each sequence sees its rule's pairs, and no pairs span two sequences."""
        visible = torch.zeros(1, q.shape[2], q.shape[1], k.shape[1], dtype=torch.bool, device=self.device)
        for rule, (rows, cols) in zip(rules, pieces, strict=True):
            visible[:, :, rows, cols] = self.visible(rule, q[:, rows], k[:, cols], scale)
        return visible

    def check(self, layout: BlockLayout, visible: Tensor) -> None:
        """Check that a layout shows exactly the pairs of `visible`."""
        shown = layout.validate().to_dense()
        assert not (shown ^ visible).any(), f"a layout shows other pairs than its rule: {self.describe()}"

    def _definition(self, rule: p.Pattern, seqlen_q: int, seqlen_k: int) -> Tensor:
        grid = BlockGrid(seqlen_q, seqlen_k, self.block_size, self.causal)
        return definition(rule, grid).to(self.device)


def leaves(rule: p.Pattern) -> list[p.Pattern]:
    """Return the patterns that a combined pattern consists of."""
    if not isinstance(rule, Union | Intersection):
        return [rule]
    return [leaf for part in rule.parts for leaf in leaves(part)]


def cumulative(lengths: Sequence[int]) -> list[int]:
    """Return cumulative sums (0, ..., total)."""
    return [sum(lengths[:s]) for s in range(len(lengths) + 1)]
