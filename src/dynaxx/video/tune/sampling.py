# SPDX-License-Identifier: Apache-2.0
"""Pipelines that make latents and frames from a prompt and a seed, and measures of how far two results are apart."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from dynaxx.integrations.transformers.loading import from_folder
from dynaxx.video.diffusers.families import model_facts

MAX_PSNR = 200.0  # of equal results, because files hold no infinity


class Sample(NamedTuple):
    """The result of a pipeline."""

    latents: Tensor
    frames: Tensor | None  # (frames, height, width, 3) in [0, 1]; None if they were not decoded


class Sampler(Protocol):
    """A pipeline. The same prompt and seed start from the same noise."""

    models: tuple[nn.Module, ...]  # the transformer, or two of one shape that share the steps
    switch: float  # share of the steps from which the second one runs; 1.0 if there is none
    scheduler: Any

    def sample(self, prompt: str, seed: int, *, decode: bool = False) -> Sample:
        """Denoise, and decode the frames if asked to and if the pipeline can."""


class Pipeline:
    """A pipeline of diffusers.

    Args:
        pipe: the pipeline, on its device.
        **options: arguments of every call, such as `num_frames`; those that the pipeline does not take are left out.

    Raises:
        ValueError: the pipeline has two transformers of different shapes.
    """

    def __init__(self, pipe: Any, **options: Any) -> None:
        known = inspect.signature(pipe.__call__).parameters
        ratio = getattr(pipe.config, "boundary_ratio", None)  # of the noise, below which the second one runs
        pair = (pipe.transformer, pipe.transformer_2) if ratio else (pipe.transformer,)
        self.models = tuple(model for model in pair if model is not None)
        self.pipe, self.scheduler, self.switch = pipe, pipe.scheduler, 1.0
        self.options = {name: value for name, value in options.items() if name in known and value is not None}
        pipe.set_progress_bar_config(disable=True)
        if len(self.models) == 2:
            first, second = map(model_facts, self.models)
            if first != second:
                raise ValueError(f"`pipe` must have transformers of one shape, got {first} and {second}")
            steps = self.options.get("num_inference_steps", known["num_inference_steps"].default)
            scheduler = copy.deepcopy(pipe.scheduler)
            scheduler.set_timesteps(steps)
            border = ratio * scheduler.config.num_train_timesteps
            self.switch = int((scheduler.timesteps >= border).sum()) / len(scheduler.timesteps)

    @torch.no_grad()
    def sample(self, prompt: str, seed: int, *, decode: bool = False) -> Sample:
        """Denoise, and decode the frames if asked to. See `Sampler`."""
        latents: list[Tensor] = []

        def keep(pipe: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            latents[:] = [tensors["latents"]]
            return tensors

        decode = decode and getattr(self.pipe, "vae", None) is not None
        made = self.pipe(
            prompt=prompt,
            generator=torch.Generator("cpu").manual_seed(seed),
            output_type="pt" if decode else "latent",
            callback_on_step_end=keep,
            **self.options,
        )
        frames = None
        if decode:
            pixels = made.frames[0] if hasattr(made, "frames") else made.images
            frames = pixels.float().cpu().movedim(1, -1)
        return Sample(latents[0].float().cpu(), frames)


def load_pipeline(folder: str, device: str, dtype: torch.dtype) -> Any:
    """Return the pipeline in a folder of diffusers. Raises as `from_folder`."""
    from diffusers import DiffusionPipeline

    return from_folder(DiffusionPipeline, folder, dtype=dtype).to(device)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return |found - expected| / |expected|."""
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def psnr(found: Tensor, expected: Tensor) -> float:
    """Return the peak signal-to-noise ratio in dB, at most `MAX_PSNR`; the peak is the range of what was expected."""
    peak = float(expected.max() - expected.min())
    error = float((found - expected).square().mean())
    return min(MAX_PSNR, 10.0 * math.log10(max(peak, 1e-30) ** 2 / max(error, 1e-60)))


def ssim(found: Tensor, expected: Tensor) -> float:
    """Return the mean structural similarity of grey frames (frames, height, width, 3), over windows of 7 x 7."""
    x, y = (frames.mean(-1)[:, None] for frames in (found, expected))
    mean = lambda image: functional.avg_pool2d(image, 7, 1)
    mean_x, mean_y = mean(x), mean(y)
    var_x, var_y = mean(x * x) - mean_x**2, mean(y * y) - mean_y**2
    both = mean(x * y) - mean_x * mean_y
    c1, c2 = 0.01**2, 0.03**2
    top = (2 * mean_x * mean_y + c1) * (2 * both + c2)
    return float((top / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))).mean())
