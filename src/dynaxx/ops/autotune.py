# SPDX-License-Identifier: Apache-2.0
"""`autotune`: time tile sizes of the Triton kernels for one problem shape and store the fastest on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.kernels.registry import ATTENTION
from dynaxx.kernels.scale import softmax_scale
from dynaxx.layout import BlockLayout
from dynaxx.ops.checks import check_inputs

if TYPE_CHECKING:
    from dynaxx.kernels.attention.triton.autotune import TunedKernel


@typed
def autotune(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    gradients: bool = True,
) -> list[TunedKernel]:
    """Time alternative tile sizes of the `triton` backend, and use the fastest from now on.

    A result applies to one combination of dtype, head_dims, block size, memory kind, GPU name and Triton version, in
    this process and in later ones. It is stored in the folder `tiles/` under `DYNAXX_CACHE` (default: the user's cache
    folder); delete the file to discard it. dynaxx never tunes without this call. Every candidate is compiled, which
    takes minutes.

    Args:
        q: queries, as for `sparse_attention`; use the sequence length that matters to you.
        k: keys, as for `sparse_attention`.
        v: values, as for `sparse_attention`.
        layout: a layout with the density that matters to you.
        scale: softmax scale, default head_dim ** -0.5.
        softcap: see `sparse_attention`.
        gradients: also tune the backward kernels.

    Returns:
        One entry per kernel: the chosen tiles, and the time in milliseconds with them and with the default tiles.

    Raises:
        ValueError, TypeError, UnsupportedInputError: like `sparse_attention(..., backend="triton")`, or no GPU.
        OSError: the file cannot be written.
    """
    ATTENTION.resolve(check_inputs(q, k, v, layout, softcap=softcap, needs_grad=gradients), "triton")
    if not q.is_cuda:
        raise ValueError(f"`q` must be on a GPU, where the kernels are timed, got {q.device}")
    from dynaxx.kernels.attention.triton.autotune import autotune as tune

    scale = softmax_scale(scale, q.shape[-1])
    return tune(q.detach(), k.detach(), v.detach(), layout, scale, softcap, gradients)
