# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's Ulysses around dynaxx's attention.

    rank 0: tokens 0..n/2, all heads  --+            +-->  all tokens, heads 0..h/2  --> plan of these heads
                                        | all-to-all |
    rank 1: tokens n/2..n, all heads  --+            +-->  all tokens, heads h/2..h  --> plan of these heads

DeepSpeed's `UlyssesSPAttentionHF.register_with_transformers` wraps the attention that a name stands for; here the name
is dynaxx's. It hands no mask on, since the one it gets is of a rank's own tokens. The mask of the whole sequence is
described again here, from the layer's window and the gathered positions, so that windows and packed documents hold.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from dynaxx.arguments import typed
from dynaxx.engines.exporting import imported
from dynaxx.errors import UnsupportedInputError
from dynaxx.integrations.runtime.policy_events import without_guard
from dynaxx.integrations.transformers import apply, attention_layers
from dynaxx.integrations.transformers.calls.interface import LAYERS, attention
from dynaxx.integrations.transformers.decoder import NAME
from dynaxx.integrations.transformers.handle import Handle
from dynaxx.integrations.transformers.masks.lazy import LazyMask, mask_maker
from dynaxx.policy import Policy
from dynaxx.policy.resolve import head_rules
from dynaxx.policy.specs import parts

_LOCAL_MASK = "dynaxx_local_mask"  # how the mask of a rank's own tokens passes DeepSpeed's wrapper


class UlyssesHandle(AbstractContextManager["UlyssesHandle"]):
    """A model that DeepSpeed's Ulysses runs on dynaxx. Also a context manager that removes it.

    Attributes:
        handle: of `dynaxx.apply`: counts, kill switch, `replace`.
        mpu: DeepSpeed's parallel state, for `deepspeed.initialize(mpu=...)`.
        rank, ranks: this process's place among those that share a sequence.
    """

    def __init__(self, handle: Handle, mpu: Any, functions: Any) -> None:
        self.handle, self.mpu = handle, mpu
        self.rank = int(mpu.get_sequence_parallel_rank())
        self.ranks = int(mpu.get_sequence_parallel_world_size())
        self._functions = functions

    def remove(self) -> None:
        """Give the model back the attention it had, without Ulysses. More calls do nothing."""
        if self._functions is not None:
            del self._functions[NAME]
            self._functions = None
        self.handle.remove()

    def __exit__(self, *_: object) -> None:
        """Remove the handle."""
        self.remove()


@typed
def apply_with_ulysses(
    model: nn.Module,
    policy: Policy | None = None,
    *,
    sequence_parallel_size: int,
    micro_batch_size: int,
    disable_in_eval: bool = False,
) -> UlyssesHandle:
    """Run a transformers model under DeepSpeed's Ulysses with dynaxx's attention, in place.

    Call it on every rank, after `deepspeed.init_distributed`. Each rank then gets its share of every sequence, with
    `position_ids` counted from the start of the whole sequence, as DeepSpeed's `UlyssesSPDataLoaderAdapter` gives them.

    Args:
        model: a decoder that `dynaxx.apply` serves; its q heads must divide among the ranks, its kv heads must divide
            among them or they among its kv heads.
        policy: for this model; each rank follows the rules of its own heads. None runs the model's own pattern.
        sequence_parallel_size: ranks that share a sequence.
        micro_batch_size: sequences per step.
        disable_in_eval: in eval mode each rank runs its own batch, without an exchange, and dense: the plans are for
            a rank's heads.

    Returns:
        A handle; `remove()` restores the model.

    Raises:
        ImportError: DeepSpeed is not installed.
        UnsupportedInputError: another model under Ulysses in this process; else as `dynaxx.apply`.
        ValueError: a size below 2 or 1; heads that do not divide.
    """
    if sequence_parallel_size < 2:
        raise ValueError(f"`sequence_parallel_size` must be >= 2, got {sequence_parallel_size}; else use dynaxx.apply")
    if micro_batch_size < 1:
        raise ValueError(f"`micro_batch_size` must be >= 1, got {micro_batch_size}")
    ulysses = imported("deepspeed.runtime.sequence_parallel.ulysses_sp", "pip install deepspeed")
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

    policy = None if policy is None else without_guard(policy, "DeepSpeed's Ulysses")
    if policy is not None and (reasons := _refusals(policy, sequence_parallel_size)):
        raise UnsupportedInputError("Ulysses", {"deepspeed": reasons})
    if functions.get(NAME) not in (None, attention):
        raise UnsupportedInputError("Ulysses", {"deepspeed": ["another model runs under it in this process"]})
    handle = apply(model) if policy is None else apply(model, policy)
    if not isinstance(handle, Handle):
        handle.remove()
        raise UnsupportedInputError(type(model).__name__, {"deepspeed": ["an encoder that is sparse by design"]})
    try:
        functions[NAME] = whole = _Whole(min(attention_layers(model)))
        mpu = ulysses.UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model,
            core_attn_implementation=NAME,
            sequence_parallel_size=sequence_parallel_size,
            micro_batch_size=micro_batch_size,
            seq_length_is_variable=True,
            disable_in_eval=disable_in_eval,
        )
        whole.group = mpu.get_sequence_parallel_group()
        functions[NAME] = _Exchanged(functions[NAME], handle)
        found = UlyssesHandle(handle, mpu, functions)
        handle.shard(found.rank, found.ranks)
    except AssertionError as error:
        _undo(functions, handle)
        raise UnsupportedInputError("Ulysses", {"deepspeed": [f"it starts once in a process: {error}"]}) from error
    except BaseException:
        _undo(functions, handle)
        raise
    return found


def _refusals(policy: Policy, ranks: int) -> list[str]:
    """Return why the heads of a layer cannot be shared among ranks under a policy."""
    reasons = []
    if policy.model.kv_heads < ranks:
        for layer, rules in head_rules(policy).items():
            for _, selector in map(parts, rules.values()):
                if selector is not None and selector.per == "group":
                    reasons.append(
                        f"layer {layer}: the heads of a kv head choose together, and {ranks} ranks share "
                        f'{policy.model.kv_heads} kv heads; choose by head (per="head")'
                    )
                    break
    return reasons


def _undo(functions: Any, handle: Handle) -> None:
    """Leave the model and the name as they were."""
    if functions.get(NAME) is not attention:
        del functions[NAME]
    handle.remove()


class _Exchanged:
    """The attention of the name while a model is under Ulysses: that model's calls are exchanged, others are not."""

    def __init__(self, ulysses: Any, handle: Handle) -> None:
        self._ulysses, self._handle = ulysses, handle

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        layer = LAYERS.get(module)
        if layer is None or layer.passes is not self._handle.passes:
            return attention(module, query, key, value, attention_mask, **kwargs)
        if isinstance(kwargs.get("position_ids"), Tensor):
            kwargs["position_ids"] = kwargs["position_ids"].contiguous()  # DeepSpeed gathers them; NCCL asks for it
        out: tuple[Tensor, Tensor | None] = self._ulysses(
            module, query, key, value, attention_mask, **{**kwargs, _LOCAL_MASK: attention_mask}
        )
        return out


class _Whole:
    """Attention over whole sequences with a rank's own heads: what DeepSpeed calls between its two exchanges.

    Attributes:
        group: the ranks that share a sequence.
    """

    def __init__(self, first_layer: int) -> None:
        self._first_layer = first_layer
        self.group: Any = None

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        local = kwargs.pop(_LOCAL_MASK)
        reasons = _mask_refusals(local)
        if query.shape[2] != key.shape[2]:
            reasons.append("a cache: generate without it")
        if getattr(module, "layer_idx", self._first_layer) == self._first_layer and self._some_rank_has_padding(
            local, query
        ):
            reasons.append("padding is not served: pack sequences, with positions that start again at each")
        if reasons:
            raise UnsupportedInputError("Ulysses", {"deepspeed": reasons})
        mask = _whole_mask(local, query, kwargs)
        return attention(module, query, key, value, mask, **kwargs)

    def _some_rank_has_padding(self, local: Tensor | None, query: Tensor) -> bool:
        """Agree on it, once per pass: a rank that raises alone leaves the others waiting."""
        import torch.distributed as dist

        padding = local.padding if isinstance(local, LazyMask) else None
        found = torch.zeros((), dtype=torch.int32, device=query.device)
        if padding is not None:
            found = (~padding).any().to(torch.int32)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return bool(found)


def _mask_refusals(local: Tensor | None) -> list[str]:
    """Return why a mask cannot be described for whole sequences; the same on all ranks, as models make it."""
    if local is not None and not isinstance(local, LazyMask):
        return ["masks given as tensors are not served"]
    if isinstance(local, LazyMask) and (
        not local.rule.causal
        or any(each is not None for each in (local.rule.chunk, local.rule.after, local.rule.blocks))
    ):
        return ["only causal attention, windows and packed documents are served"]
    return []


def _whole_mask(local: Tensor | None, query: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
    """Describe the mask of the whole sequences."""
    from transformers.masking_utils import (
        and_masks,
        causal_mask_function,
        find_packed_sequence_indices,
        packed_sequence_mask_function,
        sliding_window_causal_mask_function,
    )

    window = local.rule.window if isinstance(local, LazyMask) else kwargs.get("sliding_window")
    function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    documents = find_packed_sequence_indices(kwargs["position_ids"])
    if documents is not None:
        function = and_masks(function, packed_sequence_mask_function(documents))
    batch, _, length, _ = query.shape
    return mask_maker()(
        batch_size=batch,
        q_length=length,
        kv_length=length,
        q_offset=0,
        kv_offset=0,
        mask_function=function,
        attention_mask=None,
        local_size=window,
        allow_is_causal_skip=documents is None,
        dtype=query.dtype,
        device=query.device,
    )
