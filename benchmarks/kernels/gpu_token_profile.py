# SPDX-License-Identifier: Apache-2.0
r"""Print the GPU time of each kernel of attention over chosen tokens: forward, backward and a decoding step.

    python benchmarks/kernels/gpu_token_profile.py --shapes 0 1 2 3 4

Clocks are higher than in `gpu_tokens.py`, since a profiled call is alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from gpu_token_decode import decoding
from gpu_tokens import SHAPES, choices
from torch.profiler import ProfilerActivity, profile

import dynaxx as dx


def show(title: str, call: Callable[[], Any]) -> None:
    """Profile one call after two others."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        call()
        torch.cuda.synchronize()
    kernels = [event for event in found.key_averages() if event.self_device_time_total > 0]
    print(f"{title}: {sum(event.self_device_time_total for event in kernels) / 1e3:.3f} ms", flush=True)
    for event in sorted(kernels, key=lambda event: -event.self_device_time_total)[:9]:
        print(f"  {event.self_device_time_total / 1e3:9.3f} ms  {event.count:4d} x  {event.key[:70]}", flush=True)


def main() -> None:
    """Profile and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, nargs="+", default=list(range(len(SHAPES))), help="of gpu_tokens.py")
    args = parser.parse_args()
    for shape in (SHAPES[i] for i in args.shapes):
        q, k, v = shape.inputs(shape.queries, shape.keys)
        chosen = choices(shape.queries, shape.keys, shape.tokens // shape.block_size, shape.block_size)
        attend = lambda q=q, k=k, v=v, chosen=chosen, size=shape.block_size: dx.selected_attention(
            q, k, v, chosen, block_size=size
        )
        out = attend()
        do, leaves = torch.randn_like(out), (q, k) if shape.dim_v < shape.dim else (q, k, v)
        show(f"{shape.name}, {shape.keys}, forward", torch.no_grad()(attend))
        back = lambda out=out, leaves=leaves, do=do: torch.autograd.grad(out, leaves, do, retain_graph=True)
        show(f"{shape.name}, {shape.keys}, backward", back)
        del q, k, v, out, do, leaves, attend, back, chosen
        torch.cuda.empty_cache()
    for name in ("MLA 128 heads, 576/512", "GQA 32/8 of 128"):
        for batch in (1, 16):
            show(f"decode, {name}, {batch} sequences", decoding(name, batch, 32768)[0])


if __name__ == "__main__":
    main()
