# SPDX-License-Identifier: Apache-2.0
"""Time full causal attention, forward: transformers' fastest SDPA call beside dynaxx, from which the border follows.

    python benchmarks/models/causal.py [--lengths 1024,2048,4096,8192,16384,32768] [--turns 9] [--wide] [--json FILE]

With --wide, only Gemma 4's global layer, forward and backward too, beside SDPA over repeated keys, its fastest form.
bf16, batch of one, in turns in one process; medians of GPU times, without the host's. The border is `BORDERS` in
integrations/transformers/calls/own_planning.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import dynaxx as dx
from dynaxx.lab.machine import need_gpu

HEADS = (
    (128, 32, 8),
    (512, 16, 2),
    (64, 32, 8),
    (64, 9, 3),
    (128, 32, 32),
    (256, 16, 8),
)  # head_dim, q heads, kv heads
WIDE = (512, 16, 2)
WARM = 3  # turns that are not counted
BUSY_CYCLES = 2_000_000  # 1 ms of other work on the GPU before a call of --wide, so that the host is ahead


def time_ms(call: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


@torch.inference_mode()
def row(head_dim: int, q_heads: int, kv_heads: int, tokens: int, turns: int) -> dict[str, Any]:
    """Time one shape."""
    q, k, v = (
        torch.randn(1, heads, tokens, head_dim, device="cuda", dtype=torch.bfloat16)
        for heads in (q_heads, kv_heads, kv_heads)
    )
    layout = dx.Causal().layout(tokens, block_size=128, device="cuda")
    by_token = [x.transpose(1, 2) for x in (q, k, v)]
    grouped = q_heads != kv_heads
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "sdpa": lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped),
        "dynaxx": lambda: dx.sparse_attention(*by_token, layout),
    }
    apart = (calls["sdpa"]().transpose(1, 2) - calls["dynaxx"]()).abs().max()
    if apart > 0.1:
        raise SystemExit(f"error: the results differ by {float(apart):.3f}")
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(WARM + turns):
        for name, call in calls.items():
            ms = time_ms(call)
            if turn >= WARM:
                taken[name].append(ms)
    ms = {name: round(median(times), 4) for name, times in taken.items()}
    shape = {"head_dim": head_dim, "q_heads": q_heads, "kv_heads": kv_heads, "tokens": tokens}
    return {**shape, **ms, "speedup": round(ms["sdpa"] / ms["dynaxx"], 3)}


def wide_row(tokens: int, turns: int) -> dict[str, Any]:
    """Time Gemma 4's global layer, forward, and forward and backward unless SDPA's scores would not fit."""
    head_dim, q_heads, kv_heads = WIDE
    q, k, v = (
        torch.randn(1, heads, tokens, head_dim, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for heads in (q_heads, kv_heads, kv_heads)
    )
    do = torch.randn(1, tokens, q_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    layout = dx.Causal().layout(tokens, block_size=128, device="cuda")
    repeated = lambda x: x.repeat_interleave(q_heads // kv_heads, 1)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "sdpa": lambda: scaled_dot_product_attention(q, repeated(k), repeated(v), is_causal=True).transpose(1, 2),
        "dynaxx": lambda: dx.sparse_attention(*(x.transpose(1, 2) for x in (q, k, v)), layout),
    }
    with torch.no_grad():
        wanted = calls["sdpa"]().float()
        apart = (calls["dynaxx"]().float() - wanted).norm() / wanted.norm()
        if apart > 0.01:
            raise SystemExit(f"error: the results differ by {float(apart):.3f}, relative")
        forward = medians(calls, turns)
    found = {"tokens": tokens, "forward_ms": forward, "speedup": round(forward["sdpa"] / forward["dynaxx"], 2)}
    if tokens <= 8192:
        gradients = lambda call: lambda: torch.autograd.grad(call(), (q, k, v), do)
        both = medians({name: gradients(call) for name, call in calls.items()}, turns)
        found |= {"step_ms": both, "step_speedup": round(both["sdpa"] / both["dynaxx"], 2)}
    return found


def medians(calls: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Return the median milliseconds of each call, in turns."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(WARM + turns):
        for name, call in calls.items():
            torch.cuda._sleep(BUSY_CYCLES)
            ms = time_ms(call)
            if turn >= WARM:
                taken[name].append(ms)
    return {name: round(median(times), 4) for name, times in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="1024,2048,4096,8192,16384,32768")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--wide", action="store_true", help="Gemma 4's global layer")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    need_gpu()
    rows: list[dict[str, Any]] = []
    for tokens in map(int, given.lengths.split(",")) if given.wide else ():
        rows.append(wide_row(tokens, given.turns))
        print(json.dumps(rows[-1]), flush=True)
    for shape in () if given.wide else HEADS:
        for tokens in map(int, given.lengths.split(",")):
            try:
                rows.append(row(*shape, tokens, given.turns))
            except torch.OutOfMemoryError:  # SDPA makes all scores of heads beyond 256
                print(f"{shape}, {tokens} tokens: out of memory", flush=True)
                torch.cuda.empty_cache()
                continue
            print(json.dumps(rows[-1]), flush=True)
            save(given.json, rows)
    save(given.json, rows)


def save(path: Path | None, rows: list[dict[str, Any]]) -> None:
    if path is not None:
        facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        path.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
