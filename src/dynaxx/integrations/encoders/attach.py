# SPDX-License-Identifier: Apache-2.0
"""Run encoders with built-in sparse attention (Longformer, LED, BigBird) on dynaxx's kernels.

These models do not use `AttentionInterface`, so this module replaces the attention modules of the given model object.
Each replacement is an instance of a subclass that shares the parameters, children and hooks of the original.
transformers itself is unchanged, the names in the state dict stay, and calls that the subclass does not serve run in
its base class.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, get_args

from torch import nn

from dynaxx.errors import UnsupportedInputError
from dynaxx.integrations.encoders.shared import GlobalKeys, Shared

Replacements = dict[type[nn.Module], type[Any]]  # attention class of transformers -> subclass that runs on dynaxx
SPARSE_MODELS = ("longformer", "led", "big_bird", "bigbird_pegasus")


class EncoderHandle(AbstractContextManager["EncoderHandle"]):
    """The replaced attention of one model. Also a context manager that restores the original."""

    def __init__(self, model: nn.Module, kinds: Replacements, shared: Shared) -> None:
        self._kinds = kinds
        self._shared = shared
        self._swapped: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []  # parent, name, original, ours
        parents = [module for module in model.modules() if self._originals_in(module)]
        for parent in parents:
            self._swap(parent)
        # A model may create new attention modules (BigBird, for a short sequence). Hooks replace them before they run.
        self._hooks = [parent.register_forward_pre_hook(self._swap) for parent in parents]

    @property
    def active(self) -> bool:
        """Return whether any module of the model is still replaced."""
        return any(getattr(parent, name, None) is ours for parent, name, _, ours in self._swapped)

    def remove(self) -> None:
        """Restore the original modules. Further calls do nothing."""
        for hook in self._hooks:
            hook.remove()
        for parent, name, original, ours in self._swapped:
            if getattr(parent, name, None) is ours:
                original.training = ours.training
                setattr(parent, name, original)
        self._swapped.clear()

    def stats(self) -> dict[str, Any]:
        """Return counts of layer calls: "sparse_calls" on dynaxx's kernels, and other "dense_calls" by reason."""
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

    def __exit__(self, *_: object) -> None:
        """Restore the original attention."""
        self.remove()

    def __repr__(self) -> str:
        """Return the number of layers, and whether the handle is active."""
        state = "active" if self.active else "removed"
        return f"<dynaxx attention in {len(self._hooks)} layers, {state}>"


def apply_to_encoder(model: nn.Module, *, global_keys: GlobalKeys | None = None) -> EncoderHandle:
    """Run a Longformer, LED, BigBird or BigBirdPegasus model on dynaxx's kernels, in place.

    Outputs and gradients equal those of transformers within rounding, with the same windows, global tokens, random
    blocks and padding. Calls that the kernels cannot serve, such as requests for attention weights, run in the code of
    transformers and are counted by reason.

    Args:
        model: the model, or one that contains it, such as `LongformerForSequenceClassification`; any device and dtype.
        global_keys: how queries attend to global tokens. "fused" computes them together with the window in one pass;
            "merged" computes them in a separate pass and merges the results by their log-sum-exp. For BigBird the
            choice concerns blocks that are visited more than once. The default is the faster one: "fused" for
            Longformer and LED, "merged" for BigBird.

    Returns:
        A handle, also a context manager; `handle.remove()` restores the original modules.

    Raises:
        TypeError: `model` is not a model.
        ValueError: `global_keys` is unknown, or the model runs on dynaxx already.
        UnsupportedInputError: the model has no such attention, or its block size has no layout.
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
            "it has no attention of Longformer, LED, BigBird or BigBirdPegasus; "
            "for other models pass a policy: apply(model, policy)",
        )
    if reasons := {reason for module in found for reason in bigbird.refusals(module)}:
        raise _refusal(model, *sorted(reasons))
    configs = {id(module.config): module.config for module in modules if hasattr(module, "config")}
    return EncoderHandle(model, kinds, Shared(global_keys, list(configs.values())))


def is_sparse_encoder(model: nn.Module) -> bool:
    """Return whether `apply_to_encoder` serves a model. Imports transformers only for models of transformers."""
    if not isinstance(model, nn.Module):
        return False
    names = {type(module).__module__ for module in model.modules()}
    return any(name.startswith(f"transformers.models.{kind}.") for name in names for kind in SPARSE_MODELS)


def _sharing(original: nn.Module, kind: Any, shared: Shared) -> nn.Module:
    """Return a module of `kind` that shares the original's parameters, children and hooks."""
    ours: nn.Module = kind.__new__(kind)
    ours.__dict__.update(original.__dict__)
    ours.__dict__["dynaxx"] = shared
    return ours


def _refusal(model: nn.Module, *reasons: str) -> UnsupportedInputError:
    return UnsupportedInputError(type(model).__name__, {"transformers": list(reasons)})
