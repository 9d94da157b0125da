# SPDX-License-Identifier: Apache-2.0
"""List where each transformer of diffusers has the sizes of its grid, and on which side of the video its text is."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from dynaxx.errors import UnsupportedInputError
from dynaxx.policy import ModelFacts

Shape = tuple[int, int, int]
Arguments = Mapping[str, Any]  # of the transformer's forward, by name

ATTENTION = re.compile(r"(single_)?(transformer_)?blocks\.\d+\.attn1?")  # self or joint attention; `attn2` is cross


class Family(NamedTuple):
    """How the transformers of a family lay out their tokens."""

    shape: Callable[[Any, Arguments], Shape | None]  # (config, arguments) -> (frames, height, width) in tokens
    text_first: bool = False  # whether text comes before the video in joint attention
    time_scale: float = 1.0  # the scheduler's timestep / the transformer's


def _latents(config: Any, arguments: Arguments) -> Shape:
    """Return the shape of (batch, channels, frames, height, width) latents after their patches."""
    patch = config.patch_size
    frames, height, width = arguments["hidden_states"].shape[2:]
    if isinstance(patch, int):
        patch = (getattr(config, "patch_size_t", None) or 1, patch, patch)
    return frames // patch[0], height // patch[1], width // patch[2]


def _frames_first(config: Any, arguments: Arguments) -> Shape:
    """Return the shape of (batch, frames, channels, height, width) latents after their patches."""
    frames, _, height, width = arguments["hidden_states"].shape[1:]
    in_time, patch = config.patch_size_t or 1, config.patch_size
    return -(-frames // in_time), height // patch, width // patch


def _named(config: Any, arguments: Arguments) -> Shape | None:
    """Return the shape that the caller passes by name, None if it passes none."""
    frames, height, width = (arguments.get(name) for name in ("num_frames", "height", "width"))
    return (frames, height, width) if frames and height and width else None


def _positions(config: Any, arguments: Arguments) -> Shape:
    """Return the shape of an image from the positions of its tokens, (tokens, 3)."""
    tokens = arguments["hidden_states"].shape[1]
    at = arguments["img_ids"].reshape(-1, 3)[:tokens]
    height, width = (int(size) for size in at[:, 1:].amax(0) + 1)
    return (1, height, width) if height * width == tokens else (1, 1, tokens)


def _image_shapes(config: Any, arguments: Arguments) -> Shape:
    """Return the shape of an image; several images in one sequence count as one row."""
    shapes = arguments["img_shapes"]
    images = shapes[0] if isinstance(shapes[0], list) else [shapes[0]]
    if len(images) == 1:
        frames, height, width = images[0]
        return frames, height, width
    return 1, 1, arguments["hidden_states"].shape[1]


FAMILIES = {
    "WanTransformer3DModel": Family(_latents),
    "WanVACETransformer3DModel": Family(_latents),
    "HunyuanVideoTransformer3DModel": Family(_latents),
    "HunyuanVideo15Transformer3DModel": Family(_latents),
    "LTXVideoTransformer3DModel": Family(_named),
    "LTX2VideoTransformer3DModel": Family(_named),
    "CogVideoXTransformer3DModel": Family(_frames_first, text_first=True),
    "MochiTransformer3DModel": Family(_latents),
    "FluxTransformer2DModel": Family(_positions, text_first=True, time_scale=1000.0),
    "QwenImageTransformer2DModel": Family(_image_shapes, text_first=True, time_scale=1000.0),
}


def original(model: nn.Module) -> nn.Module:
    """Return the model itself if `torch.compile` has wrapped it."""
    inner: nn.Module = getattr(model, "_orig_mod", model)
    return inner


def family_of(model: nn.Module) -> Family:
    """Return the family of a transformer.

    Raises:
        UnsupportedInputError: it is none of diffusers that can be served; the error lists them.
    """
    name = type(model).__name__
    if name not in FAMILIES:
        raise UnsupportedInputError(name, {"diffusers": [f"served are {', '.join(FAMILIES)}"]})
    return FAMILIES[name]


def attention_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the names and modules of the self or joint attention of all blocks, in order: the layers of a policy."""
    return [(name, module) for name, module in model.named_modules() if ATTENTION.fullmatch(name)]


def model_facts(model: nn.Module) -> ModelFacts:
    """Return the facts that a policy for a transformer of diffusers must contain.

    Raises:
        UnsupportedInputError: as `family_of`.
    """
    model = original(model)
    family_of(model)
    modules = attention_modules(model)
    heads = modules[0][1].heads
    width = modules[0][1].to_q.out_features
    return ModelFacts(
        model_type=type(model).__name__, layers=len(modules), q_heads=heads, kv_heads=heads, head_dim=width // heads
    )


def timestep_of(family: Family, arguments: Arguments) -> float:
    """Return the largest timestep of a call in the scheduler's unit. Reads one number back from the device."""
    given = arguments["timestep"]
    return float(given.max() if isinstance(given, Tensor) else given) * family.time_scale
