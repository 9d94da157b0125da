# SPDX-License-Identifier: Apache-2.0
"""Run encoders with built-in sparse attention (Longformer, LED, BigBird) on dynaxx's kernels.

These models do not use `AttentionInterface`, so this module replaces the attention modules of the given model object.
Each replacement is an instance of a subclass that shares the parameters, children and hooks of the original.
transformers itself is unchanged, the names in the state dict stay, and calls that the subclass does not serve run in
its base class. A copied, pickled or saved model has the original modules, and needs no dynaxx.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

from torch import nn

from dynaxx.errors import UnsupportedInputError
from dynaxx.integrations.encoders.shared import Replaced, Shared

Replacements = dict[type[nn.Module], type[Any]]  # attention class of transformers -> subclass that runs on dynaxx
SPARSE_MODELS = ("longformer", "led", "big_bird", "bigbird_pegasus")


class EncoderHandle(AbstractContextManager["EncoderHandle"]):
    """The replaced attention of one model. Also a context manager that restores the original."""

    def __init__(self, model: nn.Module, kinds: Replacements, shared: Shared) -> None:
        self._model, self._kinds, self._shared = model, kinds, shared
        for kind in (*kinds.values(), _SwapHook, EncoderHandle):
            ForkingPickler.register(kind, _with_dynaxx)
        self._parents = [module for module in model.modules() if self._originals_in(module)]
        for parent in self._parents:
            self.swap(parent)
        # A model may create new attention modules (BigBird, for a short sequence). Hooks replace them before they run.
        self._hooks = [parent.register_forward_pre_hook(_SwapHook(self)) for parent in self._parents]

    def __reduce__(self) -> NoReturn:
        """Raise TypeError, because a handle belongs to one model object in one process."""
        raise TypeError("a handle cannot be copied or pickled: copy or pickle the model, and call dynaxx.apply on it")

    @property
    def active(self) -> bool:
        """Return whether any module of the model is still replaced."""
        return any(map(self._is_ours, self._model.modules()))

    def remove(self) -> None:
        """Restore the original modules, also those that were moved or wrapped. Further calls do nothing."""
        for hook in self._hooks:
            hook.remove()
        for parent in (*self._model.modules(), *self._parents):
            for name, child in list(parent._modules.items()):
                if isinstance(child, Replaced) and self._is_ours(child):
                    setattr(parent, name, child.restored())

    def stats(self) -> dict[str, Any]:
        """Return counts of layer calls: "sparse_calls" on dynaxx's kernels, and other "dense_calls" by reason."""
        return {"sparse_calls": self._shared.sparse, "dense_calls": dict(self._shared.dense)}

    def reset_stats(self) -> None:
        """Start counting from zero."""
        self._shared.sparse = 0
        self._shared.dense.clear()

    def swap(self, parent: nn.Module) -> None:
        """Replace the attention modules of a module."""
        for name, original in self._originals_in(parent):
            setattr(parent, name, self._kinds[type(original)].sharing(original, self._shared))

    def _originals_in(self, parent: nn.Module) -> list[tuple[str, nn.Module]]:
        return [(name, child) for name, child in parent.named_children() if type(child) in self._kinds]

    def _is_ours(self, module: nn.Module) -> bool:
        return isinstance(module, Replaced) and module.dynaxx is self._shared

    def __exit__(self, *_: object) -> None:
        """Restore the original attention."""
        self.remove()

    def __repr__(self) -> str:
        """Return the number of layers, and whether the handle is active."""
        state = "active" if self.active else "removed"
        return f"<dynaxx attention in {len(self._hooks)} layers, {state}>"


class _SwapHook:
    """The hook that replaces new attention modules of a module. Copies and pickles of it do nothing, without dynaxx."""

    def __init__(self, handle: EncoderHandle) -> None:
        self.handle = handle

    def __call__(self, parent: nn.Module, _inputs: object) -> None:
        self.handle.swap(parent)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (nullcontext(), "__exit__")


def _with_dynaxx(each: Any) -> tuple[Any, ...]:
    """Reduce for multiprocessing, which pickles models only for processes of the same program."""
    return object.__new__, (type(each),), each.__dict__


def apply_to_encoder(model: nn.Module) -> EncoderHandle:
    """Run a Longformer, LED, BigBird or BigBirdPegasus model on dynaxx's kernels, in place.

    Outputs and gradients equal those of transformers within rounding, with the same windows, global tokens, random
    blocks and padding. Calls that the kernels cannot serve, such as requests for attention weights, run in the code of
    transformers and are counted by reason.

    Args:
        model: the model, or one that contains it, such as `LongformerForSequenceClassification`; any device and dtype.

    Returns:
        A handle, also a context manager; `handle.remove()` restores the original modules.

    Raises:
        TypeError: `model` is not a model.
        ValueError: the model runs on dynaxx already.
        UnsupportedInputError: the model has no such attention, or its block size has no layout.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a transformers model, got {type(model).__name__}")
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
    return EncoderHandle(model, kinds, Shared(list(configs.values())))


def is_sparse_encoder(model: nn.Module) -> bool:
    """Return whether `apply_to_encoder` serves a model. Imports transformers only for models of transformers."""
    if not isinstance(model, nn.Module):
        return False
    names = {type(module).__module__ for module in model.modules()}
    return any(name.startswith(f"transformers.models.{kind}.") for name in names for kind in SPARSE_MODELS)


def _refusal(model: nn.Module, *reasons: str) -> UnsupportedInputError:
    return UnsupportedInputError(type(model).__name__, {"transformers": list(reasons)})
