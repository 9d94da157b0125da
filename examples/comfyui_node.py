# SPDX-License-Identifier: Apache-2.0
"""A node of ComfyUI that runs a video policy in Wan's transformers.

    cp examples/comfyui_node.py ComfyUI/custom_nodes/dynaxx_node.py

ComfyUI calls an attention override in place of each attention function, and says which block and which step it is in.
"""

import math
from collections import Counter, defaultdict

from dynaxx.video import Grid, load_policy
from dynaxx.video.attention import attend
from dynaxx.video.residuals import Residuals


class SparseAttention:
    """An attention override that follows a policy where it covers a call. `counts` says how the calls ran.

    Args:
        policy: the policy.
        first, last: the part of all denoising steps that the sampler runs, from 0.0 to 1.0.
    """

    def __init__(self, policy, first, last):
        self.policy, self.first, self.last, self.counts = policy, first, last, Counter()
        self.plans = {start: policy.plans(start) for start in policy.starts}
        self.denser = {start: policy.plans(start, refresh=True) for start in policy.starts}
        self.residuals = defaultdict(Residuals)  # by block

    def __call__(self, dense, q, k, v, heads, mask=None, *rest, transformer_options, **more):
        """Return attention of (batch, seqlen, heads * head_dim): by the policy, or ComfyUI's own."""
        shape = transformer_options.get("grid_sizes", ())
        facts, tokens = self.policy.model, math.prod(shape)
        if (heads, q.shape[-1]) != (facts.q_heads, facts.q_heads * facts.head_dim):
            raise ValueError(f"the policy is for {facts.q_heads} heads of {facts.head_dim}")
        plan, block = None, transformer_options.get("block_index")
        if len(shape) == 3 and q.shape[1] == k.shape[1] == tokens >= self.policy.dense_below and mask is None:
            step, period = self.step(transformer_options)
            plan = self.plans[period[0]].get(block)
        if plan is None:  # cross-attention too
            self.counts["dense"] += 1
            return dense(q, k, v, heads, mask, *rest, transformer_options=transformer_options, **more)
        self.counts["sparse"] += 1
        given = *(x.unflatten(-1, (heads, -1)) for x in (q, k, v)), Grid(*shape, order=self.policy.order), plan
        denser = self.denser[period[0]].get(block)
        if denser is None:
            return attend(*given)[0].flatten(-2)
        return self.residuals[block].attend(*given, denser, step=step, period=period)[0].flatten(-2)

    def step(self, options):
        """Return the step and the number of all steps, and the period between refreshes in which it is."""
        if not self.policy.depends_on_step:
            return (0, 1), (0.0, 0)
        sigmas = options["sample_sigmas"]  # of all steps, and the last one's end
        step = int((sigmas[:-1] - options["sigmas"].max().to(sigmas)).abs().argmin())
        steps = len(sigmas) - 1
        return (step, steps), self.policy.period(self.first + (self.last - self.first) * step / steps)


class DynaxxPolicy:
    """The node: a model goes in, and comes out with the policy of a file."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "dynaxx"

    @classmethod
    def INPUT_TYPES(cls):
        """Return the inputs of the node."""
        share = {"min": 0.0, "max": 1.0, "step": 0.001}
        first, last = (("FLOAT", share | {"default": default}) for default in (0.0, 1.0))
        policy = ("STRING", {"default": "wan.json"})
        return {"required": {"model": ("MODEL",), "policy": policy, "first": first, "last": last}}

    def patch(self, model, policy, first, last):
        """Return a clone of the model whose attention follows the policy."""
        patched = model.clone()
        options = patched.model_options["transformer_options"]
        options["optimized_attention_override"] = SparseAttention(load_policy(policy), first, last)
        return (patched,)


NODE_CLASS_MAPPINGS = {"DynaxxPolicy": DynaxxPolicy}
NODE_DISPLAY_NAME_MAPPINGS = {"DynaxxPolicy": "Sparse attention (dynaxx)"}
