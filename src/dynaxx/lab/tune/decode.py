# SPDX-License-Identifier: Apache-2.0
"""Find decode rules: the smallest share of a cache's pages that preserves the loss of tokens decoded one by one.

A mean share is distributed among layers and kv heads by their costs (`page_costs`). Heads that attend to few pages
leave theirs to the others. Both the costs and the decision use the ends of real texts, and ends that the dense model
wrote itself, because decoding reads generated tokens.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import cross_entropy

from dynaxx.integrations.transformers.apply_policy import apply, model_facts
from dynaxx.integrations.transformers.decoder import cache_of, with_cache
from dynaxx.lab.perplexity import logits_of
from dynaxx.lab.resume import fingerprint
from dynaxx.lab.texts import float64
from dynaxx.lab.tune.crossover import LengthTiming, dense_below
from dynaxx.lab.tune.decode_speed import NO_PLANS, table, time_steps
from dynaxx.lab.tune.page_costs import measure_page_costs, shares_of
from dynaxx.patterns import Pattern, Sink, SlidingWindow
from dynaxx.policy import Policy, Rule
from dynaxx.policy.rule import as_page_size
from dynaxx.selection import Hybrid, MinMax, TopK
from dynaxx.selection.pages import PageBudget

SHARES = (0.5, 0.25, 0.125, 0.0625, 0.03125)  # mean shares of the pages, tried in this order
STEPS = 256  # tokens decoded at the end of each text
WINDOW = 128  # last tokens whose pages are always read
BOUND = 0.5  # bounds of keys at half their distance from the mean key estimate a page's mass better than at all of it
ERRORS = 2  # standard errors added to the rise of perplexity before the comparison with the tolerance


@dataclass(frozen=True)
class DecodeTrial:
    """One mean share of pages: ratios of perplexities to dense decoding, and whether both passed."""

    share: float  # mean share of the pages
    ratio: float  # on real text
    error: float  # standard error of the ratio
    passed: bool  # whether both ratios plus `ERRORS` errors are within the tolerance
    written_ratio: float = 1.0  # on text that the dense model generated
    written_error: float = 0.0


@dataclass(frozen=True)
class DecodeResult:
    """The tried shares, and timings at the chosen mean share. `dense_below` is None if no rule is written."""

    trials: tuple[DecodeTrial, ...]
    share: float | None
    timings: tuple[LengthTiming, ...]
    captured: tuple[LengthTiming, ...]  # timings in a CUDA graph; empty on a CPU
    cuda_graph: bool  # whether the decision uses the captured steps
    dense_below: int | None
    said: str  # summary, with a table of launched and captured steps
    shares: tuple[tuple[float, ...], ...] = ()  # the chosen shares, per layer and kv head


def check_decode(model: Any, with_decode: bool, cuda_graph: bool, page_size: int | None) -> None:
    """Raise ValueError if a setting of decode rules is out of range, or given without decode rules or without a GPU."""
    if page_size is not None:
        if not with_decode:
            raise ValueError("`page_size` needs decode rules; pass --decode as well")
        if isinstance(page_size, tuple):
            raise ValueError(f"`page_size` must be one number of tokens, got {page_size}")
        as_page_size(page_size)
    if cuda_graph and not with_decode:
        raise ValueError("`cuda_graph` needs decode rules; pass --decode as well")
    if cuda_graph and model.device.type != "cuda":
        raise ValueError(f"`cuda_graph` needs a model on a GPU, got one on {model.device}")


def decode_pattern(page_size: int) -> Pattern:
    """Return what every head reads: the first page and the last `WINDOW` tokens."""
    return Sink(page_size) | SlidingWindow(WINDOW)


def always_read(page_size: int) -> PageBudget:
    """Return a budget of no pages besides `decode_pattern`, with the bound of `decode_rules`."""
    return dataclasses.replace(PageBudget.of(decode_pattern(page_size)), bound=BOUND)


def decode_rules(shares: Sequence[Sequence[float]], layers: Sequence[int], group: int, page_size: int) -> list[Rule]:
    """Build the decode rules of layers from the share of each kv head: `decode_pattern`, and a share of the pages.

    Args:
        shares: per layer and kv head.
        layers: the layers.
        group: q heads per kv head.
        page_size: tokens per page.
    """
    alike: dict[tuple[float, ...], list[int]] = {}
    for layer, row in zip(layers, shares, strict=True):
        alike.setdefault(tuple(row), []).append(layer)
    rules = []
    for row, same in alike.items():
        budget = row[0] if len(set(row)) == 1 else tuple(share for share in row for _ in range(group))
        rule = Hybrid(decode_pattern(page_size), TopK(budget, MinMax(bound=BOUND)))
        rules.append(Rule.of(rule, layers=same, phase="decode", block_size=page_size))
    return rules


def tune_decode(
    model: Any,
    texts: Sequence[Tensor],
    cost_texts: Sequence[Tensor],
    layers: Sequence[int],
    *,
    tolerance: float,
    page_size: int,
    cuda_graph: bool = False,
    remember: Callable[[str, Callable[[], Any]], Any] = lambda name, compute: compute(),
    say: Callable[[str], object] = lambda line: None,
    has_time: Callable[[], bool] = lambda: True,
) -> DecodeResult:
    """Find the smallest share of pages for `layers` that preserves perplexity, and the length from which it is faster.

    Args:
        model: a causal language model of transformers.
        texts: token ids, (1, tokens) each. The last tokens are decoded, all others prefilled densely; then tokens that
            the dense model wrote in their place.
        cost_texts: other texts, (1, tokens) each, whose last tokens give the costs of heads.
        layers: layers that may decode by a budget.
        tolerance: allowed relative rise of perplexity.
        page_size: tokens per page.
        cuda_graph: decide by steps captured in a CUDA graph, as engines run them, instead of eager steps.
        remember: a function that stores the result of a step by its name.
        say: a function that reports the current step.
        has_time: a function that is called before each share except the first; if it returns False, smaller shares are
            not tried.
    """
    facts = model_facts(model)
    group = facts.q_heads // facts.kv_heads
    steps = min(STEPS, min(ids.shape[1] for ids in texts) // 4)
    say("writing ends of texts")
    written = [_remembered_ends(model, each, steps, remember) for each in (texts, cost_texts)]
    say("loss of each kv head")
    costs = _costs(model, [*cost_texts, *written[1]], layers, page_size, steps, remember)
    way = f"pages of {page_size} {BOUND}"
    groups = [_Decoding(model, each, steps) for each in (texts, written[0])]
    say(f"decoding {2 * len(texts) * steps} tokens densely")
    dense = remember("decode text and written text densely", lambda: [each.losses(None) for each in groups])
    trials: list[DecodeTrial] = []
    for share in SHARES:
        if trials and not has_time():
            break
        say(f"decoding from {share:.1%} of the pages")
        rules = tuple(decode_rules(shares_of(costs, share), layers, group, page_size))
        policy = Policy(model=facts, rules=rules)
        compute = lambda policy=policy: [each.losses(policy) for each in groups]
        rises = [
            _rise(*pair)
            for pair in zip(dense, remember(f"decode text and written text {way} {share}", compute), strict=True)
        ]
        passed = all(math.exp(mean + ERRORS * error) <= 1 + tolerance for mean, error in rises)
        (mean, error), (written_mean, written_error) = rises
        trials.append(DecodeTrial(share, math.exp(mean), error, passed, math.exp(written_mean), written_error))
        if not passed:
            break
    best = min((trial for trial in trials if trial.passed), key=lambda trial: trial.share, default=None)
    if best is None:
        said = "no rule: no share of the pages stays within the tolerance"
        return DecodeResult(tuple(trials), None, (), (), cuda_graph, None, said)
    say("timing a step's attention")
    shares = tuple(map(tuple, shares_of(costs, best.share)))
    budgets = [dataclasses.replace(always_read(page_size), budget=row) for row in shares]
    eager = time_steps(model, facts, budgets, page_size)
    on_gpu = _timed_in_a_graph(model)
    captured = time_steps(model, facts, budgets, page_size, True) if on_gpu else []
    border = dense_below(captured if cuda_graph else eager)
    lines = [_conclusion(best, border, eager[-1].seqlen)]
    if on_gpu:
        other = dense_below(eager if cuda_graph else captured)
        lines[0] += f"; {'launched one by one' if cuda_graph else 'in a CUDA graph'} "
        lines[0] += "at no length" if other is None else f"from {other:,} tokens"
    said = "\n".join(lines + table(eager, captured))
    return DecodeResult(tuple(trials), best.share, tuple(eager), tuple(captured), cuda_graph, border, said, shares)


class _Decoding:
    """Texts whose last tokens are decoded, with the caches of the tokens before them."""

    def __init__(self, model: Any, texts: Sequence[Tensor], steps: int) -> None:
        self.model, self.steps = model, steps
        # The launches on the host dominate the time of a step, so texts of one length are a batch.
        self.batches = [torch.cat(list(texts))] if len({ids.shape for ids in texts}) == 1 else list(texts)
        self.caches: list[Any] = []

    def losses(self, policy: Policy | None) -> list[float]:
        """Return the loss of every decoded token, dense or under a policy."""
        if not self.caches:
            self.caches = [_read(self.model, ids[:, : -self.steps - 1]) for ids in self.batches]
        pairs = zip(self.caches, self.batches, strict=True)
        found = [_decoded(self.model, cache, ids[:, -self.steps - 1 :], policy) for cache, ids in pairs]
        return [round(value, 6) for value in torch.cat(found).tolist()]


def _rise(dense: Sequence[float], sparse: Sequence[float]) -> tuple[float, float]:
    """Return the mean rise of the loss, and its standard error."""
    before, after = map(float64, (dense, sparse))
    change = after - before
    return float(change.mean()), float(change.std() / change.numel() ** 0.5)


def _remembered_ends(
    model: Any, texts: Sequence[Tensor], steps: int, remember: Callable[[str, Callable[[], Any]], Any]
) -> list[Tensor]:
    """Return the texts with their last `steps` tokens written by the model."""
    found = []
    for ids in texts:
        digest = fingerprint(None, ids)
        end = remember(f"written {digest} {steps}", lambda ids=ids: written_end(model, ids, steps))  # type: ignore[misc]
        found.append(torch.cat([ids[:, :-steps].cpu(), torch.tensor([end], dtype=torch.int64, device="cpu")], 1))
    return found


@torch.no_grad()
def written_end(model: Any, ids: Tensor, steps: int, seed: int = 0) -> list[int]:
    """Let the dense model write a text's last tokens, drawn from its distribution.

    Args:
        model: a causal language model of transformers.
        ids: (1, tokens) a text, whose last `steps` tokens are ignored.
        steps: number of tokens to write.
        seed: seed of the draws.
    """
    generator = torch.Generator(model.device).manual_seed(seed)
    cache, token = _read(model, ids[:, : -steps - 1]), ids[:, -steps - 1 : -steps].to(model.device)
    found = []
    for _ in range(steps):
        out = model.base_model(token, use_cache=True, **with_cache(model.base_model, cache))
        cache = cache_of(out)
        token = torch.multinomial(logits_of(model, out[0][:, -1]).softmax(-1), 1, generator=generator)
        found.append(int(token))
    return found


def _costs(
    model: Any,
    texts: Sequence[Tensor],
    layers: Sequence[int],
    page_size: int,
    steps: int,
    remember: Callable[[str, Callable[[], Any]], Any],
) -> list[list[Tensor]]:
    """Return the losses of every share for the kv heads of all layers, for each text."""
    budget, way = always_read(page_size), f"pages of {page_size} {BOUND}"
    found = []
    for index, ids in enumerate(texts):

        def measured(ids: Tensor = ids) -> list[list[list[float]]]:
            costs = measure_page_costs(model, ids, budget, page_size=page_size, steps=steps, layers=layers)
            return [each.loss.tolist() for each in costs]

        found.append([float64(loss) for loss in remember(f"page costs {way} {index}", measured)])
    return found


def _timed_in_a_graph(model: Any) -> bool:
    return bool(model.device.type == "cuda")


def _conclusion(best: DecodeTrial, border: int | None, longest: int) -> str:
    if border is None:
        return f"no rule: reading {best.share:.1%} of the pages is not faster here up to {longest:,} tokens"
    return f"{best.share:.1%} of the pages from {border:,} tokens on, perplexity {best.ratio - 1:+.2%}"


@torch.no_grad()
def _read(model: Any, ids: Tensor) -> Any:
    """Return the cache of a prompt after a dense prefill."""
    return cache_of(model.base_model(ids.to(model.device), use_cache=True))


@torch.no_grad()
def _decoded(model: Any, cache: Any, ids: Tensor, policy: Policy | None) -> Tensor:
    """Return the (batch * (tokens - 1),) loss of each next token, decoded one by one from a copy of the cache."""
    cache, found, ids = copy.deepcopy(cache), [], ids.to(model.device)
    handle = apply(model, policy) if policy is not None else None
    try:
        with sdpa_kernel(NO_PLANS):
            for at in range(ids.shape[1] - 1):
                out = model.base_model(ids[:, at : at + 1], use_cache=True, **with_cache(model.base_model, cache))
                cache = cache_of(out)
                logits = logits_of(model, out[0][:, -1])
                found.append(cross_entropy(logits, ids[:, at + 1], reduction="none"))
    finally:
        if handle is not None:
            handle.remove()
    return torch.stack(found, 1).flatten().float().cpu()
