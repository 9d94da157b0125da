# SPDX-License-Identifier: Apache-2.0
"""`autotune`: the Triton kernels' tile sizes for one shape, found by timing and kept on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.kernels.scale import softmax_scale
from dynaxx.layout import BlockLayout
from dynaxx.ops.checks import check_inputs
from dynaxx.ops.dispatch import choose_backend

if TYPE_CHECKING:
    from dynaxx.kernels.triton.attention.autotune import TunedKernel


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
    """Time other tile sizes of the `triton` backend than its own choice, and use the fastest from now on.

    A choice holds for a dtype, head_dims, block size and kind of memory, on GPUs of this name with this Triton, in this
    process and in later ones: it is kept under `DYNAXX_CACHE` (else the user's cache folder), in `tiles/`; remove the
    file to be without it. Nothing is tuned that was not asked for. Each candidate is compiled, which takes minutes.

    Args:
        q, k, v, layout, scale, softcap: as `sparse_attention`; of the length and density that matter.
        gradients: tune the backward kernels, too.

    Returns:
        One entry per kernel: its tiles, and milliseconds with them and with the default.

    Raises:
        ValueError, TypeError, UnsupportedInputError: as `sparse_attention(..., backend="triton")`, or no GPU.
        OSError: the file cannot be written.
    """
    choose_backend(check_inputs(q, k, v, layout, softcap=softcap, needs_grad=gradients), "triton")
    if not q.is_cuda:
        raise ValueError(f"`q` must be on a GPU to be timed there, got {q.device}")
    from dynaxx.kernels.triton.attention.autotune import autotune as tune

    scale = softmax_scale(scale, q.shape[-1])
    return tune(q.detach(), k.detach(), v.detach(), layout, scale, softcap, gradients)
