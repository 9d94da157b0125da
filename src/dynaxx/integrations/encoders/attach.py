# SPDX-License-Identifier: Apache-2.0
"""Run encoders whose attention is sparse by design, Longformer and BigBird and their kin, on dynaxx's kernels.

These models do not go through `AttentionInterface`, so the attention modules of the user's own model object are
replaced: each by an instance of a subclass that shares the module's parameters, children and hooks. Nothing of
transformers itself changes, names in the state dict stay, and what the subclass does not serve runs in the class it
derives from.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from dynaxx.errors import UnsupportedInputError

GlobalKeys = Literal["fused", "merged"]
Replacements = dict[type[nn.Module], type[Any]]  # attention of transformers: its subclass that runs on dynaxx
Made = TypeVar("Made")
SPARSE_MODELS = ("longformer", "led", "big_bird", "bigbird_pegasus")


class Shared:
    """What the replaced modules of one model have in common: the choice, the counts, and what a pass has worked out.

    Attributes:
        global_keys: see `apply_to_encoder`.
        sparse: calls that dynaxx served; dense: the others, by reason.
    """

    def __init__(self, global_keys: GlobalKeys | None, configs: list[Any]) -> None:
        self.global_keys = global_keys
        self.sparse = 0
        self.dense: Counter[str] = Counter()
        self._configs = configs
        self._pass: tuple[weakref.ref[Tensor], int, dict[Hashable, Any]] | None = None

    @property
    def wants_attentions(self) -> bool:
        """Whether a config asks for the attention weights, which no fused kernel has."""
        return any(getattr(config, "output_attentions", False) for config in self._configs)

    def once_per_mask(self, mask: Tensor, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return what `make` returns for this mask: the layers of one forward pass get the same tensor."""
        version = 0 if mask.is_inference() else mask._version
        known = self._pass
        if known is None or known[0]() is not mask or known[1] != version:
            known = self._pass = (weakref.ref(mask), version, {})  # masks may be large, and what is made of them is not
        if key not in known[2]:
            with torch.inference_mode(False), torch.no_grad():  # a layout must serve training, too
                known[2][key] = make()
        found: Made = known[2][key]
        return found

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles of a model."""
        return {**self.__dict__, "_pass": None}


class EncoderHandle:
    """The replaced attention of one model. Also a context manager that gives the original back."""

    def __init__(self, model: nn.Module, kinds: Replacements, shared: Shared) -> None:
        self._kinds = kinds
        self._shared = shared
        self._swapped: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []  # parent, name, original, ours
        parents = [module for module in model.modules() if self._originals_in(module)]
        for parent in parents:
            self._swap(parent)
        # A model may put a fresh attention module in place (BigBird, for a short sequence): replaced before it runs.
        self._hooks = [parent.register_forward_pre_hook(self._swap) for parent in parents]

    @property
    def active(self) -> bool:
        """Whether some module of the model is still replaced."""
        return any(getattr(parent, name, None) is ours for parent, name, _, ours in self._swapped)

    def remove(self) -> None:
        """Put the original modules back. More calls do nothing."""
        for hook in self._hooks:
            hook.remove()
        for parent, name, original, ours in self._swapped:
            if getattr(parent, name, None) is ours:
                original.training = ours.training
                setattr(parent, name, original)
        self._swapped.clear()

    def stats(self) -> dict[str, Any]:
        """Count layer calls: "sparse_calls" that dynaxx served, "dense_calls" of transformers' own code by reason."""
        return {"sparse_calls": self._shared.sparse, "dense_calls": dict(self._shared.dense)}

    def reset_stats(self) -> None:
        """Start counting from zero."""
        self._shared.sparse = 0
        self._shared.dense.clear()

    def _originals_in(self, parent: nn.Module) -> list[tuple[str, nn.Module]]:
        return [(name, child) for name, child in parent.named_children() if type(child) in self._kinds]

    def _swap(self, parent: nn.Module, _inputs: object = None) -> None:
        for name, original in self._originals_in(parent):
            ours = _sharing(original, self._kinds[type(original)], self._shared)
            self._swapped = [entry for entry in self._swapped if entry[:2] != (parent, name)]
            self._swapped.append((parent, name, original, ours))
            setattr(parent, name, ours)

    def __enter__(self) -> EncoderHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        state = "active" if self.active else "removed"
        return f"<dynaxx attention in {len(self._hooks)} layers, {state}>"


def apply_to_encoder(model: nn.Module, *, global_keys: GlobalKeys | None = None) -> EncoderHandle:
    """Run a Longformer, LED, BigBird or BigBirdPegasus model on dynaxx's kernels, in place.

    Outputs and gradients are transformers' own within rounding: the same windows, global tokens, random blocks and
    padding. Calls that the kernels cannot serve, such as those that want the attention weights, run in transformers'
    code and are counted by reason.

    Args:
        model: the model, or one that holds it, such as `LongformerForSequenceClassification`; any device and dtype.
        global_keys: how queries see global tokens: "fused", with their window in one pass, or "merged", in a pass of
            their own whose result is merged by its log-sum-exp. For BigBird the same of blocks that it attends to
            more than once. By default the faster one: fused for Longformer and LED, merged for BigBird.

    Returns:
        A handle; `handle.remove()` puts the original modules back. It is a context manager too.

    Raises:
        TypeError: no model.
        ValueError: an unknown choice, or a model that runs on dynaxx already.
        UnsupportedInputError: a model without such attention, or with blocks that no layout has.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a transformers model, got {type(model).__name__}")
    if global_keys not in (None, *get_args(GlobalKeys)):
        raise ValueError(f"`global_keys` must be one of {get_args(GlobalKeys)}, got {global_keys!r}")
    from dynaxx.integrations.encoders import bigbird, longformer

    kinds: Replacements = {**longformer.REPLACEMENTS, **bigbird.REPLACEMENTS}
    modules = list(model.modules())
    if any(type(module) in kinds.values() for module in modules):
        raise ValueError("`model` runs on dynaxx already; call remove() on its handle first")
    found = [module for module in modules if type(module) in kinds]
    if not found:
        raise _refusal(
            model,
            "it holds no attention of Longformer, LED, BigBird or BigBirdPegasus; "
            "for another model name a policy: apply(model, policy)",
        )
    if reasons := {reason for module in found for reason in bigbird.refusals(module)}:
        raise _refusal(model, *sorted(reasons))
    configs = {id(module.config): module.config for module in modules if hasattr(module, "config")}
    return EncoderHandle(model, kinds, Shared(global_keys, list(configs.values())))


def is_sparse_encoder(model: nn.Module) -> bool:
    """Return whether a model has attention that `apply_to_encoder` serves. Imports transformers only for its models."""
    if not isinstance(model, nn.Module):
        return False
    names = {type(module).__module__ for module in model.modules()}
    return any(name.startswith(f"transformers.models.{kind}.") for name in names for kind in SPARSE_MODELS)


def _sharing(original: nn.Module, kind: Any, shared: Shared) -> nn.Module:
    """Return a module of `kind` with everything of the original: the same parameters, children and hooks."""
    ours: nn.Module = kind.__new__(kind)
    ours.__dict__.update(original.__dict__)
    ours.__dict__["dynaxx"] = shared
    return ours


def _refusal(model: nn.Module, *reasons: str) -> UnsupportedInputError:
    return UnsupportedInputError(type(model).__name__, {"transformers": list(reasons)})
