# SPDX-License-Identifier: Apache-2.0
"""Convert a policy to OpenVINO GenAI's `SparseAttentionConfig`, if GenAI can represent it.

GenAI has two rules. Each applies to all layers and heads of a model, and only to prompts:

    TRISHAPE    the first keys, the recent keys, and all keys for the last queries
    XATTENTION  the blocks with a share of the attention mass, estimated by sums over anti-diagonals
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dynaxx.arguments import typed
from dynaxx.engines.exporting import beyond_settings, imported
from dynaxx.errors import UnsupportedInputError
from dynaxx.layout import as_block_size
from dynaxx.patterns import GlobalTokens, LastQueries, Pattern, SlidingWindow, Union
from dynaxx.policy import Policy
from dynaxx.policy.resolve import head_rules
from dynaxx.policy.specs import AttentionRule
from dynaxx.selection import AntiDiagonal, Hybrid, TopP

CACHE_BLOCK = 32  # tokens in a block of GenAI's KV cache on a CPU


class GenAiSparseAttention(NamedTuple):
    """Fields of `openvino_genai.SparseAttentionConfig`.

    Attributes:
        mode: "TRISHAPE" or "XATTENTION".
        num_last_dense_tokens_in_prefill: queries at the end of a prompt that see all keys.
        num_retained_start_tokens_in_cache: TRISHAPE: the first keys, which all queries see.
        num_retained_recent_tokens_in_cache: TRISHAPE: keys before a chunk of the prompt that its queries see.
        xattention_threshold: XATTENTION: share of the estimated attention mass to keep.
        xattention_block_size: XATTENTION: tokens.
        xattention_stride: XATTENTION: distance of the anti-diagonals, in tokens.
    """

    mode: str
    num_last_dense_tokens_in_prefill: int = 0
    num_retained_start_tokens_in_cache: int = 0
    num_retained_recent_tokens_in_cache: int = 0
    xattention_threshold: float = 0.8
    xattention_block_size: int = 64
    xattention_stride: int = 8

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data: the mode and the fields that it reads."""
        reads = "num_retained" if self.mode == "TRISHAPE" else "xattention"
        return {name: value for name, value in self._asdict().items() if name in self._fields[:2] or reads in name}

    def config(self) -> Any:
        """Return an `openvino_genai.SparseAttentionConfig`, for `SchedulerConfig.sparse_attention_config`.

        Raises:
            ImportError: openvino-genai is not installed.
        """
        genai = imported("openvino_genai", "pip install openvino-genai")
        fields = {**self._asdict(), "mode": getattr(genai.SparseAttentionMode, self.mode)}
        return genai.SparseAttentionConfig(**fields)


@typed
def sparse_attention_config(policy: Policy, *, cache_block: int = CACHE_BLOCK) -> GenAiSparseAttention:
    """Convert a policy to the settings of OpenVINO GenAI.

    GenAI supports one prefill rule for all heads of all layers. The rule is `SlidingWindow(W)` with `Sink` or
    `GlobalTokens` (TRISHAPE), or `TopP` with `AntiDiagonal` and a selection per head (XATTENTION). Both may include
    `LastQueries`. GenAI works in chunks of the prompt and blocks of its cache, so its queries see all keys that the
    policy shows and up to one more chunk.

    Args:
        policy: a policy for any model.
        cache_block: tokens in a block of GenAI's cache. Sinks and windows must be multiples of it.

    Raises:
        UnsupportedInputError: GenAI cannot represent the policy.
    """
    reasons = beyond_settings(policy, "GenAI")
    rules = {repr(rule): rule for heads in head_rules(policy).values() for rule in heads.values()}
    covered = sum(len(heads) for heads in head_rules(policy).values())
    if covered != policy.model.layers * policy.model.q_heads:
        reasons.append("GenAI's rule holds for all heads of all layers: give the policy one rule for all of them")
    elif len(rules) > 1:
        reasons.append(f"GenAI has one rule for all heads, and the policy has {len(rules)}: tune with uniform budgets")
    found = None
    if len(rules) == 1:
        found = _settings_of(next(iter(rules.values())), policy, cache_block, reasons)
    if found is not None and found.mode == "TRISHAPE":
        seen = found.num_retained_start_tokens_in_cache + found.num_retained_recent_tokens_in_cache
        if policy.border > seen:
            reasons.append(_border(policy))
    elif found is not None and policy.border > 0:
        reasons.append(_border(policy))
    if reasons or found is None:
        raise UnsupportedInputError("a policy for OpenVINO GenAI", {"openvino_genai": reasons})
    return found


def _border(policy: Policy) -> str:
    border = policy.border
    return (
        f"GenAI makes prompts of any length sparse, and the policy those from {border} tokens on: send shorter prompts "
        "to a pipeline without sparse attention, and leave `dense_below` and `sparse_from` out here"
    )


def _settings_of(
    rule: AttentionRule | None, policy: Policy, cache_block: int, reasons: list[str]
) -> GenAiSparseAttention | None:
    """Return the settings of a rule, or None after appending the reason to `reasons`."""
    if isinstance(rule, TopP | Hybrid):
        return _xattention(rule, policy, reasons)
    if not isinstance(rule, Pattern):
        name = "dense" if rule is None else type(rule).__name__
        reasons.append(f"GenAI cannot express {name}: it has SlidingWindow with Sink, and TopP with AntiDiagonal")
        return None
    start = recent = last = 0
    for part in rule.parts if isinstance(rule, Union) else (rule,):
        if isinstance(part, SlidingWindow) and isinstance(part.window, int) and not recent:
            recent = part.window
        elif (first := _first_tokens(part)) is not None:
            start = max(start, first)
        elif isinstance(part, LastQueries):
            last = max(last, part.queries)
        else:
            reasons.append(f"GenAI cannot express {part!r}")
    for name, tokens in (("the window", recent), ("the sink", start)):
        if tokens % cache_block:
            upper = -(-tokens // cache_block) * cache_block
            reasons.append(
                f"{name} must be a multiple of {cache_block} tokens, GenAI's cache block: {upper} for {tokens}"
            )
    if not recent:
        reasons.append("TRISHAPE needs a SlidingWindow(W) with a number of keys")
    return GenAiSparseAttention("TRISHAPE", last, start, recent)


def _first_tokens(part: Pattern) -> int | None:
    """Return the number of first tokens that a pattern such as `Sink` shows to all queries, or None."""
    counted = isinstance(part, GlobalTokens) and isinstance(part.tokens, int) and not part.symmetric
    return part.tokens if counted else None  # type: ignore[attr-defined]


def _xattention(rule: TopP | Hybrid, policy: Policy, reasons: list[str]) -> GenAiSparseAttention | None:
    last = 0
    if isinstance(rule, Hybrid):
        if not isinstance(rule.pattern, LastQueries):
            reasons.append(f"XATTENTION cannot express {rule.pattern!r} beside the choice, only LastQueries")
        else:
            last = rule.pattern.queries
    selector = rule.selector if isinstance(rule, Hybrid) else rule
    if not isinstance(selector, TopP) or not isinstance(selector.scorer, AntiDiagonal):
        reasons.append("XATTENTION chooses by mass and anti-diagonals: TopP(mass, AntiDiagonal(stride))")
        return None
    if selector.per != "head" and policy.model.q_heads != policy.model.kv_heads:
        reasons.append('XATTENTION chooses for each head by itself: TopP(..., per="head")')
    q_block, kv_block = as_block_size(policy.block_size)
    sizes = {as_block_size(each.block_size) for each in policy.rules if each.block_size is not None}
    if q_block != kv_block or sizes - {(q_block, kv_block)}:
        reasons.append("XATTENTION has one block size for queries and keys: give the policy one, and its rules none")
    if isinstance(selector.mass, tuple):
        reasons.append("XATTENTION has one threshold for all heads: give TopP one mass")
        return None
    stride = selector.scorer.stride
    return GenAiSparseAttention(
        "XATTENTION",
        last,
        xattention_threshold=float(selector.mass),
        xattention_block_size=q_block,
        xattention_stride=stride,
    )
