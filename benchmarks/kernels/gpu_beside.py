# SPDX-License-Identifier: Apache-2.0
"""Measure what benchmarks/suites does not: building layouts, host time, an encoder, growth with length.

    python benchmarks/kernels/gpu_beside.py                     # or some: layouts host encoder growth
    python benchmarks/kernels/gpu_beside.py growth --plot growth.svg --json

`python benchmarks/targets.py FILE` holds its JSON against the targets.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from dynaxx import patterns as p
from dynaxx.lab.machine import need_gpu
from dynaxx.lab.report.charts import Axes, ChartLine, Point, line_chart
from dynaxx.layout import BlockLayout
from dynaxx.ops.attention import sparse_attention

LENGTH = 131072
Report = Callable[[str], None]  # receives a line of text
PATTERNS: dict[str, p.Pattern] = {
    "window 1024": p.SlidingWindow(1024),
    "dilated, 64 keys by 16": p.Dilated(64, 16),
    "strided 128": p.SlidingWindow(128) | p.Strided(4096),
    "64 global tokens, symmetric": p.SlidingWindow(512) | p.GlobalTokens(64),
    "sink and window": p.Sink(128) | p.SlidingWindow(4096),
    "random blocks": p.SlidingWindow(256) | p.RandomBlocks(3),
    "local blocks": p.LocalBlocks(4),
    "documents": p.Documents(tuple(range(0, LENGTH + 1, 8192))),
    "longformer": p.longformer(512, 1),
    "bigbird": p.bigbird(192, 64, 3),
}
GROWTH = tuple(4096 << i for i in range(9))  # 4k to 1M
GROWTH_WINDOW = 1024


def time_layouts(device: torch.device, say: Report) -> list[dict[str, Any]]:
    """Time a pattern until its layout is on the device at 128k tokens, fresh and cached, and measure peak memory."""
    from host_time import forget

    def build(pattern: p.Pattern) -> tuple[float, BlockLayout]:
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        layout = pattern.layout(LENGTH, causal=True, block_size=128, device=device)
        torch.cuda.synchronize(device)
        return (time.perf_counter() - begin) * 1e3, layout

    rows = []
    for name, pattern in PATTERNS.items():
        build(pattern)  # once for the allocator and what torch loads
        fresh = []
        for _ in range(3):
            forget()
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            ms, layout = build(pattern)
            fresh.append(ms)
        row = {
            "pattern": name,
            "cached_ms": round(median(build(pattern)[0] for _ in range(5)), 4),
            "fresh_ms": round(median(fresh), 3),
            "peak_mib": round((torch.cuda.max_memory_allocated(device) - before) / 2**20, 2),
            "blocks": int(layout.kv_indices.numel()),
        }
        say(f"layout at 128k, {name:>28}: {row['fresh_ms']} ms, cached {row['cached_ms']}, {row['peak_mib']} MiB")
        rows.append(row)
    return rows


def time_host(device: torch.device, say: Report) -> list[dict[str, Any]]:
    """Time the host until a call returns, in microseconds, at lengths that the GPU finishes sooner."""
    rows = []
    for seqlen in (512, 2048):
        for call, run in host_calls(seqlen, device).items():
            us = host_us(run, call == "forward")
            rows.append({"call": f"{call}, {seqlen} tokens", "us": round(us, 1)})
            say(f"host time of a call, {rows[-1]['call']}: {us:.1f} us")
    return rows


def host_calls(seqlen: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Return calls of a window over 8 q and 2 kv heads, which the GPU finishes sooner than the host."""
    layout = p.SlidingWindow(256).layout(seqlen, block_size=128, device=device)
    draw = lambda heads: torch.randn(1, seqlen, heads, 128, device=device, dtype=torch.bfloat16)
    q, k, v = draw(8), draw(2), draw(2)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    train = lambda: sparse_attention(leaves[0], leaves[1], leaves[2], layout)
    out = train()
    do = torch.randn_like(out)
    return {
        "forward": lambda: sparse_attention(q, k, v, layout),
        "forward for training": train,
        "backward": lambda: torch.autograd.grad(out, leaves, do, retain_graph=True),
    }


def host_us(run: Callable[[], object], inference: bool, calls: int = 100) -> float:
    """Return the microseconds until a call returns."""
    times = []
    with torch.inference_mode(inference):
        for _ in range(7):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(calls):
                run()
            times.append((time.perf_counter() - begin) / calls * 1e6)
            torch.cuda.synchronize()
    return median(times)


def time_encoder(device: torch.device, say: Report) -> list[dict[str, Any]]:
    """Time a forward of BERT-base's shape (random weights, 8 x 2,048 tokens): eager, SDPA, a window of 256 on dynaxx.

    The window goes through transformers' `AttentionInterface`, where an attention function of any kind is registered.
    """
    from transformers import AttentionInterface, BertConfig, BertModel
    from triton.testing import do_bench

    AttentionInterface.register("dynaxx_window", _window_of_256)
    with torch.device(device):
        ids = torch.randint(1000, 30000, (8, 2048), device=device)
        model = BertModel(BertConfig(max_position_embeddings=2048), add_pooling_layer=False).to(torch.bfloat16).eval()
    run = lambda: model(ids)
    kinds = {"eager": "eager", "sdpa": "sdpa", "dynaxx": "dynaxx_window"}
    rows: list[dict[str, Any]] = []
    turns: dict[str, list[float]] = {name: [] for name in kinds}
    host: dict[str, float] = {}
    with torch.inference_mode():
        for _ in range(3):  # take turns: clocks and the host's load change
            for name, attention in kinds.items():
                model.set_attn_implementation(attention)
                run()
                turns[name].append(round(do_bench(run, warmup=30, rep=100, return_mode="median"), 3))
                host[name] = host_us(run, True, calls=1) / 1e3
        for name, attention in kinds.items():
            model.set_attn_implementation(attention)
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            run()
            torch.cuda.synchronize(device)
            peak, ms = torch.cuda.max_memory_allocated(device), median(turns[name])
            above = (peak - before) / 2**20
            rows.append(
                {"attention": name, "ms": ms, "ms_in_turns": turns[name], "host_ms": round(host[name], 2),
                 "mib": round(peak / 2**20, 1), "above_mib": round(above, 1)}
            )  # fmt: skip
            spread = f"{min(turns[name]):.2f} to {max(turns[name]):.2f}, {host[name]:.2f} of the host"
            say(f"encoder, 8 x 2,048, {name:>6}: {ms:.2f} ms ({spread}), peak {peak / 2**20:.0f} MiB (+{above:.0f})")
    return rows


def _window_of_256(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    """Show 128 keys before a query, itself, and 127 after it."""
    layout = p.SlidingWindow((128, 127)).layout(query.shape[2], causal=False, block_size=64, device=query.device)
    return sparse_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), layout), None


def time_growth(device: torch.device, say: Report) -> list[dict[str, Any]]:
    """Measure ms and peak memory of a forward with a window of 1,024 at 4k to 1M tokens, 8 / 2 heads of 128."""
    from triton.testing import do_bench

    rows = []
    for seqlen in GROWTH:
        draw = lambda heads, n=seqlen: torch.randn(1, n, heads, 128, device=device, dtype=torch.bfloat16)
        q, k, v = draw(8), draw(2), draw(2)
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        layout = p.SlidingWindow(GROWTH_WINDOW).layout(seqlen, block_size=128, device=device)
        with torch.inference_mode():
            run = lambda q=q, k=k, v=v, layout=layout: sparse_attention(q, k, v, layout)
            run()
            torch.cuda.synchronize(device)
            peak = torch.cuda.max_memory_allocated(device) - before
            ms = do_bench(run, warmup=10, rep=40, return_mode="median")
        blocks = int(layout.kv_indptr[..., -1].max())
        rows.append({"seqlen": seqlen, "ms": round(ms, 4), "mib": round(peak / 2**20, 1), "blocks": blocks,
                     "us_per_block": round(ms * 1e3 / blocks, 4)})  # fmt: skip
        say(
            "window of 1,024 over {seqlen:>8,} tokens: {ms:8.3f} ms, {mib:8.1f} MiB, {blocks} blocks".format(**rows[-1])
        )
    return rows


def draw_growth(rows: list[dict[str, Any]]) -> str:
    """Draw time and memory per token by length, relative to 4k tokens: growth with the blocks is a level line."""
    first = rows[0]
    per = lambda row, name: row[name] / first[name] / (row["seqlen"] / first["seqlen"])
    say = lambda row, name, unit: f"{row['seqlen']:,} tokens: {row[name]} {unit}"
    line = lambda label, name, unit, style: ChartLine(
        label, [Point(row["seqlen"], per(row, name), say(row, name, unit)) for row in rows], style
    )
    series = [
        line("time", "ms", "ms", "accent"),
        line("memory", "mib", "MiB", "ink"),
        line("visited blocks", "blocks", "blocks", "dashed"),
    ]
    axes = Axes(
        x_label="tokens",
        y_label="per token, of what 4k tokens take",
        x_format=lambda x: f"{x / 1024:.0f}k" if x < 1 << 20 else f"{x / (1 << 20):.0f}M",
        y_format=lambda y: f"{y:.2g}",
        log_x=True,
        width=640,
        height=320,
    )
    alt = (
        f"Time and memory per token of a sliding window of {GROWTH_WINDOW} keys, {GROWTH[0]:,} to {GROWTH[-1]:,} tokens"
    )
    return line_chart(series, axes, alt=alt)


PARTS = {"layouts": time_layouts, "host": time_host, "encoder": time_encoder, "growth": time_growth}


def main() -> None:
    """Measure the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default all")
    parser.add_argument("--plot", type=Path, help="draw growth into this SVG file")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    need_gpu()
    device = torch.device("cuda", torch.cuda.current_device())
    say = lambda line: print(line, file=sys.stderr if args.json else sys.stdout, flush=True)
    found = {part: PARTS[part](device, say) for part in args.parts or PARTS}
    if args.plot:
        args.plot.write_text(draw_growth(found["growth"]))
    if args.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
