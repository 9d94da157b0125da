"""Where a model attends, head by head: how far, on which lines, and what a pattern or a selector would catch of it.

For each head it recommends the sparsest rule that keeps a share of the attention mass, with the reason in words. It is
a starting point and an explanation, not a proof: how much mass a model needs is what `tune` and `validate` measure.
"""

from __future__ import annotations

import base64
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynaxx.lab import attention_maps as maps
from dynaxx.lab.progress import Progress, SilentProgress, Task
from dynaxx.layout import BlockGrid, as_block_size
from dynaxx.patterns import Pattern, Sink, SlidingWindow
from dynaxx.selection import Hybrid, LastQueryProbe, MeanPool, MinMax, Scorer, TopK, select_blocks

BUDGETS = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
TARGET_RECALL = 0.95
LINES = 64  # the columns and the diagonals that count as vertical and slash lines
HEAT_LOW = 1e-5  # what a heat map's smallest value stands for
SELECTORS: dict[str, Scorer] = {"mean_pool": MeanPool(), "min_max": MinMax(), "last_query_probe": LastQueryProbe()}
SCORER_WORDS = {
    "mean_pool": "mean-pooled keys",
    "min_max": "the min/max bound of the keys",
    "last_query_probe": "the last-query probe",
}


@dataclass(frozen=True)
class MassByDistance:
    """Attention mass by query-to-key distance in tokens, in bins that double."""

    edges: tuple[int, ...]  # bin i holds edges[i] <= distance < edges[i + 1]
    mass: tuple[float, ...]  # share of all attention, sums to 1


@dataclass(frozen=True)
class Recommendation:
    """The sparsest rule tried that keeps the target share of a head's attention mass."""

    kind: str  # "local", "lines", "selected", "broad", or "windowed" (the layer has a window of its own)
    attention: str  # as Python: "Sink(4) | SlidingWindow(256)", "Sink(64) | ... | TopK(0.1, MeanPool())", or "dense"
    reason: str
    density: float
    recall: float


@dataclass(frozen=True)
class HeadAnalysis:
    """One head. Masses are shares of its attention, averaged over queries; the four kinds of place may overlap."""

    layer: int
    head: int
    mass_by_distance: MassByDistance
    median_distance: int  # half of the mass lies at most so many tokens back
    sink_mass: float  # on the first SINK_TOKENS tokens
    local_mass: float  # within LOCAL_TOKENS tokens, the sink aside
    vertical_mass: float  # on the LINES heaviest keys, sink and local aside
    slash_mass: float  # on the LINES heaviest diagonals, sink and local aside
    entropy: float  # nats, mean over queries; exp(entropy) is an effective number of keys
    recall: dict[str, tuple[float, ...]]  # rule -> share of the mass on the pairs it shows, one per budget
    recommended: Recommendation
    heatmap: Tensor = field(repr=False, compare=False)  # (cells, cells) mean share of a row's attention in a cell

    def to_dict(self) -> dict[str, Any]:
        plain = {name: value for name, value in vars(self).items() if name != "heatmap"}
        plain["mass_by_distance"] = asdict(self.mass_by_distance)
        plain["recommended"] = asdict(self.recommended)
        return _rounded(plain) | {"heatmap": encode_heatmap(self.heatmap)}


@dataclass(frozen=True)
class RuleAtBudgets:
    """A rule as it was tried, once per budget."""

    attention: tuple[str, ...]
    density: tuple[float, ...]  # visited / causally visible blocks: what the budget came to


@dataclass(frozen=True)
class AnalysisResult:
    """Every head of the layers looked at, and the sums."""

    model: str
    tokens: int
    rows: int  # queries per head that statistics are from; all of them up to MAX_ROWS tokens
    block_size: int
    seed: int
    start: int  # token of the text at which the sample begins
    budgets: tuple[float, ...]
    rules: dict[str, RuleAtBudgets]
    heads: tuple[HeadAnalysis, ...]
    seconds: float

    @property
    def summary(self) -> dict[str, Any]:
        count = max(1, len(self.heads))
        return {
            "heads": len(self.heads),
            "kinds": dict(Counter(head.recommended.kind for head in self.heads).most_common()),
            "mean_recommended_density": sum(head.recommended.density for head in self.heads) / count,
            "target_recall": TARGET_RECALL,
            "mean_recall": {
                rule: tuple(sum(h.recall[rule][i] for h in self.heads) / count for i in range(len(self.budgets)))
                for rule in self.rules
            },
            "mean_sink_mass": sum(head.sink_mass for head in self.heads) / count,
            "mean_local_mass": sum(head.local_mass for head in self.heads) / count,
        }

    def to_dict(self) -> dict[str, Any]:
        plain = {name: value for name, value in vars(self).items() if name not in ("heads", "rules")}
        rules = {name: asdict(rule) for name, rule in self.rules.items()}
        listed = _rounded(plain | {"rules": rules, "summary": self.summary})
        return listed | {"heads": [head.to_dict() for head in self.heads]}


@dataclass(frozen=True)
class _Candidate:
    """A rule at one budget. `rule` is None for the oracle, the blocks of most true mass."""

    name: str
    budget: float
    rule: Pattern | Hybrid | None
    density: float


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

    One dense forward pass; no full map of even one head exists at any time. Every query is looked at up to 4,096
    tokens; beyond, evenly spaced query blocks that make 4,096 queries.

    Args:
        model: a causal language model of transformers; it is left as it was.
        tokenizer: the model's.
        text: a sample of the workload, longer than `tokens`.
        tokens: length of the sample, taken from a place in the text that `seed` chooses.
        layers, heads: which to look at, all by default.
        block_size: tokens per block of the layouts that are tried, 16, 32, 64 or 128.
        progress: told head by head.

    Raises:
        ValueError: too little text, more tokens than the model has positions, a layer or head that is not there, or a
            model whose maps cannot be read; the message says why.
    """
    began = time.monotonic()
    as_block_size(block_size)
    config = model.config.get_text_config()
    most = getattr(config, "max_position_embeddings", None) or tokens
    if not block_size <= tokens <= most:
        raise ValueError(
            f"`tokens` must be from block_size = {block_size} to the model's {most} positions, got {tokens}"
        )
    chosen_layers = _chosen("layers", layers, config.num_hidden_layers)
    chosen_heads = _chosen("heads", heads, config.num_attention_heads)
    input_ids, start = _sample(tokenizer, text, tokens, seed)
    candidates = _candidates(tokens, block_size)
    found: list[HeadAnalysis] = []
    total = len(chosen_layers) * len(chosen_heads)
    with (progress or SilentProgress()).task(f"Reading attention maps, {tokens:,} tokens", total) as task:

        def visit(attention: maps.LayerAttention) -> None:
            if attention.layer in chosen_layers:
                found.extend(_analyze_layer(attention, chosen_heads, candidates, block_size, task))

        maps.visit_attention(model, input_ids, visit)
    return AnalysisResult(
        model=Path(str(getattr(config, "_name_or_path", "") or type(model).__name__)).name,
        tokens=tokens,
        rows=_rows(tokens, block_size),
        block_size=block_size,
        seed=seed,
        start=start,
        budgets=BUDGETS,
        rules=_rules(candidates),
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
    """A run of tokens from a place that `seed` chooses, behind the special tokens that the model expects."""
    special: list[int] = tokenizer("")["input_ids"]
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    spare = len(ids) - (tokens - len(special))
    if spare < 0:
        raise ValueError(f"`text` must have at least {tokens:,} tokens, got {len(ids):,}; give more, or ask for fewer")
    start = random.Random(seed).randint(0, spare)
    return torch.tensor([(special + ids[start:])[:tokens]]), start


def _rows(tokens: int, block_size: int) -> int:
    blocks = maps.sampled_blocks(tokens, block_size)
    return int(((blocks + 1) * block_size).clamp(max=tokens).sum() - (blocks * block_size).sum())


# ---- what is tried ---------------------------------------------------------------------------------------------


def _candidates(tokens: int, block_size: int) -> tuple[_Candidate, ...]:
    """Every rule at every budget, with its budget set so that the density comes closest to what was asked."""
    grid = BlockGrid(tokens, tokens, as_block_size(block_size))
    visible = grid.causal_kv_blocks(grid.rows())
    listed = []
    for budget in BUDGETS:
        window = _streaming(grid, budget)
        listed.append(_Candidate("streaming", budget, window, _static_density(window, grid)))
    forced = Sink(block_size) | SlidingWindow(block_size)
    for name, scorer in SELECTORS.items():
        for budget in BUDGETS:
            share, density = _share(forced, grid, budget)
            listed.append(_Candidate(name, budget, Hybrid(forced, TopK(share, scorer)), density))
    for budget in BUDGETS:
        density = float((visible * budget).ceil().sum() / visible.sum())
        listed.append(_Candidate("oracle", budget, None, density))
    return tuple(listed)


def _streaming(grid: BlockGrid, density: float) -> Pattern:
    """A block of sinks and the window of whole blocks that comes closest to a density."""
    size = grid.block_size[1]
    windows = (Sink(size) | SlidingWindow(blocks * size) for blocks in range(1, grid.kv_blocks + 1))
    return min(windows, key=lambda pattern: abs(_static_density(pattern, grid) - density))


def _static_density(pattern: Pattern, grid: BlockGrid) -> float:
    return pattern.layout(grid.seqlen_q, block_size=grid.block_size).density()


def _share(forced: Pattern, grid: BlockGrid, density: float) -> tuple[float, float]:
    """The share for `TopK` beside a pattern that comes closest to a density, and the density it gives."""
    visible = grid.causal_kv_blocks(grid.rows())
    static = forced.layout(grid.seqlen_q, block_size=grid.block_size).kv_num_blocks[0, 0]
    shares = torch.arange(0, 1001)[:, None] / 1000
    added = torch.minimum((visible * shares).ceil(), (visible - static).clamp(min=0))
    densities = (static + added).sum(1) / visible.sum()
    best = int((densities - density).abs().argmin())
    return round(float(shares[best, 0]), 3), float(densities[best])


def _rules(candidates: Sequence[_Candidate]) -> dict[str, RuleAtBudgets]:
    rules = {}
    for name in dict.fromkeys(candidate.name for candidate in candidates):
        mine = [candidate for candidate in candidates if candidate.name == name]
        rules[name] = RuleAtBudgets(tuple(_attention(each) for each in mine), tuple(each.density for each in mine))
    return rules


def _attention(candidate: _Candidate) -> str:
    if candidate.rule is None:
        return f"the {candidate.budget:.0%} of blocks with most attention"
    if isinstance(candidate.rule, Hybrid) and isinstance(candidate.rule.selector, TopK):
        selector = candidate.rule.selector
        return f"{_pattern(candidate.rule.pattern)} | TopK({selector.budget}, {type(selector.scorer).__name__}())"
    assert isinstance(candidate.rule, Pattern), "candidates are patterns and hybrids with TopK"
    return _pattern(candidate.rule)


def _pattern(pattern: Pattern) -> str:
    return repr(pattern).replace("SlidingWindow(window=", "SlidingWindow(")


# ---- one layer ---------------------------------------------------------------------------------------------------


def _analyze_layer(
    attention: maps.LayerAttention,
    heads: Sequence[int],
    candidates: Sequence[_Candidate],
    block_size: int,
    task: Task,
) -> Iterator[HeadAnalysis]:
    attention = attention.only(heads)
    statistics = []
    for index, head in enumerate(heads):
        statistics.append(maps.map_statistics(attention, index, block_size=block_size))
        task.advance(1, f"layer {attention.layer}, head {head}")
    rows = statistics[0].rows
    recall: dict[str, list[Tensor]] = {}
    for candidate in candidates:
        mass = _candidate_mass(attention, statistics, candidate, block_size)
        recall.setdefault(candidate.name, []).append((mass / rows).clamp(max=1.0).cpu())
    for index, head in enumerate(heads):
        caught = {name: tuple(float(each[index]) for each in shares) for name, shares in recall.items()}
        yield _head(attention, head, statistics[index], caught, candidates)


def _candidate_mass(
    attention: maps.LayerAttention,
    statistics: Sequence[maps.MapStatistics],
    candidate: _Candidate,
    block_size: int,
) -> Tensor:
    """Mass that a rule shows, per head, in rows."""
    if candidate.rule is not None:
        layout = select_blocks(
            attention.q[None], attention.k[None], candidate.rule, block_size=block_size, scale=attention.scale
        )
        return maps.visible_mass(attention, statistics, layout)
    ordered = torch.stack([each.block_mass for each in statistics]).sort(-1, descending=True).values.cumsum(-1)
    visible = torch.arange(1, ordered.shape[1] + 1, device=ordered.device)
    count = (visible * candidate.budget).ceil().long().clamp(min=1)
    return ordered.gather(-1, (count - 1).expand(ordered.shape[0], -1)[..., None]).sum((1, 2))


def _head(
    attention: maps.LayerAttention,
    head: int,
    statistics: maps.MapStatistics,
    recall: dict[str, tuple[float, ...]],
    candidates: Sequence[_Candidate],
) -> HeadAnalysis:
    rows, seqlen = statistics.rows, len(statistics.by_distance)
    far = statistics.by_slash[maps.LOCAL_TOKENS :]
    cumulative = (statistics.by_distance / rows).cumsum(0)
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
        recommended=Recommendation("broad", "dense", "", 1.0, 1.0),
        heatmap=statistics.heatmap.cpu(),
    )
    return replace(analysis, recommended=_recommend(analysis, attention, statistics, candidates))


def _heaviest(masses: Tensor) -> float:
    return float(masses.topk(min(LINES, len(masses))).values.sum())


def _mass_by_distance(statistics: maps.MapStatistics) -> MassByDistance:
    seqlen = len(statistics.by_distance)
    edges = [0, 1]
    while edges[-1] < seqlen:
        edges.append(min(2 * edges[-1], seqlen))
    shares = (statistics.by_distance / statistics.rows).tolist()
    return MassByDistance(tuple(edges), tuple(sum(shares[a:b]) for a, b in pairwise(edges)))


# ---- the recommendation --------------------------------------------------------------------------------------------


def _recommend(
    head: HeadAnalysis,
    attention: maps.LayerAttention,
    statistics: maps.MapStatistics,
    candidates: Sequence[_Candidate],
) -> Recommendation:
    """The sparsest of a window with sinks and the selectors that reaches the target; dense if none does."""
    seqlen = len(statistics.by_distance)
    if attention.window is not None and attention.window < seqlen:
        reason = f"the layer sees only its own window of {attention.window} tokens: leave it"
        return Recommendation("windowed", "dense", reason, 1.0, 1.0)
    window = _smallest_window(statistics)
    selected = _cheapest_selector(head, candidates)
    if window and (selected is None or window.density <= 1.1 * selected.density):
        return window
    if selected:
        return selected
    best = max(SELECTORS, key=lambda name: head.recall[name][-1])
    reason = (
        f"broad: {SCORER_WORDS[best]} catch {head.recall[best][-1]:.0%} of the mass at {BUDGETS[-1]:.0%} density "
        f"(the best blocks there are, {head.recall['oracle'][-1]:.0%}): keep dense"
    )
    return Recommendation("broad", "dense", reason, 1.0, 1.0)


def _smallest_window(statistics: maps.MapStatistics) -> Recommendation | None:
    """Sinks and the smallest window, a power of two, that reach the target at no more than half the blocks."""
    rows, seqlen, sinks = statistics.rows, len(statistics.by_slash), maps.SINK_TOKENS
    window = statistics.block_size
    while window < seqlen:
        recall = (statistics.sink_mass + float(statistics.by_slash[:window].sum())) / rows
        density = _window_density(window, seqlen, statistics.block_size)
        if recall >= TARGET_RECALL and density <= BUDGETS[-1]:
            near = float(statistics.by_distance[:window].sum()) / rows
            place = f"{near:.0%} of the mass within {window:,} tokens"
            if recall - near > 0.02:
                place += f" and {recall - near:.0%} more on the first {sinks}"
            attention = f"Sink({sinks}) | SlidingWindow({window})"
            return Recommendation("local", attention, f"local: {place}", density, min(1.0, recall))
        window *= 2
    return None


@lru_cache(maxsize=256)
def _window_density(window: int, seqlen: int, block_size: int) -> float:
    return (Sink(maps.SINK_TOKENS) | SlidingWindow(window)).layout(seqlen, block_size=block_size).density()


def _cheapest_selector(head: HeadAnalysis, candidates: Sequence[_Candidate]) -> Recommendation | None:
    reaching = []
    for candidate in candidates:
        if candidate.name in SELECTORS:
            recall = head.recall[candidate.name][BUDGETS.index(candidate.budget)]
            if recall >= TARGET_RECALL:
                reaching.append((candidate.density, -recall, candidate))
    if not reaching:
        return None
    density, recall, candidate = min(reaching, key=lambda each: each[:2])
    finds = f"{SCORER_WORDS[candidate.name]} catch {-recall:.0%} of the mass at {density:.0%} density"
    lines = {"vertical": head.vertical_mass, "slash": head.slash_mass}
    widest = max(lines, key=lambda name: lines[name])
    kind = "lines" if lines[widest] >= 0.2 else "selected"
    reason = f"{widest} lines: {LINES} of them hold {lines[widest]:.0%}; {finds}" if kind == "lines" else finds
    return Recommendation(kind, _attention(candidate), reason, density, -recall)


# ---- plain data --------------------------------------------------------------------------------------------------


def encode_heatmap(heatmap: Tensor) -> dict[str, Any]:
    """A heat map as bytes on a log scale: 0 is nothing, 1 is `low` or less, 255 is all of a row's attention."""
    decades = -torch.tensor(HEAT_LOW).log10()
    level = 1 + 254 * (1 + heatmap.clamp(min=HEAT_LOW, max=1.0).log10() / decades)
    codes = torch.where(heatmap > 0, level, 0.0).round().to(torch.uint8)
    data = base64.b64encode(bytes(codes.flatten().tolist())).decode()
    return {"size": heatmap.shape[0], "low": HEAT_LOW, "scale": "log10", "data": data}


def _rounded(value: Any) -> Any:
    """Floats to five digits, so that a file stays small and reads well."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, (list, tuple)) else value
