# SPDX-License-Identifier: Apache-2.0
"""Time the host: microseconds until a call on a short sequence returns, milliseconds to build a static layout.

    python benchmarks/host_time.py [--tokens 512] [--decode-tokens 4096] [--layout-tokens 131072] [--only decode]

Nothing waits for the GPU within a measurement of a call. A new layout is of a pattern that was never asked for; its
time ends when it lies on the GPU. One thread.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

import torch

import dynaxx as dx
from dynaxx.lab.machine import need_gpu
from dynaxx.ops.dispatch import load_backend
from dynaxx.patterns import caches


def host_us(call: Callable[[], object], count: int = 200, rounds: int = 5) -> float:
    """Return the seconds of one call: the median of `rounds` averages."""
    for _ in range(30):
        call()
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        found.append((time.perf_counter() - start) / count * 1e6)
    return median(found)


def print_calls(tokens: int, backend: str) -> None:
    """Print the host's time of forward and backward with 8 q heads over 2 kv heads of 128, bf16."""
    layout = (dx.SlidingWindow(256) | dx.GlobalTokens(64)).layout(tokens, device="cuda")
    q, k, v = (torch.randn(1, tokens, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    module = load_backend(backend)
    attend = lambda: dx.sparse_attention(q, k, v, layout, backend=backend)
    out, lse = dx.sparse_attention(q, k, v, layout, return_lse=True, backend=backend)
    do, dlse = torch.randn_like(out), torch.zeros_like(lse)
    times = {
        "forward": host_us(attend),
        "the backend's part of it": host_us(lambda: module.attention_forward(q, k, v, layout, 0.1)),
        "the backend's backward": host_us(
            lambda: module.attention_backward(do, dlse, q, k, v, out, lse, layout, 0.1), 100
        ),
    }
    rule = dx.SlidingWindow(256) | dx.TopK(0.1)
    choose = lambda: dx.select_blocks(q, k, rule, block_size=128)
    times["blocks chosen"] = host_us(choose)
    times["blocks chosen, forward over them"] = host_us(lambda: dx.sparse_attention(q, k, v, choose(), backend=backend))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    both = lambda: torch.autograd.grad(dx.sparse_attention(q, k, v, layout, backend=backend), (q, k, v), do)
    times["forward, with autograd"] = host_us(lambda: dx.sparse_attention(q, k, v, layout, backend=backend))
    times["forward and backward"] = host_us(both, 100)
    with torch.autograd.set_multithreading_enabled(False):
        times["the same, backward in the calling thread"] = host_us(both, 100)
    for name, us in times.items():
        print(f"{backend:8}{name:42}{us:8.1f} us", flush=True)


def print_decode(tokens: int) -> None:
    """Time one sequence's step: bf16 queries of 32 q heads over 8 kv heads of 128, a tenth of the pages."""
    k, v = torch.randn(2, 1, tokens, 8, 128, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(1, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
    used = torch.full((1,), tokens, dtype=torch.int32, device="cuda")
    budget = dx.PageBudget(0.1, sinks=4, window=64)
    table = torch.arange(tokens // 64, dtype=torch.int32, device="cuda")[None]
    pages = [x.unflatten(1, (tokens // 64, 64)).flatten(0, 1) for x in (k, v)]
    caches = {
        "contiguous": dx.PagedCache.contiguous(k, v, seqused_k=used),
        "paged": dx.PagedCache(*pages, used, table),
        "fp8": replace(dx.PagedCache.quantized(k, v, seqused_k=used), exact=None),
        "fp8, exact tokens": dx.PagedCache.quantized(k, v, seqused_k=used),
    }
    for name, cache in caches.items():
        cache = dx.summarize_pages(cache)
        chosen = dx.select_pages(q, cache, budget)
        calls = {
            "pages chosen": partial(dx.sparse_decode, q, cache, budget),
            "pages given": partial(dx.sparse_decode, q, cache, chosen),
            "all pages": partial(dx.sparse_decode, q, cache),
            "summaries of one token": partial(dx.summarize_pages, cache, new_tokens=1),
            "a cache made anew, pages chosen": lambda cache=cache: dx.sparse_decode(q, replace(cache), budget),
        }
        for what, call in calls.items():
            print(f"{'decode':8}{name + ', ' + what:50}{host_us(call):8.1f} us", flush=True)


def print_layouts(tokens: int) -> None:
    """Print the time to build layouts on the host and copy them; blocks of 128, causal."""
    documents = tuple(range(0, tokens + 1, tokens // 16))
    for name, rule in {
        "SlidingWindow(1024)": dx.SlidingWindow(1024),
        "SlidingWindow(4096)": dx.SlidingWindow(4096),
        "Dilated(512, 4)": dx.Dilated(512, 4),
        "Strided(2048)": dx.Strided(2048),
        "SlidingWindow(2048) | Strided(2048)": dx.SlidingWindow(2048) | dx.Strided(2048),
        "RandomBlocks(8)": dx.RandomBlocks(8),
        "GlobalTokens(64)": dx.GlobalTokens(64),
        "GlobalTokens(64, symmetric=True)": dx.GlobalTokens(64, symmetric=True),
        "GlobalTokens of 33 positions": dx.GlobalTokens(tuple(range(0, tokens, 4001))),
        "streaming(4096)": dx.streaming(4096),
        "longformer(512, 16)": dx.longformer(512, 16),
        "bigbird(384, 64, 3)": dx.bigbird(384, 64, 3),
        "LocalBlocks(8)": dx.LocalBlocks(8),
        "Documents, 16": dx.Documents(documents),
        "Documents, 200 of any length": dx.Documents((0, *sorted(random.Random(0).sample(range(tokens), 199)), tokens)),
        "SlidingWindow(4096) & Documents": dx.SlidingWindow(4096) & dx.Documents(documents),
    }.items():
        new = [built_ms(rule, tokens) for _ in range(12)]
        cached = host_us(lambda rule=rule: rule.layout(tokens, device="cuda"))  # type: ignore[misc]
        blocks = rule.layout(tokens).nnz
        print(
            f"{name:38}{median(new):8.3f} ms new{cached:8.2f} us cached, {blocks} blocks",
            flush=True,
        )


def built_ms(rule: dx.Pattern, tokens: int) -> float:
    """Return the milliseconds until a new layout lies on the GPU."""
    caches.forget()
    torch.cuda.synchronize()
    start = time.perf_counter()
    rule.layout(tokens, device="cuda")
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--decode-tokens", type=int, default=4096)
    parser.add_argument("--layout-tokens", type=int, default=131072)
    parser.add_argument("--only", choices=("attention", "decode", "layouts"), help="one part")
    given = parser.parse_args()
    need_gpu()
    torch.set_num_threads(1)
    print(torch.cuda.get_device_name())
    for backend in ("hopper", "triton") if given.only in (None, "attention") else ():
        print_calls(given.tokens, backend)
    if given.only in (None, "decode"):
        print_decode(given.decode_tokens)
    if given.only in (None, "layouts"):
        print_layouts(given.layout_tokens)
