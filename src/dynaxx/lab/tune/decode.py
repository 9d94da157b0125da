# SPDX-License-Identifier: Apache-2.0
"""Find decode rules: the smallest share of a cache's pages that preserves the loss of tokens decoded one by one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import cross_entropy

from dynaxx.integrations.transformers.decoder import cache_of, with_cache
from dynaxx.lab.perplexity import logits_of
from dynaxx.lab.tune.crossover import LengthTiming, dense_below
from dynaxx.lab.tune.decode_speed import NO_PLANS, table, time_steps
from dynaxx.patterns import Sink, SlidingWindow
from dynaxx.selection import Hybrid, MinMax, TopK
from dynaxx.selection.pages import PageBudget

if TYPE_CHECKING:
    from dynaxx.policy import Policy, Rule

SHARES = (0.5, 0.25, 0.125, 0.0625)  # shares of the pages, tried in this order
STEPS = 256  # tokens decoded at the end of each text
WINDOW = 256  # last tokens whose pages are always read
ERRORS = 2  # standard errors added to the rise of perplexity before the comparison with the tolerance


@dataclass(frozen=True)
class DecodeTrial:
    """One share of pages: the ratio of perplexities to dense decoding, its standard error, and whether it passed."""

    share: float
    ratio: float
    error: float
    passed: bool


@dataclass(frozen=True)
class DecodeResult:
    """The tried shares, and timings at the chosen share. `dense_below` is None if no rule is written."""

    trials: tuple[DecodeTrial, ...]
    share: float | None
    timings: tuple[LengthTiming, ...]
    captured: tuple[LengthTiming, ...]  # timings in a CUDA graph; empty on a CPU
    cuda_graph: bool  # whether the decision uses the captured steps
    dense_below: int | None
    said: str  # summary, with a table of launched and captured steps


def check_cuda_graph(model: Any, with_decode: bool, cuda_graph: bool) -> None:
    """Raise ValueError if captured steps are requested without decode rules or without a GPU."""
    if cuda_graph and not with_decode:
        raise ValueError("`cuda_graph` needs decode rules; pass --decode as well")
    if cuda_graph and model.device.type != "cuda":
        raise ValueError(f"`cuda_graph` needs a model on a GPU, got one on {model.device}")


def decode_rule(share: float, layers: Sequence[int], page_size: int) -> Rule:
    """Build the decode rule: the first page, the last `WINDOW` tokens, and a share of the pages between."""
    from dynaxx.policy import Rule

    rule = Hybrid(Sink(page_size) | SlidingWindow(WINDOW), TopK(share, MinMax(bound=1.0)))
    return Rule.of(rule, layers=layers, phase="decode", block_size=page_size)


def tune_decode(
    model: Any,
    texts: Sequence[Tensor],
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
        texts: token ids, (1, tokens) each. The last tokens are decoded, all others prefilled densely.
        layers: layers that may decode by a budget.
        tolerance: allowed relative rise of perplexity.
        page_size: tokens per page.
        cuda_graph: decide by steps captured in a CUDA graph, as engines run them, instead of eager steps.
        remember: a function that stores the result of a step by its name.
        say: a function that reports the current step.
        has_time: a function that is called before each share except the first; if it returns False, smaller shares are
            not tried.
    """
    from dynaxx.integrations.transformers.apply_policy import model_facts
    from dynaxx.policy import Policy

    facts = model_facts(model)
    steps = min(STEPS, min(ids.shape[1] for ids in texts) // 4)
    caches: list[Any] = []

    batches = (
        [torch.cat(list(texts))] if len({ids.shape for ids in texts}) == 1 else texts
    )  # the launches on the host dominate the time of a step

    def losses(policy: Policy | None) -> list[float]:
        if not caches:
            caches.extend(_read(model, ids[:, : -steps - 1]) for ids in batches)
        pairs = zip(caches, batches, strict=True)
        return torch.cat([_decoded(model, cache, ids[:, -steps - 1 :], policy) for cache, ids in pairs]).tolist()

    say(f"decoding {len(texts) * steps} tokens densely")
    dense = torch.tensor(remember("decode dense", lambda: losses(None)))
    trials: list[DecodeTrial] = []
    for share in SHARES:
        if trials and not has_time():
            break
        say(f"decoding from {share:.1%} of the pages")
        policy = Policy(model=facts, block_size=page_size, rules=(decode_rule(share, layers, page_size),))
        got = torch.tensor(remember(f"decode {share}", lambda policy=policy: losses(policy)))  # type: ignore[misc]
        change = (got - dense).double()
        mean, error = float(change.mean()), float(change.std() / change.numel() ** 0.5)
        passed = math.exp(mean + ERRORS * error) <= 1 + tolerance
        trials.append(DecodeTrial(share, math.exp(mean), error, passed))
        if not passed:
            break
    best = min((trial for trial in trials if trial.passed), key=lambda trial: trial.share, default=None)
    if best is None:
        said = "no rule: no share of the pages stays within the tolerance"
        return DecodeResult(tuple(trials), None, (), (), cuda_graph, None, said)
    say("timing a step's attention")
    budget = PageBudget.of(decode_rule(best.share, layers, page_size).attention.build())  # type: ignore[arg-type]
    eager = time_steps(model, facts, len(layers), budget, page_size)
    on_gpu = _timed_in_a_graph(model)
    captured = time_steps(model, facts, len(layers), budget, page_size, True) if on_gpu else []
    border = dense_below(captured if cuda_graph else eager)
    lines = [_said(best, border, eager[-1].seqlen)]
    if on_gpu:
        other = dense_below(eager if cuda_graph else captured)
        lines[0] += f"; {'launched one by one' if cuda_graph else 'in a CUDA graph'} "
        lines[0] += "at no length" if other is None else f"from {other:,} tokens"
    said = "\n".join(lines + table(eager, captured))
    return DecodeResult(tuple(trials), best.share, tuple(eager), tuple(captured), cuda_graph, border, said)


def _timed_in_a_graph(model: Any) -> bool:
    return bool(model.device.type == "cuda")


def _said(best: DecodeTrial, border: int | None, longest: int) -> str:
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
    from dynaxx.integrations.transformers.apply_policy import apply

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
