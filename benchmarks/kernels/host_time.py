# SPDX-License-Identifier: Apache-2.0
"""Time the host: microseconds until a call on a short sequence returns, milliseconds to build a static layout.

    python benchmarks/kernels/host_time.py [--tokens 512] [--decode-tokens 4096] [--layout-tokens 131072]
        [--only layers steps] [--json FILE]

Nothing waits for the GPU within a measurement of a call. A new layout is of a pattern that was never asked for; its
time ends when it lies on the GPU. One thread.

`layers` times what transformers calls for one layer of SmolLM2's shape: its SDPA, and dynaxx with a policy, with the
model's own window, and for a prompt below the policy's border. `steps` times whole decode steps of the model in eager
mode with a growing cache, dense and under a policy, in turns, and divides them by the number of layers.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import dynaxx as dx
from dynaxx.integrations.transformers.decoder import cache_of, with_cache
from dynaxx.integrations.transformers.forward_context import ARGUMENT
from dynaxx.kernels.registry import ATTENTION
from dynaxx.lab.machine import need_gpu
from dynaxx.layout.grid import _spans
from dynaxx.patterns.base import _cached_layout
from dynaxx.patterns.global_tokens import blocks_holding
from dynaxx.patterns.whole_blocks import drawn_blocks


def host_us(call: Callable[[], object], count: int = 200, rounds: int = 5) -> float:
    """Return the microseconds until a call returns: the median of `rounds` averages over `count` calls."""
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
    module = ATTENTION.kernels(backend)
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


def small_model(layers: int, *, window: int = 0) -> Any:
    """Return a model of SmolLM2-135M's shape with random weights, with a sliding window if one is given."""
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    shape = {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": layers, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 1 << 17,
        "attn_implementation": "sdpa", "dtype": torch.bfloat16,
    }  # fmt: skip
    model: Any
    with torch.device("cuda"):
        if window:
            model = MistralForCausalLM(MistralConfig(**shape, head_dim=64, sliding_window=window))
        else:
            model = LlamaForCausalLM(LlamaConfig(**shape))
    return model.to(torch.bfloat16).eval()


def policy_for(model: Any, *, dense_below: int) -> dx.Policy:
    """Return a policy with one rule for prompts and one for decoding."""
    from dynaxx.integrations.transformers.apply_policy import model_facts

    prefill = dx.Rule.of(dx.SlidingWindow(256) | dx.Sink(64) | dx.TopK(0.1))
    decode = dx.Rule.of(dx.Sink(64) | dx.SlidingWindow(128) | dx.TopK(0.1, dx.MinMax()), phase="decode")
    borders = {"dense_below": dense_below, "decode_dense_below": 0}
    return dx.Policy(model=model_facts(model), block_size=64, rules=[prefill, decode], **borders)


def layer_times(tokens: int) -> Iterator[tuple[str, float]]:
    """Time the attention call of a second layer within a pass, as transformers makes it, after two equal passes."""
    from transformers import AttentionInterface

    from dynaxx.integrations.transformers.calls import interface, own_planning
    from dynaxx.integrations.transformers.decoder import NAME

    sdpa = AttentionInterface()["sdpa"]
    ids = torch.randint(0, 49152, (1, tokens), device="cuda")
    found: dict[str, float] = {}
    borders, all_served = own_planning.BORDERS["cuda"], {"causal": None, "masked": 1, "eager": 1}
    for name, window, dense_below in (
        ("rule", 0, 0),
        ("below the border", 0, 1 << 20),
        ("own window", tokens // 4, None),
    ):
        model = small_model(2, window=window)
        own_planning.BORDERS["cuda"] = all_served if window else borders  # a window of a short prompt is served, too
        handle = dx.apply(model) if dense_below is None else dx.apply(model, policy_for(model, dense_below=dense_below))

        def timed(module, q, k, v, mask, name=name, **kwargs):  # type: ignore[no-untyped-def]
            if module.layer_idx == 1:
                plain = {key: value for key, value in kwargs.items() if key != ARGUMENT}
                found[f"{name}, SDPA"] = host_us(lambda: sdpa(module, q, k, v, None, **plain), 60)
                found[f"{name}, dynaxx"] = host_us(lambda: interface.attention(module, q, k, v, mask, **kwargs), 60)
            return interface.attention(module, q, k, v, mask, **kwargs)

        for attend in (interface.attention, interface.attention, timed):
            AttentionInterface.register(NAME, attend)
            model(ids, logits_to_keep=1, use_cache=False)
        AttentionInterface.register(NAME, interface.attention)
        handle.remove()
    own_planning.BORDERS["cuda"] = borders
    yield from found.items()


def step_times(tokens: int, layers: int = 30, steps: int = 60) -> Iterator[tuple[str, float]]:
    """Time the host's part of decode steps, per layer: models take their steps in turns, each with a growing cache.

    SDPA's first step over a new number of keys takes twice as long, probably because cuDNN makes a plan for it. So all
    steps are taken twice, and the second time counts.
    """
    dense = small_model(layers)
    copied = lambda: copy.deepcopy(dense, {id(x): x for x in (*dense.parameters(), *dense.buffers())})
    models = {"dense": dense, "again": copied(), "policy": copied()}
    handle = dx.apply(models["policy"], policy_for(dense, dense_below=1 << 20))
    ids = torch.randint(0, 49152, (1, tokens), device="cuda")
    prompt = lambda model: with_cache(model, cache_of(model(ids, logits_to_keep=1, use_cache=True)))
    order, draw = list(models), random.Random(0)
    for _ in range(2):
        caches = {name: prompt(model) for name, model in models.items()}
        wall: dict[str, list[float]] = {name: [] for name in models}
        thread: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(steps + 10):
            draw.shuffle(order)
            for name in order:
                torch.cuda.synchronize()
                start, cpu = time.perf_counter(), time.thread_time()
                models[name](ids[:, :1], use_cache=True, **caches[name])
                thread[name].append((time.thread_time() - cpu) * 1e6 / layers)
                wall[name].append((time.perf_counter() - start) * 1e6 / layers)
    for kind, taken in (("", wall), (", CPU time", thread)):
        taken = {name: times[10:] for name, times in taken.items()}
        yield f"decode step, dense{kind}", median(taken["dense"])
        for name in ("again", "policy"):
            more = median(b - a for a, b in zip(taken["dense"], taken[name], strict=True))
            yield f"decode step, {name} beyond dense{kind}", more
    print(handle.stats(), flush=True)
    handle.remove()


@torch.inference_mode()
def print_model(tokens: int, decode_tokens: int, parts: Sequence[str]) -> dict[str, float]:
    """Print the host's microseconds per layer of a model of transformers."""
    found = dict(layer_times(tokens)) if "layers" in parts else {}
    found |= dict(step_times(decode_tokens)) if "steps" in parts else {}
    for name, us in found.items():
        print(f"{'layer':8}{name:50}{us:8.1f} us", flush=True)
    return found


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


def forget() -> None:
    """Drop all cached layouts and the cached parts of grids and rules, so that a call is a first one."""
    _cached_layout.clear()
    for cache in (_spans, drawn_blocks, blocks_holding):
        cache.cache_clear()


def built_ms(rule: dx.Pattern, tokens: int) -> float:
    """Return the milliseconds until a new layout lies on the GPU."""
    forget()
    torch.cuda.synchronize()
    start = time.perf_counter()
    rule.layout(tokens, device="cuda")
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


PARTS = ("attention", "decode", "layouts", "layers", "steps")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--decode-tokens", type=int, default=4096)
    parser.add_argument("--layout-tokens", type=int, default=131072)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="parts to time")
    parser.add_argument("--json", type=Path, help="write the times of a model's layers and steps to this file")
    given = parser.parse_args()
    need_gpu()
    torch.set_num_threads(1)
    print(torch.cuda.get_device_name())
    for backend in ("hopper", "triton") if "attention" in given.only else ():
        print_calls(given.tokens, backend)
    if "decode" in given.only:
        print_decode(given.decode_tokens)
    if "layouts" in given.only:
        print_layouts(given.layout_tokens)
    if {"layers", "steps"} & set(given.only):
        times = print_model(given.tokens, given.decode_tokens, given.only)
        facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "dynaxx": dx.__version__}
        facts["load"] = str(round(os.getloadavg()[0], 1))
        if given.json:
            given.json.write_text(json.dumps({**facts, "host_us_per_layer": times}, indent=1) + "\n", encoding="utf-8")
