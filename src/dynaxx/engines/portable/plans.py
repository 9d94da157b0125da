# SPDX-License-Identifier: Apache-2.0
"""Turn a model and its policy into the gather rules of each layer, or return the reasons why that is impossible."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from dynaxx.engines.portable.rules import GatherRule
from dynaxx.errors import UnsupportedInputError
from dynaxx.integrations.transformers.decoder import Decoder, window_of
from dynaxx.patterns import Causal, Pattern, SlidingWindow
from dynaxx.policy import LayerPlan, Policy, resolve

MAX_REASONS = 5
BLOCK = (64, 64)  # block size of layouts of a model's own windows


class Heads(NamedTuple):
    """Some q heads of a layer, and the rule that they follow; None means dense."""

    heads: tuple[int, ...]
    rule: GatherRule | None


class PortableRules(NamedTuple):
    """The rules of one layer; together they cover all its q heads once."""

    parts: tuple[Heads, ...]

    @property
    def is_dense(self) -> bool:
        """Return whether every head sees all keys."""
        return all(part.rule is None for part in self.parts)


def portable_rules(
    model: nn.Module, policy: Policy | None = None, window: int | tuple[int, int] | None = None
) -> dict[int, PortableRules]:
    """Return the rules of every layer.

    Args:
        model: a decoder or an encoder of transformers.
        policy: a policy with static rules for the layers that see everything; None uses only the model's own windows.
        window: window of an encoder, as in `dynaxx.apply`.

    Raises:
        PolicyError: the policy is for another model.
        UnsupportedInputError: plain operations cannot serve a layer exactly; the error lists the reasons.
    """
    decoder = Decoder.of(model)
    causal = is_causal(decoder)
    if policy is not None:
        decoder.check(policy)
    reasons = _model_refusals(decoder, policy, window, causal)
    plans = {} if policy is None or reasons else resolve(policy)
    rules = {}
    for index in decoder.layers:
        heads = tuple(range(decoder.facts.q_heads))
        own = own_window(decoder, index)
        side = None if own is None else SlidingWindow(own)
        if side is None and window is not None:
            side = SlidingWindow(window)
        if index in plans:
            parts, wrong = _layer(plans[index], index, side)
            reasons += wrong
            rules[index] = PortableRules(parts)
        else:
            rule = None if side is None else GatherRule.of(side, BLOCK, causal=causal)
            rules[index] = PortableRules((Heads(heads, rule),))
    check_reasons(("portable", "in plain operations"), decoder, reasons)
    return rules


def check_reasons(form: tuple[str, str], decoder: Decoder, reasons: list[str]) -> None:
    """Raise UnsupportedInputError with the first reasons why a form, given with how it exports, has none of a model."""
    if reasons:
        shown = reasons[:MAX_REASONS] + [f"and {len(reasons) - MAX_REASONS} more"] * (len(reasons) > MAX_REASONS)
        raise UnsupportedInputError(f"an export of {decoder.facts.model_type} {form[1]}", {form[0]: shown})


def portable_refusals(model: nn.Module, policy: Policy | None = None) -> list[str]:
    """Return the reasons why a model with a policy cannot be exported in plain operations; empty if it can."""
    try:
        portable_rules(model, policy)
    except UnsupportedInputError as error:
        return [reason for reasons in error.reasons.values() for reason in reasons]
    return []


def own_window(decoder: Decoder, index: int) -> int | None:
    """Return the window of a layer in the model's own config, the query's own key included; None if it has none.

    In bidirectional models, a window W shows W - 1 keys on each side.
    """
    config, types = decoder.config, getattr(decoder.config, "layer_types", None)
    found = window_of(decoder.layers[index])
    if not found and (types is None or types[index] == "sliding_attention"):
        used = getattr(config, "use_sliding_window", True)
        found = getattr(config, "sliding_window", None) if used else None
    return found or None


def is_causal(decoder: Decoder) -> bool:
    """Return whether a model's attention hides the keys after each query."""
    return all(getattr(module, "is_causal", True) for module in decoder.layers.values())


def _model_refusals(
    decoder: Decoder, policy: Policy | None, window: int | tuple[int, int] | None, causal: bool
) -> list[str]:
    config, reasons = decoder.config, []
    if getattr(config, "is_encoder_decoder", False):
        reasons.append("encoder-decoder models are not served: export the encoder by itself")
    if getattr(config, "attention_chunk_size", None):
        reasons.append("attention in chunks is not served")
    if window is not None and causal:
        reasons.append("`window` is for encoders: give a decoder a policy with a SlidingWindow rule")
    if policy is not None and not causal:
        reasons.append("a policy is for decoders: give an encoder a `window`")
    for rule in () if policy is None else policy.rules:
        if rule.phase == "decode" and rule.attention.build() is not None:
            reasons.append("decode rules choose pages by the query: remove them, or export with form='custom'")
            break
    return reasons


def _layer(plan: LayerPlan, index: int, side: Pattern | None) -> tuple[tuple[Heads, ...], list[str]]:
    parts, reasons = [], []
    for group in plan.groups:
        if not isinstance(group.rule, Pattern):
            reasons.append(
                f"layer {index}: {group.rule!r} looks at the data; export with form='custom', or give the "
                "layer a static rule such as Sink(64) | SlidingWindow(1024)"
            )
            continue
        pattern: Pattern | None = None if isinstance(group.rule, Causal) else group.rule
        if side is not None:
            pattern = side if pattern is None else pattern & side
        if pattern is None:
            parts.append(Heads(group.heads, None))
            continue
        try:
            parts.append(Heads(group.heads, GatherRule.of(pattern, plan.block_size, causal=True)))
        except ValueError as error:
            reasons.append(f"layer {index}: {error}; export with form='custom'")
    return tuple(parts), reasons
