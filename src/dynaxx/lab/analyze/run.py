# SPDX-License-Identifier: Apache-2.0
"""Analyze where a model attends, head by head: distances, lines, and the recall of each rule.

For each head the tool recommends the sparsest rule that keeps a share of the attention mass, with a reason. This is a
starting point and an explanation. `tune` and `validate` measure how much mass the model needs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynaxx.lab.analyze import maps
from dynaxx.lab.analyze.capture import LayerAttention, visit_attention
from dynaxx.lab.analyze.recommendation import BUDGETS, LINES, Candidate, candidates, recommend
from dynaxx.lab.analyze.result import AnalysisResult, HeadAnalysis, MassByDistance, Recommendation, RuleAtBudgets
from dynaxx.lab.progress import Progress, SilentProgress, Task
from dynaxx.lab.texts import check_tokens, ids_of, start_of
from dynaxx.layout import as_block_size
from dynaxx.selection import select_blocks


class Catch(NamedTuple):
    """A rule's recall and density on one head."""

    density: float
    recall: float


def analyze(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    tokens: int = 4096,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    block_size: int = 64,
    seed: int = 0,
    progress: Progress | None = None,
) -> AnalysisResult:
    """Read the attention maps of a sample of text.

    The function runs one dense forward pass and never holds the full map of a head. Up to 4,096 tokens it uses every
    query; beyond, it samples evenly spaced query blocks with 4,096 queries in total.

    Args:
        model: a causal language model of transformers; it is not changed.
        tokenizer: the tokenizer of the model.
        text: a sample of the workload, longer than `tokens`.
        tokens: length of the sample, taken from a place in the text that `seed` chooses.
        layers: layers to analyze, all by default.
        heads: q heads to analyze, all by default.
        block_size: tokens per block of the layouts that are tried: 16, 32, 64 or 128.
        seed: seed for the place of the sample.
        progress: reports each head.

    Raises:
        ValueError: the text is too short, `tokens` exceeds the model's positions, a layer or head does not exist, or
            the model's maps cannot be read; the message says why.
    """
    began = time.monotonic()
    as_block_size(block_size)
    check_tokens(model, tokens, block_size)
    config = model.config.get_text_config()
    chosen_layers = _chosen("layers", layers, config.num_hidden_layers)
    chosen_heads = _chosen("heads", heads, config.num_attention_heads)
    input_ids, start = _sample(tokenizer, text, tokens, seed)
    tried = candidates(tokens, block_size)
    found: list[HeadAnalysis] = []
    total = len(chosen_layers) * len(chosen_heads)
    with (progress or SilentProgress()).task(f"Reading attention maps, {tokens:,} tokens", total) as task:

        def visit(attention: LayerAttention) -> None:
            if attention.layer in chosen_layers:
                found.extend(_analyze_layer(attention, chosen_heads, tried, block_size, task))

        visit_attention(model, input_ids, visit)
    return AnalysisResult(
        model=Path(str(getattr(config, "_name_or_path", "") or type(model).__name__)).name,
        tokens=tokens,
        rows=_rows(tokens, block_size),
        block_size=block_size,
        seed=seed,
        start=start,
        budgets=BUDGETS,
        rules=_rules(tried, found),
        heads=tuple(found),
        seconds=time.monotonic() - began,
    )


def _chosen(name: str, wanted: Sequence[int] | None, count: int) -> tuple[int, ...]:
    if wanted is None:
        return tuple(range(count))
    if not wanted or any(not 0 <= index < count for index in wanted):
        raise ValueError(f"`{name}` must be from 0 to {count - 1}, got {list(wanted)}")
    return tuple(sorted(set(wanted)))


def _sample(tokenizer: Any, text: str, tokens: int, seed: int) -> tuple[Tensor, int]:
    """Return consecutive tokens from a place that `seed` chooses, after the special tokens that the model expects."""
    special, ids = start_of(tokenizer), ids_of(tokenizer, text)
    spare = len(ids) - (tokens - len(special))
    if spare < 0:
        raise ValueError(f"text must have at least {tokens:,} tokens, got {len(ids):,}; give more text or fewer tokens")
    start = random.Random(seed).randint(0, spare)
    return torch.tensor([(special + ids[start:])[:tokens]], dtype=torch.int64, device="cpu"), start


def _rows(tokens: int, block_size: int) -> int:
    blocks = maps.sampled_blocks(tokens, block_size)
    return int(((blocks + 1) * block_size).clamp(max=tokens).sum() - (blocks * block_size).sum())


def _rules(tried: Sequence[Candidate], heads: Sequence[HeadAnalysis]) -> dict[str, RuleAtBudgets]:
    mean = lambda values: sum(values) / max(1, len(values))
    return {
        name: RuleAtBudgets(
            attention=tuple(candidate.attention for candidate in tried if candidate.name == name),
            density=tuple(mean([head.density[name][i] for head in heads]) for i in range(len(BUDGETS))),
            recall=tuple(mean([head.recall[name][i] for head in heads]) for i in range(len(BUDGETS))),
        )
        for name in dict.fromkeys(candidate.name for candidate in tried)
    }


def _analyze_layer(
    attention: LayerAttention, heads: Sequence[int], tried: Sequence[Candidate], block_size: int, task: Task
) -> list[HeadAnalysis]:
    attention = attention.only(heads)
    work = partial(maps.map_statistics, attention, block_size=block_size)
    statistics = []
    for head, each in zip(heads, maps.in_parallel(work, range(len(heads)), attention.q.device), strict=True):
        statistics.append(each)
        task.advance(1, f"layer {attention.layer}, head {head}")
    catch = partial(_catch, attention, statistics)
    caught = list(maps.in_parallel(catch, tried, attention.q.device))  # per candidate, then per head
    return [
        _head(attention, head, statistics[index], tried, [each[index] for each in caught])
        for index, head in enumerate(heads)
    ]


def _catch(attention: LayerAttention, statistics: Sequence[maps.MapStatistics], candidate: Candidate) -> list[Catch]:
    """Measure a rule on each head."""
    rows, size = statistics[0].rows, statistics[0].block_size
    if candidate.rule is None:
        return [_oracle(each, candidate.budget) for each in statistics]
    layout = select_blocks(attention.q[None], attention.k[None], candidate.rule, block_size=size, scale=attention.scale)
    grid = layout.grid()
    visible = grid.visible_blocks()
    density = (layout.kv_num_blocks[0].sum(-1) / visible).expand(len(statistics)).tolist()
    recall = (maps.visible_mass(attention, statistics, layout) / rows).clamp(max=1.0).tolist()
    return [Catch(*each) for each in zip(density, recall, strict=True)]


def _oracle(statistics: maps.MapStatistics, budget: float) -> Catch:
    """Choose the blocks with most mass over all queries. No other choice of as many whole blocks has more."""
    looked_at = statistics.block_mass.sum(-1) > 0
    visible = int((torch.arange(1, len(looked_at) + 1, device=looked_at.device)[looked_at]).sum())
    count = max(1, round(budget * visible))
    best = statistics.block_mass.flatten().topk(min(count, statistics.block_mass.numel())).values
    return Catch(count / visible, min(1.0, float(best.sum()) / statistics.rows))


def _head(
    attention: LayerAttention,
    head: int,
    statistics: maps.MapStatistics,
    tried: Sequence[Candidate],
    caught: Sequence[Catch],
) -> HeadAnalysis:
    rows, seqlen = statistics.rows, len(statistics.by_distance)
    far = statistics.by_slash[maps.LOCAL_TOKENS :]
    cumulative = (statistics.by_distance / rows).cumsum(0)
    recall: dict[str, tuple[float, ...]] = {}
    density: dict[str, tuple[float, ...]] = {}
    for candidate, catch in zip(tried, caught, strict=True):
        recall[candidate.name] = (*recall.get(candidate.name, ()), catch.recall)
        density[candidate.name] = (*density.get(candidate.name, ()), catch.density)
    analysis = HeadAnalysis(
        layer=attention.layer,
        head=head,
        mass_by_distance=_mass_by_distance(statistics),
        median_distance=min(int((cumulative < 0.5).sum()), seqlen - 1),
        sink_mass=statistics.sink_mass / rows,
        local_mass=float(statistics.by_slash[: maps.LOCAL_TOKENS].sum()) / rows,
        vertical_mass=_heaviest(statistics.by_vertical) / rows,
        slash_mass=_heaviest(far) / rows,
        entropy=statistics.entropy,
        recall=recall,
        density=density,
        recommended=Recommendation("broad", "dense", "", 1.0, 1.0),
        heatmap=statistics.heatmap.cpu(),
    )
    return replace(analysis, recommended=recommend(analysis, attention, statistics, tried))


def _heaviest(masses: Tensor) -> float:
    return float(masses.topk(min(LINES, len(masses))).values.sum())


def _mass_by_distance(statistics: maps.MapStatistics) -> MassByDistance:
    seqlen = len(statistics.by_distance)
    edges = [0, 1]
    while edges[-1] < seqlen:
        edges.append(min(2 * edges[-1], seqlen))
    shares = (statistics.by_distance / statistics.rows).tolist()
    return MassByDistance(tuple(edges), tuple(sum(shares[a:b]) for a, b in pairwise(edges)))
