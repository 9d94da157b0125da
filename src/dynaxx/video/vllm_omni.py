# SPDX-License-Identifier: Apache-2.0
"""A video policy in vLLM-Omni: `DYNAXX_VIDEO_POLICY=wan.json vllm serve ./wan --omni`.

vLLM-Omni calls `register` in each of its processes, as an entry point of `vllm_omni.general_plugins`. It replaces each
dense attention backend by a subclass through vLLM-Omni's own registry, so that every choice of a backend stays as it
is. Self-attention over the whole grid of a video, which Wan's transformers publish, follows the policy; everything else
is left to the backend, with the reason in `counts` and once in the log.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.nn import functional

from dynaxx.errors import UnsupportedInputError
from dynaxx.integrations.runtime.routing import DenseReason
from dynaxx.layout.host import never_traced
from dynaxx.patterns import Full
from dynaxx.policy import KILL_SWITCH, KillSwitch, LayerPlan
from dynaxx.video.grid import Grid
from dynaxx.video.policy import VideoPolicy, load_policy
from dynaxx.video.residuals import Residuals

POLICY_VARIABLE = "DYNAXX_VIDEO_POLICY"  # the file of a policy
STEPS_VARIABLE = "DYNAXX_VIDEO_STEPS"  # steps of a request, for policies by steps: Wan does not publish their number
ALREADY_SPARSE = ("FASTVIDEO_VSA", "RAINFUSION_ATTN")  # backends that stay as they are
LAYER = re.compile(r"(?:^|\.)blocks\.(\d+)\.attn1$")  # self-attention, as in the layers of a policy for diffusers

counts: Counter[str] = Counter()  # calls of self-attention by outcome: "sparse", or "dense: " and the reason
logger = logging.getLogger("dynaxx")


def register() -> None:
    """Replace vLLM-Omni's attention backends in this process, if `DYNAXX_VIDEO_POLICY` names a policy.

    Raises:
        FileNotFoundError: there is no such file.
        PolicyError: the policy is invalid.
    """
    if not os.environ.get(POLICY_VARIABLE):
        return
    from vllm_omni.diffusion.attention.backends.registry import (
        DiffusionAttentionBackendEnum,
        register_diffusion_backend,
    )

    policy = _policy()
    for member in DiffusionAttentionBackendEnum:
        if member.name not in ALREADY_SPARSE:
            register_diffusion_backend(member, f"{__name__}.{member.name}")
    logger.info("vLLM-Omni follows the policy %s: %d rules", os.environ[POLICY_VARIABLE], len(policy.rules))


def __getattr__(name: str) -> Any:
    """Return the subclass of a backend, which vLLM-Omni finds by its qualified name."""
    if not name.isupper() or os.environ.get(POLICY_VARIABLE) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _backend(name)


@lru_cache(maxsize=1)
def _policy() -> VideoPolicy:
    return load_policy(os.environ[POLICY_VARIABLE])


@lru_cache(maxsize=64)
def _backend(name: str) -> type:
    """Return the subclass of a backend whose implementation follows the policy."""
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum

    base = resolve_obj_by_qualname(DiffusionAttentionBackendEnum[name].value)
    impl = type(f"Sparse{base.get_impl_cls().__name__}", (SparseCalls, base.get_impl_cls()), {})
    return type(f"Sparse{base.__name__}", (base,), {"get_impl_cls": staticmethod(lambda: impl)})


class SparseCalls:
    """Before the implementation of a backend: `forward` follows the policy where it covers a call."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        softmax_scale: float,
        causal: bool = False,
        num_kv_heads: int | None = None,
        prefix: str = "",
        **more: Any,
    ) -> None:
        super().__init__(num_heads, head_size, softmax_scale, causal, num_kv_heads, prefix=prefix, **more)  # type: ignore[call-arg]
        found = LAYER.search(prefix)
        self.dynaxx = None
        if found and not causal and num_kv_heads in (None, num_heads):
            self.dynaxx = Layer(_policy(), int(found[1]), num_heads, head_size, softmax_scale)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: Any = None) -> Tensor:
        """Return attention of (batch, seqlen, heads, head_dim): by the policy, or the backend's."""
        out = None if self.dynaxx is None else self.dynaxx.attend(query, key, value, attn_metadata)
        return super().forward(query, key, value, attn_metadata) if out is None else out  # type: ignore[misc]


class _LeftDense(Exception):
    """A call that the policy does not cover, with the reason."""


class Layer:
    """The self-attention of one block under a policy.

    Raises:
        UnsupportedInputError: the heads are not those of the policy's model, or ring attention would pass the
            policy by.
    """

    def __init__(self, policy: VideoPolicy, index: int, heads: int, head_dim: int, scale: float) -> None:
        facts = policy.model
        if index >= facts.layers or facts.q_heads % heads or head_dim != facts.head_dim:
            own = f"block {index} of {heads} heads of {head_dim}"
            wanted = f"{POLICY_VARIABLE} is for {facts.layers} blocks of {facts.q_heads} heads of {facts.head_dim}"
            raise UnsupportedInputError(own, {"vLLM-Omni": [wanted]})
        from vllm_omni.diffusion.config import get_current_diffusion_config_or_none

        config = get_current_diffusion_config_or_none()
        if config is not None and config.parallel_config.ring_degree > 1:
            raise UnsupportedInputError("ring attention", {"vLLM-Omni": ["a policy needs Ulysses and no ring"]})
        self.policy, self.index, self.heads, self.scale = policy, index, heads, scale
        self.kill_switch = KillSwitch(KILL_SWITCH)
        self._plans: dict[tuple[float, int, int], tuple[LayerPlan | None, LayerPlan | None]] = {}
        self._residuals = Residuals()

    @never_traced
    def attend(self, q: Tensor, k: Tensor, v: Tensor, metadata: Any) -> Tensor | None:
        """Return attention by the policy; None if it does not cover the call, which is counted with the reason."""
        try:
            grid, step = self._grid(q, k, metadata), self._step()
            period = self.policy.period(step[0] / step[1])
            plan, denser = self._plan(q, period[0])
        except _LeftDense as left:
            outcome = f"dense: {left}"
            if not counts[outcome]:
                logger.info("block %d attends to all tokens: %s", self.index, left)
            counts[outcome] += 1
            return None
        used = grid.seqlen  # tokens after them were added to split the sequence evenly
        given = q[:, :used], k[:, :used], v[:, :used], grid, plan, denser
        out, layouts = self._residuals.attend(*given, step=step, period=period, scale=self.scale)
        counts["sparse" if len(layouts) == 1 else "refresh"] += 1
        return out if used == q.shape[1] else functional.pad(out, (0, 0, 0, 0, 0, q.shape[1] - used))

    def _grid(self, q: Tensor, k: Tensor, metadata: Any) -> Grid:
        """Return the grid of the video that the model publishes. A mask beside it hides what follows the grid."""
        layout = getattr(metadata, "video_layout", None)
        if layout is None or layout.latent_grid is None or layout.prefix_len is None:
            raise _LeftDense("grid is unknown")
        frames, height, width = layout.latent_grid
        grid = Grid(frames, height, width, text=layout.prefix_len, text_first=True, order=self.policy.order)
        if q.shape[1] != k.shape[1] or q.shape[1] < grid.seqlen or metadata.joint_query is not None:
            raise _LeftDense("not the whole grid")
        if grid.seqlen < self.policy.dense_below:
            raise _LeftDense(DenseReason.BELOW)
        return grid

    def _plan(self, q: Tensor, start: float) -> tuple[LayerPlan, LayerPlan | None]:
        """Return the rules of q's heads in a part of the denoising, and those of refreshes.

        Tensor parallelism splits the model's heads, Ulysses those of a rank.
        """
        if self.kill_switch.engaged() is not None:
            raise _LeftDense(DenseReason.KILLED)
        all_heads, heads, rank = self.policy.model.q_heads, q.shape[2], 0
        if self.heads % heads:
            raise _LeftDense(DenseReason.SHARDED)
        if self.heads < all_heads:
            from vllm.distributed import get_tensor_model_parallel_rank

            rank = get_tensor_model_parallel_rank()
        if heads < self.heads:
            from vllm_omni.diffusion.distributed.parallel_state import get_ulysses_parallel_rank

            rank = rank * (self.heads // heads) + get_ulysses_parallel_rank()
        key = start, rank, all_heads // heads
        if key not in self._plans:
            both = (self.policy.plans(start, refresh=refresh).get(self.index) for refresh in (False, True))
            own, denser = (None if whole is None else whole.shard(*key[1:]) for whole in both)
            dense = own is None or all(group.rule == Full() for group in own.groups)
            self._plans[key] = None if dense else own, denser
        plan, denser = self._plans[key]
        if plan is None:
            raise _LeftDense(DenseReason.NO_RULE)
        return plan, denser

    def _step(self) -> tuple[int, int]:
        """Return the current step, and the number of all steps."""
        if not self.policy.depends_on_step:
            return 0, 1
        from vllm_omni.diffusion.forward_context import get_forward_context, is_forward_context_available

        context = get_forward_context() if is_forward_context_available() else None
        step = getattr(context, "denoise_step_idx", None)
        steps = getattr(context, "total_denoise_steps", None) or int(os.environ.get(STEPS_VARIABLE) or 0)
        if step is None or not steps:
            raise _LeftDense(f"step is unknown; set {STEPS_VARIABLE} to the number of steps")
        return min(step, steps - 1), steps
