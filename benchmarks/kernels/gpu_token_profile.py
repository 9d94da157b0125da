# SPDX-License-Identifier: Apache-2.0
r"""Print the GPU time of each kernel of attention over chosen tokens: forward, backward and a decoding step.

    python benchmarks/kernels/gpu_token_profile.py --shapes 0 1 2 3 4 --json profile.json

Clocks are higher than in `gpu_tokens.py`, since a profiled call is alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_token_decode import decoding
from gpu_tokens import SHAPES, choices
from torch.profiler import ProfilerActivity, profile

import dynaxx as dx

LEAST = 0.03  # of the time of a step other than decoding: kernels below it are not in the rows


def show(shape: str, keys: int, step: str, call: Callable[[], Any]) -> list[dict[str, Any]]:
    """Profile one call after two others; print its kernels, and return the rows of those that take time."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:  # with CPU, operators would repeat their kernels
        call()
        torch.cuda.synchronize()
    kernels = [event for event in found.key_averages() if event.self_device_time_total > 0]
    total = sum(event.self_device_time_total for event in kernels)
    print(f"{shape}, {keys}, {step}: {total / 1e3:.3f} ms", flush=True)
    rows = []
    for event in sorted(kernels, key=lambda event: -event.self_device_time_total)[:9]:
        time = event.self_device_time_total
        print(f"  {time / 1e3:9.3f} ms  {event.count:4d} x  {event.key[:70]}", flush=True)
        if time >= LEAST * total or step.startswith("decode"):
            name = event.key.removeprefix("_").removesuffix("_kernel")
            rows.append({"shape": shape, "keys": keys, "step": step, "kernel": name, "ms": round(time / 1e3, 3)})
            rows[-1]["share"] = f"{time / total:.0%}"
    return rows


def main() -> None:
    """Profile and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, nargs="+", default=list(range(len(SHAPES))), help="of gpu_tokens.py")
    parser.add_argument("--json", type=Path, help="write the rows here, for `record.py --from`")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for shape in (SHAPES[i] for i in args.shapes):
        q, k, v = shape.inputs(shape.queries, shape.keys)
        chosen = choices(shape.queries, shape.keys, shape.tokens // shape.block_size, shape.block_size)
        attend = lambda q=q, k=k, v=v, chosen=chosen, size=shape.block_size: dx.selected_attention(
            q, k, v, chosen, block_size=size
        )
        out = attend()
        do, leaves = torch.randn_like(out), (q, k) if shape.dim_v < shape.dim else (q, k, v)
        rows += show(shape.name, shape.keys, "forward", torch.no_grad()(attend))
        back = lambda out=out, leaves=leaves, do=do: torch.autograd.grad(out, leaves, do, retain_graph=True)
        rows += show(shape.name, shape.keys, "backward", back)
        del q, k, v, out, do, leaves, attend, back, chosen
        torch.cuda.empty_cache()
    for name in ("MLA 128 heads, 576/512", "GQA 32/8 of 128"):
        for batch in (1, 16):
            step = f"decode, {batch} sequence{'s' if batch > 1 else ''}"
            rows += show(name, 32768, step, decoding(name, batch, 32768)[0])
    if args.json:
        args.json.write_text(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
