# SPDX-License-Identifier: Apache-2.0
"""Write a policy as `sparse_attention_config` of a Hugging Face config.json, and read one, where its words suffice.

NVIDIA's Model-Optimizer writes this entry; its vLLM plugin and TensorRT-LLM read it. It has two algorithms:

    skip_softmax    a kernel skips a tile whose scores are all below the row's maximum so far, by a factor `threshold`:
                    threshold = a * exp(b * target_sparsity) / seqlen, with a and b for prefill and for decode
    sparse_softmax  of every M scores the N largest, all of `dense_sink_tokens` and `dense_recent_tokens`

The first is `Threshold(threshold, of="max", per="head")` at one length. dynaxx has nothing like the second.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, TypeGuard

import dynaxx
from dynaxx.arguments import typed
from dynaxx.engines.exporting import beyond_settings
from dynaxx.errors import UnsupportedInputError
from dynaxx.layout import as_block_size
from dynaxx.policy import ModelFacts, Policy, Rule
from dynaxx.policy.resolve import head_rules
from dynaxx.policy.specs import AttentionRule
from dynaxx.selection import Hybrid, Threshold
from dynaxx.storage import write_whole_file

FORMULA = "a * exp(b * target_sparsity)"
TILE = 128  # queries and keys of a tile for which Model-Optimizer calibrates
TARGET = 0.5  # any value: with b = 0 it has no effect, but TensorRT-LLM skips nothing without it


@typed
def sparse_attention_config(policy: Policy, *, seqlen: int) -> dict[str, Any]:
    """Return a policy as the value of `sparse_attention_config`.

    The policy has one prefill rule, `Threshold(share, of="max", per="head")`, for all heads of some layers. The engine
    compares the largest score of a tile with the largest so far, where dynaxx compares estimated masses: the scorer has
    no counterpart, and the quality must be measured in the engine.

    Args:
        policy: a policy for any model.
        seqlen: keys for which the engine's threshold is the policy's. Thresholds of engines are inverse to the length,
            so it skips more in shorter sequences.

    Raises:
        UnsupportedInputError: the entry cannot say what the policy says.
    """
    if seqlen < 1:
        raise ValueError(f"`seqlen` must be >= 1, got {seqlen}")
    reasons = beyond_settings(policy, "skip_softmax")
    if policy.border > 0:
        reasons.append(f"prompts of any length skip, the policy's from {policy.border} keys: remove `dense_below`")
    layers = {layer: heads for layer, heads in head_rules(policy).items() if any(heads.values())}
    rules = {repr(rule): rule for heads in layers.values() for rule in heads.values()}
    if any(len(heads) < policy.model.q_heads for heads in layers.values()):
        reasons.append("a layer skips in all its heads or in none: give the rule to all heads of a layer")
    elif len(rules) != 1:
        reasons.append(f"there is one rule for all heads, and the policy has {len(rules)}: tune with uniform budgets")
    share = None
    if len(rules) == 1:
        share = _share_of(next(iter(rules.values())), policy, reasons)
    if reasons or share is None:
        raise _refused("a policy", reasons)
    group: dict[str, Any] = {"algorithm": "skip_softmax", "targets": ["Attention"]}
    if dense := [_name(layer) for layer in range(policy.model.layers) if layer not in layers]:
        group["ignore"] = dense
    group["threshold_scale_factor"] = {"formula": FORMULA, "prefill": {"a": share * seqlen, "b": 0.0}}
    group["target_sparsity"] = {"prefill": TARGET}
    return {"config_groups": {"group_0": group}, "producer": {"name": "dynaxx", "version": dynaxx.__version__}}


@typed
def policy_of_config(config: Any, *, seqlen: int, decode: Literal["refuse", "dense"] = "refuse") -> Policy:
    """Return the policy that the `sparse_attention_config` of a model's config describes.

    Args:
        config: a transformers config, as `AutoConfig.from_pretrained` returns it for the checkpoint.
        seqlen: keys for which the policy's threshold is the engine's.
        decode: skipped tiles while decoding have no counterpart in a policy; "dense" leaves them out.

    Raises:
        UnsupportedInputError: the config has no such entry, or a policy cannot say what it says.
    """
    if seqlen < 1:
        raise ValueError(f"`seqlen` must be >= 1, got {seqlen}")
    group = _skip_group(getattr(config, "sparse_attention_config", None))
    facts, reasons = ModelFacts.of(config), []
    if group.get("initial_disabled_steps") or group.get("disabled_until_timestep"):
        reasons.append("steps that stay dense are for diffusion: see dynaxx.video")
    if decode == "refuse" and "decode" in (group.get("threshold_scale_factor") or ()):
        reasons.append(
            'no decode rule has a threshold: read it with decode="dense", or give decoding a rule of its own'
        )
    share = _threshold(group, "prefill", seqlen, reasons)
    if share is not None and not 0 < share < 1:
        reasons.append(f"the threshold must be between 0 and 1, got {share:g} at {seqlen} keys")
    layers = _layers_but(group.get("ignore", ()), facts.layers, reasons)
    if reasons or share is None:
        raise _refused("a checkpoint's sparse_attention_config", reasons)
    rule = Rule.of(Threshold(share, of="max", per="head"), layers=layers)
    return Policy(model=facts, block_size=TILE, rules=(rule,))


def export_model(folder: Path, policy: Policy | None, out: Path, options: Mapping[str, str]) -> dict[str, Any]:
    """Write the config.json of a model's folder to `out`, with the policy in it.

    Raises:
        ValueError: no policy, an unknown option, or no number of `seqlen`; else as `sparse_attention_config`.
    """
    if policy is None:
        raise ValueError("--format tensorrt_llm needs a policy: a checkpoint's own pattern is in its config already")
    if set(options) != {"seqlen"} or not re.fullmatch(r"[1-9]\d{0,9}", options["seqlen"], flags=re.ASCII):
        raise ValueError(f"--format tensorrt_llm needs --option seqlen=TOKENS and no other option, got {dict(options)}")
    entry = sparse_attention_config(policy, seqlen=int(options["seqlen"]))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    out.mkdir(parents=True, exist_ok=True)
    written = json.dumps({**config, "sparse_attention_config": entry}, indent=2) + "\n"
    write_whole_file(out / "config.json", lambda file: file.write(written.encode()))
    return entry


def _share_of(rule: AttentionRule | None, policy: Policy, reasons: list[str]) -> float | None:
    """Return the threshold of a rule, or None after appending the reason to `reasons`."""
    if isinstance(rule, Hybrid):
        reasons.append(f"skip_softmax keeps no tile unseen, so it cannot promise {rule.pattern!r}")
        return None
    if not isinstance(rule, Threshold):
        name = "dense" if rule is None else repr(rule)
        reasons.append(
            f'skip_softmax compares with a row\'s maximum: Threshold(share, of="max", per="head"), not {name}'
        )
        return None
    if rule.of != "max" or (rule.per != "head" and policy.model.q_heads != policy.model.kv_heads):
        reasons.append(
            'skip_softmax compares with a row\'s maximum, head by head: Threshold(..., of="max", per="head")'
        )
    if isinstance(rule.share, tuple) or not 0 < rule.share < 1:
        reasons.append(f"there is one threshold between 0 and 1 for all heads, got {rule.share}")
        return None
    sizes = {as_block_size(policy.block_size if each.block_size is None else each.block_size) for each in policy.rules}
    if sizes != {(TILE, TILE)}:
        reasons.append(f"kernels skip tiles of {TILE} queries and keys: give the policy block_size {TILE}")
    return rule.share


def _skip_group(entry: Any) -> dict[str, Any]:
    """Return the only config group of an entry, which must be of skip_softmax."""
    groups = entry.get("config_groups") if isinstance(entry, dict) else None
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise _refused(
            "a config", ["it has no `sparse_attention_config` with `config_groups`, as Model-Optimizer writes"]
        )
    names = [group.get("algorithm") for group in groups.values()]
    if names != ["skip_softmax"]:
        other = next((name for name in names if name != "skip_softmax"), None)
        reason = "it has several groups" if other is None else f"a policy has no rule like {other!r}, only skip_softmax"
        raise _refused("a checkpoint's sparse_attention_config", [reason])
    found: dict[str, Any] = next(iter(groups.values()))
    return found


def _threshold(group: Mapping[str, Any], phase: str, seqlen: int, reasons: list[str]) -> float | None:
    """Return the threshold of a phase, or None after appending the reason to `reasons`."""
    factor, target = group.get("threshold_scale_factor"), group.get("target_sparsity")
    factors = factor.get(phase) if isinstance(factor, dict) and factor.get("formula") == FORMULA else None
    found = factors if isinstance(factors, dict) else {}
    a, b, target = found.get("a"), found.get("b"), target.get(phase) if isinstance(target, dict) else target
    if not (_is_finite(a) and _is_finite(b) and _is_finite(target)):
        reasons.append(
            f"`threshold_scale_factor` must have the formula {FORMULA!r}, and {phase} its a, b and target_sparsity"
        )
        return None
    return a * math.exp(min(b * target, 700.0)) / seqlen


def _is_finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _layers_but(patterns: Iterable[str], count: int, reasons: list[str]) -> list[int]:
    """Return the layers whose attention no pattern names, by Model-Optimizer's rule of `*pattern*`."""
    sparse = set(range(count))
    for pattern in patterns:
        ignored = {layer for layer in range(count) if fnmatch(_name(layer), f"*{pattern}*")}
        if not ignored:
            reasons.append(f"`ignore` names {pattern!r}, which is no attention layer of this model")
        sparse -= ignored
    if not sparse:
        reasons.append("`ignore` names every layer")
    return sorted(sparse)


def _name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn"


def _refused(what: str, reasons: list[str]) -> UnsupportedInputError:
    return UnsupportedInputError(what, {"tensorrt_llm": reasons})
