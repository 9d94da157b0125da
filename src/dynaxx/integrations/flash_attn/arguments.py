# SPDX-License-Identifier: Apache-2.0
"""Convert FlashAttention's arguments to a rule and its numbers, or refuse them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dynaxx.arguments import as_integer, number
from dynaxx.errors import UnsupportedInputError
from dynaxx.patterns import Causal, Full, Pattern, SlidingWindow


def rule_of(causal: bool, window_size: Sequence[int] | Tensor) -> Pattern:
    """Return the rule that `causal` and `window_size` describe, bottom-right aligned as in flash-attn from 2.1 on.

    Raises:
        ValueError: `window_size` is not (left, right), each >= -1.
    """
    left, right = check_window(window_size)
    if causal:
        return Causal() if left == -1 else SlidingWindow((left, 0))
    return Full() if (left, right) == (-1, -1) else SlidingWindow((left, right))


def check_window(window_size: Sequence[int] | Tensor) -> tuple[int, int]:
    """Return (left, right). flash-attn also takes a list and a tensor.

    Raises:
        ValueError: not two whole numbers >= -1.
    """
    given = window_size.tolist() if isinstance(window_size, Tensor) else window_size
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise ValueError(f"`window_size` must be (left, right), got {window_size!r}")
    try:
        left, right = (as_integer("window_size", side) for side in given)
    except TypeError:
        left = right = -2
    if min(left, right) < -1:
        raise ValueError(f"`window_size` must be two integers >= -1, -1 for unlimited, got {window_size!r}")
    return left, right


def softcap_of(softcap: float) -> float | None:
    """Return dynaxx's softcap, which is None for FlashAttention's 0.0.

    Raises:
        ValueError: `softcap` is below 0 or not finite.
    """
    softcap = number("softcap", softcap)
    if not 0 <= softcap < float("inf"):
        raise ValueError(f"`softcap` must be finite and >= 0.0 (0.0 disables it), got {softcap}")
    return None if softcap == 0 else softcap


@contextmanager
def arguments_named(**names: str) -> Iterator[None]:
    """Replace the names of arguments in the errors of the functions that are called within, by those of the caller.

    Args:
        names: the caller's names by the functions' own.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        if not error.args or not isinstance(error.args[0], str) or isinstance(error, UnsupportedInputError):
            raise
        error.args = (re.sub(r"`(\w+)`", lambda found: f"`{names.get(found[1], found[1])}`", error.args[0]),)
        raise


def refuse(
    name: str, *, dropout_p: float = 0.0, alibi_slopes: Tensor | None = None, block_table: Tensor | None = None
) -> None:
    """Refuse arguments of FlashAttention that dynaxx does not compute.

    Raises:
        UnsupportedInputError: with the reasons.
    """
    reasons = []
    if dropout_p:
        reasons.append(f"`dropout_p` must be 0.0, got {dropout_p}: dropout is not supported")
    if alibi_slopes is not None:
        reasons.append("`alibi_slopes` must be None: decoding adds no bias; use flash_attn_func over the keys")
    if block_table is not None:
        reasons.append("`block_table` must be None: use flash_attn_with_kvcache for a paged cache")
    if reasons:
        raise UnsupportedInputError(name, {"dynaxx": reasons})


def check_deterministic(deterministic: bool, *tensors: Tensor) -> None:
    """Check that gradients are deterministic, which on a GPU depends on a setting of torch.

    Raises:
        ValueError: gradients on a GPU without `torch.use_deterministic_algorithms(True)`.
    """
    needs = deterministic and torch.is_grad_enabled() and any(x.requires_grad and x.is_cuda for x in tensors)
    if needs and not torch.are_deterministic_algorithms_enabled():
        raise ValueError("`deterministic` needs torch.use_deterministic_algorithms(True) on a GPU")


def block_size_of(q: Tensor) -> int:
    """Return the best number of tokens per block on q's device."""
    return 64 if q.device.type == "cpu" else 128
