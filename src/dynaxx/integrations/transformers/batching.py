# SPDX-License-Identifier: Apache-2.0
"""transformers' continuous batching (`generate_batch`, `ContinuousBatchingManager`) under a policy.

Continuous batching accepts only a few names of attention functions. Within a `with` block the model therefore uses the
name "sdpa", and this module registers its own function under that name. The function handles modules with a policy, and
passes those of other models to the function of transformers. A step is one ragged batch of prompts, chunks of prompts
and single tokens. Its cumulative lengths assign keys to requests, and each request runs as it would alone: prompts by
the prefill rules, single tokens by the decode rules over the pages of the cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dynaxx.errors import UnsupportedInputError
from dynaxx.forks import new_lock
from dynaxx.integrations.transformers.batches.decode import BatchMemory
from dynaxx.integrations.transformers.batches.layer import BatchCall, for_attention
from dynaxx.integrations.transformers.calls.arguments import AttentionCall
from dynaxx.integrations.transformers.calls.interface import LAYERS
from dynaxx.integrations.transformers.decoder import DENSE
from dynaxx.integrations.transformers.forward_context import ARGUMENT, ForwardContext
from dynaxx.integrations.transformers.passes import Passes

Attention = Callable[..., tuple[Tensor, Tensor | None]]

_lock = new_lock()
_blocks = 0  # number of open `with` blocks
_own: Attention | None = None  # the function of transformers that is replaced meanwhile
_own_update: Callable[..., tuple[Tensor, Tensor]] | None = None  # the method of its paged cache, if it is replaced


@contextmanager
def continuous_batching(passes: Passes, owner: nn.Module) -> Iterator[None]:
    """Let transformers' continuous batching serve a model with a policy within the block.

    Args:
        passes: the passes of the model.
        owner: the model.

    Raises:
        UnsupportedInputError: the policy's rules or rollout must distinguish requests, or transformers is too old.
    """
    policy = passes.deployed.policy
    reasons = other_transformers()
    if policy.rollout.share < 1 or policy.rollout.flag is not None:
        reasons.append("the rollout takes a share of the requests, but a step does not name its requests")
    if any(plan.needs_tokens for plan in passes.deployed.plans.values()):
        reasons.append("rules by content need the token ids of each request, but a step mixes those of many requests")
    if reasons:
        raise UnsupportedInputError("continuous batching with this policy", {"transformers": reasons})
    _open()
    passes.batching += 1
    before = owner.config._attn_implementation  # type: ignore[union-attr]
    try:
        owner.set_attn_implementation(DENSE)  # type: ignore[operator]
        yield
    finally:
        if passes.running.is_open:  # otherwise `remove` has restored the model's attention
            owner.set_attn_implementation(before)  # type: ignore[operator]
        passes.batching -= 1
        _close()


def ragged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attend in place of "sdpa" while a block is open: query (1, Hq, tokens, D) -> (1, tokens, Hq, D)."""
    layer, cache = LAYERS.get(module), kwargs.get("cache")
    assert _own is not None, "`_open` must have stored the function of transformers"
    if layer is None or cache is None or torch.compiler.is_compiling() or _captures(query):
        kwargs.pop(ARGUMENT, None)
        if cache is not None and _own_update is not None:
            del kwargs["cache"]
            key, value = cache.update(key, value, module.layer_idx, kwargs)
        return _own(module, query, key, value, attention_mask, **kwargs)
    del kwargs["cache"]
    current: ForwardContext = kwargs.pop(ARGUMENT, None) or layer.passes.unseen(layer.index)
    if attention_mask is None:
        key, value = cache.update(key_states=key, value_states=value, layer_idx=layer.index, kwargs=kwargs)
        return layer.attend(current, AttentionCall(module, query, key, value, None, for_attention(kwargs)))
    allocator = cache.layer_to_allocator[layer.index]
    if allocator.index not in current.steps:
        arguments = {**kwargs, "attention_mask": attention_mask}
        memory = layer.passes.batches.setdefault(allocator, BatchMemory())
        current.steps[allocator.index] = memory.open(allocator, arguments, current.deployed.decode)
    call = BatchCall(layer, module, current, cache, allocator, query, key, value, kwargs)
    return call.run(), None


def other_transformers() -> list[str]:
    """Return the reasons why the installed transformers is not supported."""
    import transformers
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    if "kwargs" in inspect.signature(PagedAttentionCache.update).parameters:
        return []
    return [
        f"transformers {transformers.__version__} passes its paged cache in another way; use the tested 5.23 or 5.24"
    ]


def _captures(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _open() -> None:
    global _blocks, _own, _own_update
    from transformers import AttentionInterface
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    with _lock:
        if _blocks == 0:
            found: Attention = AttentionInterface()[DENSE]
            own = _own = _own if _own is not None and found is ragged_attention else found
            AttentionInterface.register(DENSE, ragged_attention)
            if "cache" not in inspect.signature(own).parameters:  # from transformers 5.24 on, models update the cache
                _own_update = PagedAttentionCache.update
                PagedAttentionCache.update = _update_later
        _blocks += 1


def _close() -> None:
    global _blocks
    from transformers import AttentionInterface
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    with _lock:
        _blocks -= 1
        if _blocks == 0:
            # Keep `_own` and `_own_update`, since another thread may still call our functions.
            AttentionInterface.register(DENSE, _own)
            if _own_update is not None:
                PagedAttentionCache.update = _own_update


def _update_later(
    cache: Any, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Pass the cache to `ragged_attention`, which updates it, in place of `PagedAttentionCache.update`.

    Calls for other models, and those of `ragged_attention`, lack the argument of a forward pass and update at once.
    """
    if ARGUMENT in kwargs:
        kwargs["cache"] = cache
        return key_states, value_states
    assert _own_update is not None, "`_open` must have stored the method of transformers"
    return _own_update(cache, key_states, value_states, layer_idx, kwargs)
