# SPDX-License-Identifier: Apache-2.0
"""Sparse attention for diffusion transformers that make videos and images.

The files:

    grid, patterns/  tokens of a video in an order that makes blocks compact, and rules over it
    attention        attention over a grid by a rule
    residuals        few blocks per step, corrected by what they lacked at the last refresh
    policy           which rule each layer, head and part of the denoising follows
    diffusers/       policies in the transformers of diffusers
    vllm_omni        policies in vLLM-Omni
    tune/            the sparsest policy that keeps what a pipeline makes
"""

from dynaxx.integrations.transformers.apply_policy import APPLY
from dynaxx.video.attention import grid_attention
from dynaxx.video.diffusers.families import model_facts
from dynaxx.video.diffusers.handle import Handle, apply
from dynaxx.video.grid import Grid
from dynaxx.video.patterns import FirstFrames, GridPattern, GridWindow, RadialDecay, on_grid
from dynaxx.video.policy import VideoPolicy, VideoRule, load_policy

__all__ = [
    "FirstFrames",
    "Grid",
    "GridPattern",
    "GridWindow",
    "Handle",
    "RadialDecay",
    "VideoPolicy",
    "VideoRule",
    "apply",
    "grid_attention",
    "load_policy",
    "model_facts",
    "on_grid",
]

APPLY[VideoPolicy] = apply
