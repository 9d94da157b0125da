# SPDX-License-Identifier: Apache-2.0
"""The routing decision of all engines: a sequence runs by a rule, by the model's own pattern, or dense, and why.

`route` is a pure function of four values: the policy's rules for the layer (`LayerRules`), the state during a forward
pass (`PassState`), the properties of the attention call (`CallProperties`), and one sequence (`SequenceLengths`).
Every reason that counters, metrics and documents show is a member of `DenseReason`.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from dynaxx.policy.rollout import ASKED_DENSE, NOT_CHOSEN, Rollout, is_long

MAX_QUERIES = 16  # a call with more queries is a chunk of a prompt, not a decoding step


class DenseReason(str, enum.ReprEnum):
    """The reason why a call, or one of its sequences, does not run by a policy's rule. Counters show the value.

    To add a reason, add a member here, return it from `_why_no_rule` or pass it as `CallProperties.unserved`, and add
    its row to docs/guides/why_dense.md; a test compares the two.

    Attributes:
        meaning: when it happens and the remedy; one row of the table in the documentation.
    """

    meaning: str

    def __new__(cls, value: str, meaning: str) -> DenseReason:
        """Create a member from its text and its meaning."""
        member = str.__new__(cls, value)
        member._value_, member.meaning = value, meaning
        return member

    # The rule and the phase.
    NO_RULE = "no rule", "The policy has no rule for the layer in this phase. Add one, or tune again."
    DECODE = (
        "decode",
        "The call decodes, and the layer has no rule with `phase: decode`. `dynaxx tune --decode` searches for one.",
    )
    FEW_QUERIES = (
        "fewer queries than one block",
        "The rule chooses by data, and the prompt, or its part after a cached prefix, has fewer queries than a block.",
    )
    OWN_PATTERN = (
        "layer has its own window",
        "The model gives the layer a window or chunks, which a policy's rule does not change. Nothing to do.",
    )
    # The policy's state.
    KILLED = "kill switch", "The kill switch is engaged. Release it."
    NOT_CHOSEN = NOT_CHOSEN, "`rollout.share` or `rollout.flag` leaves this request dense. Raise the share."
    ASKED_DENSE = ASKED_DENSE, "The caller asked for dense: `handle.request(sparse=False)`."
    COMPARISON = (
        "guard comparison",
        "The guard recomputes a sampled prompt densely, to compare. `guard.kl_sample` sets how often.",
    )
    LAYER_LEFT_OUT = "layer not in the rollout", "`rollout.layers` excludes the layer. Add it."
    LENGTH_LEFT_OUT = (
        "length not in the rollout",
        "The length is outside `rollout.min_tokens` to `max_tokens`. Widen them.",
    )
    OUTSIDE = (
        "outside of a forward pass",
        "A layer was called by itself, or again for a backward pass whose forward pass ran before `apply`.",
    )
    # Lengths.
    BELOW = (
        "below dense_below",
        "No sequence has as many keys as `dense_below` or `sparse_from` require. Lower them if timings justify it.",
    )
    SHORT = (
        "too few queries to gain",
        "Without a policy: a decoding step, or a prompt too short for dynaxx's kernels to be faster. Nothing to do.",
    )
    # The attention call.
    SHARDED = (
        "heads are sharded",
        "The process has only some heads. Split them by transformers' or vLLM's tensor parallelism, which give each "
        "rank its heads' rules.",
    )
    DROPOUT = "attention dropout", "The model trains with attention dropout. Set `attention_dropout` to 0."
    WEIGHTS = (
        "attention weights",
        "The caller asks for attention weights (`output_attentions`), which the kernels do not compute. Ask for none.",
    )
    TANGENTS = "forward-mode derivatives", "`jvp`, `jacfwd` or `hessian`. Use reverse mode."
    ARGUMENT = (
        "unknown argument",
        "The model's attention reads an argument that dynaxx does not, such as a position bias. The log names it.",
    )
    SHAPES = "q and k of other shapes", "q, k and v do not have the shapes of self-attention."
    NOT_CAUSAL = "not causal", "The layer also attends to later tokens. A policy serves causal layers."
    MORE_QUERIES = "more queries than keys", "The call has more queries than keys."
    MASK_DTYPE = (
        "mask is not boolean",
        "The caller passed a mask of numbers. Pass a boolean mask, or a padding mask.",
    )
    MASK_BY_HEAD = "mask differs by head", "The mask has one entry per head. Pass one for all heads."
    MASK_LENGTHS = (
        "mask of other lengths",
        "The mask does not have the lengths of q and k. Pass one that does, or a padding mask.",
    )
    MASK_KIND = (
        "mask is not causal sequences",
        "The mask is not that of causal sequences, such as a tree of drafted tokens. Pad or pack the batch instead.",
    )
    PADDING = (
        "padding or prefix",
        "Queries of padding, or of a prefix that is visible in both directions.",
    )
    NO_CACHE = (
        "cache unknown",
        "The layer has a decode rule, but there is no cache of transformers. Use `DynamicCache` or `StaticCache`.",
    )
    PAGE_SIZE = (
        "pages of another size",
        "The decode rule's `block_size` does not divide the cache's `page_size`. Choose a multiple.",
    )
    NO_TOKENS = (
        "no token ids",
        "The rule depends on content, but there are no `input_ids`. Pass them instead of `inputs_embeds`.",
    )
    NO_EARLIER_TOKENS = (
        "token ids of earlier chunks unknown",
        "The rule depends on content, but the cache was filled without token ids. Fill it through the same model.",
    )
    OTHER_TOKENS = (
        "token ids of other lengths",
        "The rule depends on content, but the token ids do not match the keys. Pass those of all keys.",
    )
    # Fallbacks: the call should run sparse by a rule, but runs dense.
    GUARD = (
        "guard",
        "The guard measured an error above its limit and made the layer dense. Tune again with recent prompts.",
    )
    RESTING = (
        "resting after failures",
        "The layer's kernels failed three times in a row. It tries again after 64 calls, then after twice as many. "
        "The log shows the error.",
    )
    KERNEL_FAILED = (
        "kernel failed",
        "A kernel raised an error. The log shows it once; `dynaxx doctor` checks the machine.",
    )
    COMPILE_FAILED = (
        "compile failed",
        "A kernel did not compile. The log shows the error once; `dynaxx doctor` checks the machine.",
    )
    OUT_OF_MEMORY = (
        "out of memory",
        "A kernel ran out of memory. Shorten the prompts or the batch, or prefill in chunks.",
    )
    NOT_DECIDED = "routing failed", "Routing raised an error. The log shows it once; please report it."

    @classmethod
    def of(cls, text: str) -> DenseReason:
        """Return the member with this text."""
        return next(member for member in cls if member.value == text)

    @property
    def is_fallback(self) -> bool:
        """Return whether the call should have run sparse, so that it counts as a fallback."""
        return self in _FALLBACKS

    @property
    def keeps_own_pattern(self) -> bool:
        """Return whether the model's own pattern may still run on our kernels: not if the original is required."""
        return self not in _ORIGINAL


_FALLBACKS = frozenset(
    {
        DenseReason.GUARD,
        DenseReason.RESTING,
        DenseReason.KERNEL_FAILED,
        DenseReason.COMPILE_FAILED,
        DenseReason.OUT_OF_MEMORY,
        DenseReason.NOT_DECIDED,
    }
)
_ORIGINAL = _FALLBACKS | {
    DenseReason.KILLED,
    DenseReason.NOT_CHOSEN,
    DenseReason.ASKED_DENSE,
    DenseReason.COMPARISON,
}


class Route(enum.Enum):
    """The ways in which a sequence runs."""

    RULE = "rule"  # by the policy's prefill rule
    DECODE = "decode"  # by the policy's decode rule
    OWN_PATTERN = "own_pattern"  # by the model's own pattern, on dynaxx's kernels
    DENSE = "dense"  # by the model's original attention


class Decision(NamedTuple):
    """The result of `route`."""

    route: Route
    reason: DenseReason | None = None  # why no rule runs; None if one does


class LayerRules(NamedTuple):
    """A policy's rules for one layer. Layers with equal rules are routed alike."""

    least_q: int | None = None  # queries from which the prefill rule runs, 1 for a static rule; None without a rule
    decodes: bool = False  # whether it has a decode rule
    borders: tuple[int, int | None] = (0, None)  # `dense_below` and `sparse_from`
    decode_borders: tuple[int, int | None] = (0, None)  # the same for decoding steps
    rollout: Rollout = Rollout()

    @property
    def any(self) -> bool:
        """Return whether the layer has a rule in any phase."""
        return self.least_q is not None or self.decodes


class PassState(NamedTuple):
    """The state of a layer during a forward pass."""

    blocked: DenseReason | None = None  # why everything is dense: kill switch, rollout, guard, failures
    was_long: bool = False  # whether the previous sequence ran sparse, for lengths between the two borders
    decode_was_long: bool = False


class CallProperties(NamedTuple):
    """The properties of an attention call."""

    unserved: DenseReason | None = None  # why no rule can serve its tensors, mask or arguments
    own_pattern: bool = False  # whether the model gives the layer a window or chunks
    serves_own_pattern: bool = False  # whether dynaxx's kernels serve the model's own pattern here and are faster


class SequenceLengths(NamedTuple):
    """One sequence of a call. Its queries are the last of its keys."""

    seqlen_q: int
    seqlen_k: int
    decoding: bool = False  # whether it is a decoding step; see `is_step`
    causal: bool = True  # False for padding, and for a prefix that is visible in both directions
    unchosen: DenseReason | None = None  # why the rollout excludes its request


def is_step(seqlen_q: int, seqlen_k: int) -> bool:
    """Return whether a call is a decoding step: one query, or a few over a longer cache (assisted decoding)."""
    return seqlen_q == 1 or seqlen_q < min(MAX_QUERIES, seqlen_k)


def route(layer: LayerRules, state: PassState, call: CallProperties, sequence: SequenceLengths) -> Decision:
    """Decide how one sequence runs in one layer. This is a pure function."""
    decodes = sequence.decoding and (sequence.seqlen_q == 1 or layer.decodes)
    reason = _why_no_rule(layer, state, call, sequence, decodes)
    if reason is None:
        return Decision(Route.DECODE if decodes else Route.RULE)
    original = not reason.keeps_own_pattern or (state.blocked is not None and not state.blocked.keeps_own_pattern)
    return Decision(Route.OWN_PATTERN if call.serves_own_pattern and not original else Route.DENSE, reason)


def _why_no_rule(
    layer: LayerRules, state: PassState, call: CallProperties, sequence: SequenceLengths, decodes: bool
) -> DenseReason | None:
    if not layer.any:
        return DenseReason.NO_RULE
    if decodes and not layer.decodes:
        return DenseReason.DECODE
    if not decodes and layer.least_q is None:
        return DenseReason.NO_RULE
    if not decodes and sequence.seqlen_q < (layer.least_q or 0):
        return DenseReason.FEW_QUERIES if sequence.causal else DenseReason.PADDING
    if call.own_pattern:
        return DenseReason.OWN_PATTERN
    if state.blocked is not None:
        return state.blocked
    if not sequence.causal:
        return DenseReason.PADDING
    borders, before = (layer.decode_borders, state.decode_was_long) if decodes else (layer.borders, state.was_long)
    if not is_long(sequence.seqlen_k, *borders, before=before):
        return DenseReason.BELOW
    if not layer.rollout.covers_length(sequence.seqlen_k):
        return DenseReason.LENGTH_LEFT_OUT
    return call.unserved or sequence.unchosen
