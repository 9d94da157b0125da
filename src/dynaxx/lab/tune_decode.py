"""Decode rules: the least share of a cache's pages that keeps the loss of tokens decoded one by one, where it pays."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from dynaxx.lab.crossover import REPEATS, LengthTiming, dense_below, interleaved, within
from dynaxx.lab.models import longest_prompt
from dynaxx.lab.perplexity import logits_of
from dynaxx.layout.paging import PagedCache
from dynaxx.ops.decode import sparse_decode, summarize_pages
from dynaxx.patterns import Sink, SlidingWindow
from dynaxx.selection import Hybrid, MinMax, TopK
from dynaxx.selection.pages import PageBudget

if TYPE_CHECKING:
    from dynaxx.policy import Policy, Rule

SHARES = (0.5, 0.25, 0.125, 0.0625)  # of the pages, tried from the first on
STEPS = 256  # tokens decoded at the end of each text
WINDOW = 256  # last tokens whose pages are always read
ERRORS = 2  # standard errors that a rise of perplexity must stay below the tolerance by
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
NO_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # cuDNN: one per length, slow
GPU_LENGTHS = (*LENGTHS, 65536, 131072)  # launches are all the time of shorter ones


@dataclass(frozen=True)
class DecodeTrial:
    """One share of pages: decoded perplexity over that of dense decoding, its standard error, whether both fit."""

    share: float
    ratio: float
    error: float
    passed: bool


@dataclass(frozen=True)
class DecodeResult:
    """What was tried, and timed at the share that was chosen; `dense_below` is None where no rule is written."""

    trials: tuple[DecodeTrial, ...]
    share: float | None
    timings: tuple[LengthTiming, ...]
    dense_below: int | None
    said: str


def decode_rule(share: float, layers: Sequence[int], page_size: int) -> Rule:
    """What a step reads: the first page, the last `WINDOW` tokens, and a share of the pages between."""
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
    remember: Callable[[str, Callable[[], Any]], Any] = lambda name, compute: compute(),
    say: Callable[[str], object] = lambda line: None,
) -> DecodeResult:
    """Find the least share of pages for `layers` that keeps perplexity, and from which length it is faster.

    Args:
        texts: token ids (1, tokens) each; all but the last tokens are read densely, those are decoded.
        tolerance: how much perplexity may rise, relative.
        remember: keeps the result of a step by its name.
        say: is told what is being done.
    """
    from dynaxx.integrations.transformers import model_facts
    from dynaxx.policy import Policy

    facts = model_facts(model)
    steps = min(STEPS, min(ids.shape[1] for ids in texts) // 4)
    caches: list[Any] = []

    def losses(policy: Policy | None) -> list[float]:
        if not caches:
            caches.extend(_read(model, ids[:, : -steps - 1]) for ids in texts)
        pairs = zip(caches, texts, strict=True)
        return torch.cat([_decoded(model, cache, ids[:, -steps - 1 :], policy) for cache, ids in pairs]).tolist()

    say(f"decoding {len(texts) * steps} tokens densely")
    dense = torch.tensor(remember("decode dense", lambda: losses(None)))
    trials: list[DecodeTrial] = []
    for share in SHARES:
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
    timings: list[LengthTiming] = []
    if best is not None:
        budget = PageBudget.of(decode_rule(best.share, layers, page_size).attention.build())  # type: ignore[arg-type]
        timings = time_steps(model, facts, len(layers), budget, page_size)
    border = dense_below(timings)
    if best is None:
        said = "no rule: no share of the pages stays within the tolerance"
    elif border is None:
        said = f"no rule: reading {best.share:.1%} of the pages is not faster here up to {timings[-1].seqlen:,} tokens"
    else:
        said = f"{best.share:.1%} of the pages from {border:,} tokens on, perplexity {best.ratio - 1:+.2%}"
    return DecodeResult(tuple(trials), None if best is None else best.share, tuple(timings), border, said)


@torch.no_grad()
def time_steps(
    model: Any, facts: Any, layers: int, budget: PageBudget, page_size: int, lengths: Sequence[int] | None = None
) -> list[LengthTiming]:
    """Time one decoding step's attention in all layers, dense (the faster of two forms of SDPA) and by the budget."""
    parameter = next(model.parameters())
    lengths = lengths or within(GPU_LENGTHS if parameter.device.type == "cuda" else LENGTHS, longest_prompt(model))
    make = lambda *shape: torch.randn(*shape, dtype=parameter.dtype, device=parameter.device)
    group, found = facts.q_heads // facts.kv_heads, []
    for seqlen in lengths:
        q, k, v = (
            make(1, heads, n, facts.head_dim) for heads, n in ((facts.q_heads, 1), *((facts.kv_heads, seqlen),) * 2)
        )
        rows = q.view(1, facts.kv_heads, group, facts.head_dim)
        cache = PagedCache.contiguous(k.transpose(1, 2), v.transpose(1, 2), page_size=page_size)
        cache = summarize_pages(cache, bound=budget.bound)

        def step(q: Tensor = q, cache: PagedCache = cache) -> Tensor:
            return sparse_decode(q.transpose(1, 2), summarize_pages(cache, new_tokens=1), budget)

        runs: list[Callable[[], Any]] = [
            lambda q=q, k=k, v=v: scaled_dot_product_attention(q, k, v, enable_gqa=True),  # type: ignore[misc]
            lambda rows=rows, k=k, v=v: scaled_dot_product_attention(rows, k, v),  # type: ignore[misc]
            step,
        ]
        *dense, sparse = interleaved(runs, REPEATS, parameter.device)
        found.append(LengthTiming(seqlen, min(dense) * layers, sparse * layers))
    return found


@torch.no_grad()
def _read(model: Any, ids: Tensor) -> Any:
    """The cache of a prompt that was read densely."""
    return model.base_model(ids.to(model.device), use_cache=True).past_key_values


@torch.no_grad()
def _decoded(model: Any, cache: Any, ids: Tensor, policy: Policy | None) -> Tensor:
    """(tokens - 1,) loss of each next token, decoded one by one from a copy of the cache."""
    from dynaxx.integrations.transformers import apply

    cache, found, ids = copy.deepcopy(cache), [], ids.to(model.device)
    handle = apply(model, policy) if policy is not None else None
    try:
        with sdpa_kernel(NO_PLANS):
            for at in range(ids.shape[1] - 1):
                out = model.base_model(ids[:, at : at + 1], past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                found.append(cross_entropy(logits_of(model, out[0][:, -1]), ids[:, at + 1]))
    finally:
        if handle is not None:
            handle.remove()
    return torch.stack(found).float().cpu()
