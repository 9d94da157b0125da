# SPDX-License-Identifier: Apache-2.0
"""Run a policy in a Hugging Face model, through transformers' `AttentionInterface` and `AttentionMaskInterface`.

The masks of transformers stay authoritative: a sparse layer computes the pairs that both the mask and its layout show.
Calls that no rule covers go to the model's original attention with the same arguments, and are counted by reason.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

from torch import nn

from dynaxx.arguments import typed
from dynaxx.errors import UnsupportedInputError
from dynaxx.integrations.encoders import apply_to_encoder, is_sparse_encoder
from dynaxx.integrations.encoders.attach import EncoderHandle
from dynaxx.integrations.transformers.calls.interface import LAYERS, attention
from dynaxx.integrations.transformers.decoder import NAME, Decoder, implementation, name_for, window_of
from dynaxx.integrations.transformers.handle import CHANGES, Handle
from dynaxx.integrations.transformers.masks.lazy import mask_maker
from dynaxx.policy import ModelFacts, Policy
from dynaxx.policy.document import Document

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    Mesh = DeviceMesh | ProcessGroup

logger = logging.getLogger("dynaxx")

APPLY: dict[type, Callable[..., Any]] = {}  # `apply` of the policies that wings define, by their class


@overload
def apply(model: nn.Module, policy: Policy, *, own_pattern: bool = True, name: str = "") -> Handle: ...


@overload
def apply(
    model: nn.Module,
    policy: None = None,
    *,
    own_pattern: bool = True,
    window: int | tuple[int, int] | None = None,
    name: str = "",
) -> Handle | EncoderHandle: ...


@overload
def apply(model: nn.Module, policy: Policy | None = None, *, mesh: Mesh) -> Any: ...


@overload
def apply(model: nn.Module, policy: Document) -> Any: ...


@typed
def apply(
    model: nn.Module,
    policy: Document | None = None,
    *,
    own_pattern: bool = True,
    window: int | tuple[int, int] | None = None,
    name: str = "",
    mesh: Mesh | None = None,
) -> Handle | EncoderHandle | Any:
    """Run a transformers model's attention on dynaxx's kernels, in place.

    Without a policy each layer computes exactly what it did before: full causal attention, sliding windows, chunks,
    learned sinks, capped scores. Calls that are too short to gain keep the model's original attention. A policy
    additionally makes full-attention layers sparse by its rules.

    Args:
        model: a model of transformers >= 5.16 with "sdpa" or "eager" attention, in eval or training mode. With a policy
            it must be a decoder; without one it may also be an encoder such as ModernBERT or BERT, or Longformer, LED,
            BigBird or BigBirdPegasus.
        policy: a policy for a model of this shape; see `load_policy`. Policies of `dynaxx.video` are for transformers
            of diffusers, and take no other argument.
        own_pattern: whether calls without a rule may run on dynaxx's kernels, by the model's own pattern. False leaves
            them to the model's attention.
        window: for encoders without a policy, the window of layers that have none. An int W shows W - 1 keys on each
            side; a pair is (left, right). This changes the results of the model.
        name: the label `model_name` in metrics. By default the name that the model was loaded by (the last part of a
            path), or else its type.
        mesh: the ranks that share one sequence, a DeviceMesh of one dimension or a process group. Each rank calls the
            model with its own tokens, `model(**handle.shard(input_ids))`. For prefill and training, without a cache.

    Returns:
        A handle, also a context manager; `handle.remove()` restores the model exactly.

    Raises:
        TypeError: `policy` is not a policy, or `model` is not a model.
        ValueError: the model has a handle already, or `own_pattern=False` without a policy, so nothing would change.
        ImportError: the policy's rollout names a flag, and openfeature-sdk is not installed.
        PolicyError: the policy is for another model.
        UnsupportedInputError: the model cannot be served exactly; the error lists the reasons.
    """
    _check_options(policy, own_pattern, window, name, mesh)
    if policy is not None and not isinstance(policy, Policy):
        return APPLY[type(policy)](model, policy)
    if mesh is not None:
        return importlib.import_module("dynaxx.distributed.transformers.handle").attach(model, policy, mesh)
    if window is None and policy is None and is_sparse_encoder(model):
        if name:
            raise ValueError(f"`name` must be empty for {type(model).__name__}, which has no metrics by model name")
        return apply_to_encoder(model)
    interface, masks = _interfaces()
    decoder = Decoder.of(model)
    if policy is None:
        policy = Policy(model=decoder.facts)
    decoder.check(policy)
    sides = None if window is None else _sides(window, decoder)
    _warn_if_measured_elsewhere(policy, model)
    interface.register(NAME, attention)
    masks.register(NAME, mask_maker())
    with CHANGES:
        if any(module in LAYERS for module in decoder.layers.values()):
            raise ValueError("`model` has a policy already; call remove() on its handle first")
        handle = Handle(policy, decoder, name, own_pattern=own_pattern, window=sides, apply=apply)
    try:
        _ask_for_dynaxx(decoder, handle)
        handle.hooks.register(decoder.body)
    except BaseException:
        handle.remove()
        raise
    return handle


def _check_options(
    policy: Document | None, own_pattern: bool, window: int | tuple[int, int] | None, name: str, mesh: Mesh | None
) -> None:
    """Check that the arguments of `apply` go together."""
    if type(policy) in APPLY:
        if not own_pattern or window is not None or name or mesh is not None:
            raise ValueError(f"`policy` is a {type(policy).__name__}, which takes no other argument")
    elif policy is not None and not isinstance(policy, Policy):
        raise TypeError(f"`policy` must be a Policy, got {type(policy).__name__}; read a file with load_policy")
    if policy is None and not own_pattern:
        raise ValueError("`own_pattern` must be True without a `policy`, otherwise nothing would change")
    if window is not None and (policy is not None or not own_pattern):
        raise ValueError(
            "`window` must be None with a policy or `own_pattern=False`; a policy has `SlidingWindow` rules"
        )
    if mesh is not None and (window is not None or not own_pattern or name):
        raise ValueError("`window`, `own_pattern` and `name` must be left out if a `mesh` is given")


def _ask_for_dynaxx(decoder: Decoder, handle: Handle) -> None:
    """Name dynaxx's attention in the model's config.

    Raises:
        UnsupportedInputError: the layers have configs of their own, which the name does not reach.
    """
    decoder.owner.set_attn_implementation(name_for(handle.before))
    escaped = [i for i, m in decoder.layers.items() if implementation(m) != NAME]
    if escaped:
        raise UnsupportedInputError(
            decoder.facts.model_type,
            {"transformers": [f"set_attn_implementation does not reach layers {escaped}: their config is a copy"]},
        )


def model_facts(model: nn.Module) -> ModelFacts:
    """Return the facts that a policy for this model must contain.

    Raises:
        UnsupportedInputError: the model has no decoder attention of transformers.
    """
    return Decoder.of(model).facts


def attention_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Return the decoder's attention modules by layer index. Raises as `model_facts`."""
    return dict(Decoder.of(model).layers)


def full_attention_layers(model: nn.Module) -> list[int]:
    """Return the layers that see the whole sequence, which a policy can make sparse. Others have a window."""
    return [index for index, module in Decoder.of(model).layers.items() if not window_of(module)]


def refusals(model: nn.Module) -> list[str]:
    """Return the reasons why no policy can run in a model, empty if one can."""
    try:
        decoder = Decoder.of(model)
    except UnsupportedInputError as error:
        return [reason for reasons in error.reasons.values() for reason in reasons]
    full = full_attention_layers(model)
    return decoder.refusals(full) if full else ["every layer already has a window"]


def _sides(window: int | tuple[int, int], decoder: Decoder) -> tuple[int, int]:
    """Return (left, right) of the window that the caller asked for."""
    left, right = (window - 1, window - 1) if isinstance(window, int) else window
    if left < 0 or right < 0:
        raise ValueError(f"`window` must be >= 1 keys, or (left, right) with values >= 0, got {window!r}")
    if any(getattr(module, "is_causal", True) for module in decoder.layers.values()):
        reason = "`window` is for encoders; for a decoder use a policy with a SlidingWindow rule"
        raise UnsupportedInputError(decoder.facts.model_type, {"transformers": [reason]})
    return left, right


def _interfaces() -> tuple[Any, Any]:
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise UnsupportedInputError(
            "a transformers model",
            {"transformers": [f"{error}; install transformers >= 5.16, which has AttentionMaskInterface"]},
        ) from error
    taken = AttentionInterface().get(NAME)
    if taken is not None and taken is not attention:
        raise UnsupportedInputError(
            "a transformers model",
            {"transformers": [f"another library has registered {taken!r} under the name {NAME!r}"]},
        )
    return AttentionInterface, AttentionMaskInterface


def _warn_if_measured_elsewhere(policy: Policy, model: nn.Module) -> None:
    device = next((parameter.device.type for parameter in model.parameters()), None)
    if policy.measured_on is not None and device not in (None, "meta", policy.measured_on.device):
        logger.warning(
            "the policy's dense_below = %d tokens was measured on %s, but the model is on %s; measure it again",
            policy.dense_below,
            policy.measured_on.device,
            device,
        )
