# SPDX-License-Identifier: Apache-2.0
"""Find the decoder in a transformers model: its config, its attention modules, and reasons why it cannot be served."""

from __future__ import annotations

import dis
import inspect
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from dynaxx.errors import UnsupportedInputError
from dynaxx.integrations.runtime.identity import ByIdentity
from dynaxx.policy import ModelFacts, Policy, resolve
from dynaxx.policy.explaining import explain_errors


class _Name(str):
    """The name under which attention is registered. A pickled model contains the original name instead."""

    __slots__ = ("before",)
    before: str

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Pickle as the original name, which other processes know."""
        return str, (self.before,)

    def __deepcopy__(self, memo: object) -> _Name:
        """Keep the name, so that a copy of a model calls dynaxx, which warns that the copy has no handle."""
        return self


class _EagerName(_Name):
    """The name for a model whose original attention is "eager", which returns attention weights.

    It compares as a string, except where transformers asks whether `config.output_attentions` may be set.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other == "eager" if _asks_for_weights() else str(self) == other

    def __ne__(self, other: object) -> bool:
        return other != "eager" if _asks_for_weights() else str(self) != other

    def __hash__(self) -> int:
        return hash(str(self))


def _asks_for_weights() -> bool:
    """Return whether the setter or the validator of `output_attentions` compares a name."""
    names = ("output_attentions", "validate_output_attentions")
    return not torch.compiler.is_compiling() and sys._getframe(2).f_code.co_name in names


def name_for(before: str) -> str:
    """Return dynaxx's name for a model whose original attention is `before`."""
    if not COMPILERS_READ_NAMES:
        return NAME
    name = (_EagerName if before == "eager" else _Name)(NAME)
    name.before = before
    return name


ORIGINALS: ByIdentity[str] = ByIdentity()  # the original attention of a model, by its config


def before_of(config: Any) -> str:
    """Return the name of the attention that a model had before dynaxx, from its config or that of a copy."""
    found = config._attn_implementation
    if found == NAME:
        found = getattr(found, "before", None) or ORIGINALS.get(config)
    return found if found in SERVED else DENSE


COMPILERS_READ_NAMES = torch.__version__ >= "2.13"  # torch.compile of 2.11 fails on a subclass of str
NAME = "dynaxx"  # transformers treats names with "flash", "sdpa", "flex_attention" or "/" specially
DENSE = "sdpa"
OTHER_SEQUENCE = {"encoder_hidden_states", "key_value_states"}  # arguments of attention to another sequence
SERVED = {"sdpa", "eager"}  # attention functions of transformers to which a handle can fall back


class Decoder:
    """The text decoder of a model: the module that owns its config, and its attention modules."""

    def __init__(self, owner: Any, config: Any, layers: dict[int, nn.Module]) -> None:
        self.owner = owner
        self.config = config
        self.layers = layers

    @classmethod
    def of(cls, model: nn.Module) -> Decoder:
        """Find the decoder in a model.

        Raises:
            TypeError: `model` is not a model.
            UnsupportedInputError: the model has no such decoder.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"`model` must be a transformers model, got {type(model).__name__}")
        from transformers import PreTrainedModel

        owners = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        if not owners:
            raise _refusal(model, "it contains no transformers.PreTrainedModel")
        config = owners[0].config.get_text_config(decoder=True)
        owner = next((module for module in owners if module.config is config), owners[0])
        layers: dict[int, nn.Module] = {}
        for index, module in _numbered(list(filter(_is_attention, owner.modules()))):
            if index in layers:
                advice = "; use apply(model.get_encoder())" if getattr(config, "is_encoder_decoder", False) else ""
                reason = f"layer {index} has two attention modules; cross attention is not supported{advice}"
                raise _refusal(model, reason)
            layers[index] = module
        if not layers:
            raise _refusal(model, why_no_attention(owner))
        if all(map(_is_of_encoder, layers.values())):
            config = next(iter(layers.values())).config
        if max(layers) >= config.num_hidden_layers:
            raise _refusal(model, f"it has an attention layer {max(layers)} beyond its {config.num_hidden_layers}")
        layers = dict(sorted(layers.items()))
        return cls(owner, config, layers)

    def weak(self) -> Callable[[], Decoder | None]:
        """Return a function that returns this decoder, or None once the model is collected.

        The model may have changed meanwhile (peft copies modules, layers are added or dropped): its decoder is the one
        that was found first, without the modules that are gone.
        """
        owner, config = weakref.ref(self.owner), self.config
        layers = {index: weakref.ref(module) for index, module in self.layers.items()}

        def again() -> Decoder | None:
            alive = {index: module for index, each in layers.items() if (module := each()) is not None}
            return None if (found := owner()) is None else Decoder(found, config, alive)

        return again

    def implementations(self) -> list[tuple[Any, str | None]]:
        """Return the configs of the model's modules, outer ones first, each with the name of its attention."""
        found: dict[int, tuple[Any, str | None]] = {}
        waiting = [config for module in self.owner.modules() if (config := getattr(module, "config", None)) is not None]
        while waiting:
            config = waiting.pop(0)
            if id(config) not in found and hasattr(config, "_attn_implementation"):
                found[id(config)] = config, config._attn_implementation
                waiting += filter(None, (getattr(config, name, None) for name in getattr(config, "sub_configs", ())))
        return list(found.values())

    @property
    def body(self) -> nn.Module:
        """The innermost module around all attention modules, which maps token ids to hidden states."""
        from transformers import PreTrainedModel

        wanted = set(self.layers.values())
        around = [m for m in self.owner.modules() if isinstance(m, PreTrainedModel) and wanted <= set(m.modules())]
        return around[-1]

    @property
    def facts(self) -> ModelFacts:
        """The facts that a policy for this model must contain.

        Raises:
            UnsupportedInputError: the config does not say them.
        """
        try:
            return ModelFacts.of(self.config)
        except (AttributeError, TypeError, ValueError) as error:
            why = explain_errors(error) if isinstance(error, ValidationError) else str(error)
            raise _refusal(self.owner, f"its {type(self.config).__name__} has no usable heads: {why}") from error

    @property
    def name(self) -> str:
        """The name for metrics: the name it was loaded by (the last part of a path), or else its type."""
        loaded = getattr(self.owner.config, "_name_or_path", "") or getattr(self.config, "_name_or_path", "")
        return model_label(str(loaded)) or str(self.facts.model_type)

    @property
    def head_share(self) -> tuple[int, int]:
        """(rank, ranks) where transformers' tensor parallelism gave this process some of the heads, else (0, 1)."""
        mesh, ranks = getattr(self.owner, "_device_mesh", None), getattr(self.owner, "_tp_size", None) or 1
        if mesh is None or ranks == 1:
            return 0, 1
        return (mesh["tp"] if mesh.ndim > 1 else mesh).get_local_rank(), ranks

    def check(self, policy: Policy) -> None:
        """Refuse a policy that this decoder cannot run exactly.

        Raises:
            PolicyError: the policy is for another model.
            UnsupportedInputError: the decoder cannot run the policy; the error lists the reasons.
        """
        found = self.facts
        policy.model.check(found)
        reasons = self.refusals(resolve(policy))
        if reasons:
            raise UnsupportedInputError(f"{found.model_type} with a policy", {"transformers": reasons})

    def refusals(self, sparse: Iterable[int]) -> list[str]:
        """Return the reasons why this model cannot run with the layers in `sparse` sparse."""
        config, reasons = self.config, []
        before = {implementation(module) for module in self.layers.values()} - {NAME}
        if before - SERVED or len(before) > 1:
            reasons.append(
                f"its attention is {sorted(map(str, before))}; call model.set_attn_implementation({DENSE!r}) first"
            )
        if getattr(config, "is_encoder_decoder", False) and not all(map(_is_of_encoder, self.layers.values())):
            reasons.append("encoder-decoder attention is not supported; use apply(model.get_encoder())")
        rules = [index for index in sparse if index in self.layers]
        reasons += why_masks_differ(self.owner, self.layers.values())
        if rules and getattr(config, "kv_lora_rank", None):
            reasons.append("multi-head latent attention cannot follow a policy; use apply(model) without one")
        reasons += [
            f"layer {index} is not causal" for index in rules if not getattr(self.layers[index], "is_causal", True)
        ]
        return reasons


def why_no_attention(owner: nn.Module) -> str:
    """Return why no layer of a transformers model can be served."""
    kinds = sorted({type(module).__name__ for module in owner.modules() if "Attention" in type(module).__name__})
    if not kinds:
        return "it has no attention layers"
    if any(map(_is_attention, owner.modules())):
        return (
            f"its attention ({', '.join(kinds[:3])}) also attends to other sequences; cross attention is not supported"
        )
    return f"its attention ({', '.join(kinds[:3])}) does not go through transformers' AttentionInterface"


def why_masks_differ(owner: nn.Module, layers: Iterable[nn.Module]) -> list[str]:
    """Return why attention modules would give another attention function other masks than they give SDPA.

    DeepSeek-V3.2, GLM-5 and others choose tokens, and hide the others in the mask only if their attention is named
    "sdpa" or "eager". DeepSeek-V4 adds columns to masks, which must be numbers: it has no code for SDPA's bool masks.
    """
    kinds = {type(module) for module in layers}
    by_name = sorted(kind.__name__ for kind in kinds if any(map(_tests_name, _methods(kind))))
    if by_name:
        return [
            f"{', '.join(by_name)} chooses its own tokens, by masks that it makes only for attention named 'sdpa' or "
            "'eager'; leave this model as it is"
        ]
    writes = sorted(kind.__name__ for kind in kinds if any(map(_writes_mask, _methods(kind))))
    if writes and not getattr(owner, "_supports_sdpa", True):
        return [f"{', '.join(writes)} changes its masks, and only the 'eager' ones; leave this model as it is"]
    return []


def _methods(kind: type[nn.Module]) -> Iterator[CodeType]:
    """Yield the code of the methods of a module's class and of its bases in transformers."""
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for method in vars(base).values():
            code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
            if code is not None:
                yield code


def _tests_name(code: CodeType) -> bool:
    """Return whether code compares the name of the attention with "sdpa"."""
    consts = {each for const in code.co_consts for each in (const if isinstance(const, tuple) else (const,))}
    return "_attn_implementation" in code.co_names and DENSE in consts


def _writes_mask(code: CodeType) -> bool:
    """Return whether code gives the local variable `attention_mask` a new value."""
    written = (each.argval for each in dis.get_instructions(code) if each.opname.startswith("STORE_FAST"))
    return any("attention_mask" in (name if isinstance(name, tuple) else (name,)) for name in written)


def _is_attention(module: nn.Module) -> bool:
    """Return whether a module is self-attention that uses `AttentionInterface`."""
    if not hasattr(module, "config") or getattr(module, "is_cross_attention", False):
        return False
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return code is not None and "get_interface" in code.co_names


def _numbered(modules: list[nn.Module]) -> Iterator[tuple[int, nn.Module]]:
    """Yield attention modules with their layers. Encoders such as DistilBERT and GTE do not number their modules."""
    numbered = [module for module in modules if isinstance(getattr(module, "layer_idx", None), int)]
    if numbered:
        yield from ((int(module.layer_idx), module) for module in numbered)  # type: ignore[arg-type]
    elif all(map(_is_of_encoder, modules)) or not any(map(_may_cross, modules)):
        yield from enumerate(modules)


def _may_cross(module: nn.Module) -> bool:
    """Return whether an attention module may attend to another sequence."""
    return bool(OTHER_SEQUENCE & set(inspect.signature(type(module).forward).parameters))


def _is_of_encoder(module: nn.Module) -> bool:
    """Return whether an attention module says that it belongs to an encoder, as those of Whisper and wav2vec 2 do."""
    return getattr(module, "is_decoder", None) is False


def implementation(module: Any) -> str:
    """Return the name under which a module looks up its attention."""
    return module.config._attn_implementation


def model_label(loaded: str) -> str:
    """Return the name of a model: hub names unchanged, `owner/model` for its cache, else the last part of a path."""
    cached = re.search(r"models--([^/\\]+?)--([^/\\]+)[/\\]snapshots", loaded)
    if cached:
        return f"{cached[1]}/{cached[2]}"
    parts = re.split(r"[/\\]+", loaded.rstrip("/\\"))
    from_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", loaded) and parts[0].strip(".") and not Path(loaded).exists()
    return loaded if from_hub else parts[-1].strip(".")


def cache_of(output: Any) -> Any:
    """Return the cache in a model's output, None for none. From 5.24 on transformers calls it `cache`."""
    found = getattr(output, "cache", None)
    if found is not None or isinstance(getattr(type(output), "past_key_values", None), property):
        return found  # the property is the same value, and warns
    return getattr(output, "past_key_values", None)


def cache_name(model: Any) -> str:
    """Return the name of a model's argument for the cache: "cache", or "past_key_values" before transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def with_cache(model: Any, cache: Any) -> dict[str, Any]:
    """Return the argument that passes a cache: `model(ids, **with_cache(model, cache))`."""
    return {cache_name(model): cache}


def window_of(module: nn.Module) -> int | None:
    """Return the window of a local layer, or None for a full one."""
    return getattr(module, "sliding_window", None)


def _refusal(model: nn.Module, reason: str) -> UnsupportedInputError:
    return UnsupportedInputError(type(model).__name__, {"transformers": [reason]})
