# SPDX-License-Identifier: Apache-2.0
"""The parts of a causal mask in code that torch.compile traces.

A traced mask function cannot be read like the others (`rules`), because compilers hide closures. The plain causal one
is known by its identity. Its mask is traced as transformers makes it, and carries its parts as an attribute; a graph
whose layers only use the parts never computes the mask. If model code changes a mask, the attribute is lost, and the
mask is used as a tensor. Other masks are computed once: torch's compiler would compute one for each op that reads it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

ATTRIBUTE = "dynaxx_parts"


class CausalParts(NamedTuple):
    """The parts of a causal mask: queries see the keys up to their own that are not padding."""

    padding: Tensor | None  # (batch, seqlen_k or fewer) bool, False for padding; None without padding
    start: Tensor | None  # the column of the first query's own key, if only the device knows it: (), int64
    offset: int  # the same if the host knows it, otherwise 0


def traced_mask(mask: Tensor | None, request: dict[str, Any], *, causal: bool) -> Tensor | None:
    """Return a mask that is made once, or one with parts if the mask function of the request is the causal one.

    Args:
        mask: the mask that transformers made; None without one.
        request: the arguments of the call of `AttentionMaskInterface`.
        causal: whether its mask function is that of causal masks.
    """
    if mask is None or request["q_length"] == 1:
        return mask
    if not causal or request.get("use_vmap") or request.get("kv_offset", 0) != 0:
        return made_once(mask)
    padding, start = request.get("attention_mask"), request.get("q_offset", 0)
    padding = None if padding is None else made_once(padding)
    parts = (
        CausalParts(padding, made_once(start), 0) if isinstance(start, Tensor) else CausalParts(padding, None, start)
    )
    setattr(mask, ATTRIBUTE, parts)
    return mask


@torch.library.custom_op("dynaxx::made_once", mutates_args=())
def made_once(x: Tensor) -> Tensor:
    """Return a contiguous copy, which the compiler cannot compute again in another place."""
    return x.clone(memory_format=torch.contiguous_format)


@made_once.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def parts_of(mask: Tensor | None) -> CausalParts | None:
    """Return the parts of a traced mask, or None if it has none."""
    return None if mask is None else getattr(mask, ATTRIBUTE, None)
