# SPDX-License-Identifier: Apache-2.0
"""A small video transformer of diffusers' Wan class, trained on moving shapes until a time limit.

Each clip shows two coloured shapes that move over a fixed random texture and bounce at the borders. The prompt names
colour, shape and direction of both; where they start and the texture come from the noise. `train` returns the model,
and `Shapes` is a sampler for `dynaxx.video.tune`.
"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import diffusers
import torch
from torch import Tensor, nn
from torch.nn import functional

from dynaxx.video.tune.sampling import Sample

COLOURS = {"red": (1, -1, -1), "green": (-1, 1, -1), "blue": (-1, -1, 1), "yellow": (1, 1, -1), "white": (1, 1, 1)}
FORMS = ("circle", "square", "diamond")
WAYS = {"right": 0, "down": 1, "left": 2, "up": 3}  # quarter turns
WORDS = [*COLOURS, *FORMS, *WAYS]
TEXT_WIDTH = 32


class Size(NamedTuple):
    """The sizes of clips and model."""

    frames: int
    pixels: int  # height and width
    layers: int
    heads: int
    head_dim: int = 64
    batch: int = 16
    steps: int = 20  # of denoising


FULL = Size(frames=16, pixels=32, layers=8, heads=6)
TINY = Size(frames=8, pixels=16, layers=2, heads=2, head_dim=32, batch=8, steps=6)


def embedded(prompts: list[str], device: torch.device | str) -> Tensor:
    """Return (batch, words, TEXT_WIDTH): a fixed random vector per word of each prompt."""
    table = torch.randn(len(WORDS), TEXT_WIDTH, generator=torch.Generator().manual_seed(0))
    return torch.stack([table[[WORDS.index(word) for word in prompt.split()]] for prompt in prompts]).to(device)


def random_prompts(count: int, generator: torch.Generator) -> list[str]:
    """Return prompts such as "red circle left blue square up"."""
    draw = lambda words: [*words][int(torch.randint(len(words), (), generator=generator))]
    one = lambda: f"{draw(COLOURS)} {draw(FORMS)} {draw(WAYS)}"
    return [f"{one()} {one()}" for _ in range(count)]


def clips(prompts: list[str], size: Size, device: torch.device | str) -> Tensor:
    """Draw (batch, 3, frames, pixels, pixels) clips in [-1, 1] of the prompts."""
    batch, n = len(prompts), size.pixels
    words = [prompt.split() for prompt in prompts]
    texture = torch.rand(batch, 3, 6, 6, device=device) * 0.8 - 0.4
    texture = functional.interpolate(texture, (n, n), mode="bicubic", align_corners=True)
    found = texture[:, :, None].expand(-1, -1, size.frames, -1, -1).clone()
    at = torch.linspace(0, 1, n, device=device)
    time_at = torch.arange(size.frames, device=device) / 16
    for first in (0, 3):
        colour = torch.tensor([COLOURS[each[first]] for each in words], device=device, dtype=torch.float32)
        form = torch.tensor([FORMS.index(each[first + 1]) for each in words], device=device)
        turn = torch.tensor([WAYS[each[first + 2]] for each in words], device=device) * (math.pi / 2)
        start = torch.rand(batch, 2, device=device)
        way = torch.stack([turn.sin(), turn.cos()], -1)
        place = start[:, None] + way[:, None] * (0.9 * time_at)[None, :, None]  # (batch, frames, 2)
        place = 0.15 + 0.7 * (1 - (place % 2 - 1).abs())  # bounces
        dy = (at[None, None, :, None] - place[..., 0, None, None]).abs()
        dx = (at[None, None, None] - place[..., 1, None, None]).abs()
        forms = torch.stack([(dy**2 + dx**2).sqrt(), torch.maximum(*torch.broadcast_tensors(dy, dx)), (dy + dx) * 0.75])
        distance = forms[form, torch.arange(batch, device=device)]
        mask = ((0.14 - distance) * 60).sigmoid()[:, None]
        found = found * (1 - mask) + colour[:, :, None, None, None] * mask
    return found.clamp(-1, 1)


def new_model(size: Size, device: torch.device | str) -> nn.Module:
    """Return a Wan transformer with random weights."""
    torch.manual_seed(0)
    model: nn.Module = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=size.heads, attention_head_dim=size.head_dim, in_channels=3,
        out_channels=3, text_dim=TEXT_WIDTH, freq_dim=64, ffn_dim=4 * size.heads * size.head_dim,
        num_layers=size.layers, rope_max_seq_len=64,
    ).to(device)  # fmt: skip
    return model


def train(size: Size, device: torch.device | str, seconds: float) -> tuple[nn.Module, list[float]]:
    """Train for some seconds by rectified flow. Return the model, and the loss of every 50 steps."""
    model = new_model(size, device).train()
    peak = 8e-4
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.01)
    generator, started, losses, done, total = torch.Generator().manual_seed(1), time.monotonic(), [], 0, 0.0
    on_gpu = torch.device(device).type == "cuda"
    while (spent := (time.monotonic() - started) / seconds) < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1.0, (done + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * spent)))
        prompts = random_prompts(size.batch, generator)
        clip = clips(prompts, size, device)
        noise = torch.randn_like(clip)
        sigma = torch.randn(size.batch, device=device).sigmoid()
        at = sigma[:, None, None, None, None]
        with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
            out = model((1 - at) * clip + at * noise, sigma * 1000, embedded(prompts, device), return_dict=False)[0]
        loss = (out.float() - (noise - clip)).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        done += 1
        total += loss.detach()
        if done % 50 == 0:
            losses.append(float(total) / 50)
            total = 0.0
    return model.eval(), losses


class Shapes:
    """A sampler over a trained model: a prompt lists several clips, separated by semicolons."""

    def __init__(self, model: nn.Module, size: Size) -> None:
        self.models, self.switch, self.size = (model,), 1.0, size
        self.scheduler: Any = diffusers.FlowMatchEulerDiscreteScheduler(shift=2.0)

    @torch.no_grad()
    def sample(self, prompt: str, seed: int, *, decode: bool = False) -> Sample:
        """Denoise the clips. See `dynaxx.video.tune.sampling.Sampler`."""
        size, (model,) = self.size, self.models
        device = next(model.parameters()).device
        prompts = prompt.split("; ")
        text = embedded(prompts, device)
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(len(prompts), 3, size.frames, size.pixels, size.pixels, generator=generator).to(device)
        self.scheduler.set_timesteps(size.steps, device=device)
        for t in self.scheduler.timesteps:
            with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
                out = model(x, t.expand(len(prompts)), text, return_dict=False)[0]
            x = self.scheduler.step(out.float(), t, x, return_dict=False)[0]
        frames = ((x[0] + 1) / 2).clamp(0, 1).permute(1, 2, 3, 0).cpu() if decode else None
        return Sample(x.float().cpu(), frames)
