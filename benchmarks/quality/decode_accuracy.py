# SPDX-License-Identifier: Apache-2.0
"""Measure what a decoding step loses by its budget and its cache's precision, against dense attention in fp64.

python benchmarks/quality/decode_accuracy.py [--model smollm2] [--tokens 1536] [--steps 8] [--random]
                                     [--rounding | --summaries] [--json FILE]

On keys, values and queries of SmolLM2-135M (or another model) over Python's documentation (all layers that see
everything, the last tokens one after the other), or Gaussian ones, where no page and no token matters more than
another. Scales are per page and head. Exact: as `PagedCache.quantized` has it, the first 4 and the last 28 tokens are
not rounded. Centred: the mean key of a head is subtracted from all of its keys first, which adds the same to every
score of a query, so that attention does not change. Per cell:
mean cosine over heads, largest error over the largest value, and on a CPU the milliseconds of all steps together,
selection included. `--rounding`: what the formats alone lose, all else in fp64, on Gaussian keys and values.
`--summaries`: how much of the attention lies in pages chosen by summaries in fp32, bf16 and int8.
"""

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path

import torch

import dynaxx as dx
from dynaxx.integrations.transformers.decoder import with_cache
from dynaxx.layout.paging import quantize_pages

CENTRED, EXACT = ", centred keys", ", exact tokens"
EIGHT_BITS = ("float8_e4m3fn", "int8")
DTYPES = ("float32", "bfloat16", "float16", *(name + how for how in ("", EXACT, CENTRED) for name in EIGHT_BITS))
BUDGETS = (0.05, 0.10, 0.25, 1.0)
PAGE_SIZE = 32


def model_inputs(name, tokens, steps):
    """Capture q (1, 1, heads, head_dim) and k, v (1, seqlen, kv_heads, head_dim) of every step and layer."""
    from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

    from dynaxx.lab.models import load_model
    from dynaxx.lab.texts import pydoc_text

    model, tokenizer = load_model(name)
    ids = torch.tensor([tokenizer(pydoc_text())["input_ids"][:tokens]])
    found = []

    def capture(module, query, key, value, mask, **kwargs):
        if query.shape[2] == 1 and not kwargs.get("sliding_window"):
            scale = kwargs["scaling"] * query.shape[-1] ** 0.5  # of a model with another than the default
            found.append(((query * scale).transpose(1, 2), key.transpose(1, 2).clone(), value.transpose(1, 2).clone()))
        return AttentionInterface()["sdpa"](module, query, key, value, mask, **kwargs)

    AttentionInterface.register("capture", capture)
    AttentionMaskInterface.register("capture", AttentionMaskInterface()["sdpa"])
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :-steps], logits_to_keep=1, **with_cache(model, cache))
        model.set_attn_implementation("capture")
        for step in range(-steps, 0):
            model(ids[:, step : step + 1 or None], **with_cache(model, cache))
    return found


def random_inputs(tokens):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    return [(draw(1, 1, 9, 64), draw(1, tokens, 3, 64), draw(1, tokens, 3, 64)) for _ in range(8)]


def cache_of(k, v, dtype):
    if dtype.endswith(EXACT):
        dtype = getattr(torch, dtype.removesuffix(EXACT))
        return dx.summarize_pages(dx.PagedCache.quantized(k, v, dtype, page_size=PAGE_SIZE), bound=0.5)
    if dtype.endswith(CENTRED):
        k = k - k.mean(1, keepdim=True)
    dtype, scales = getattr(torch, dtype.removesuffix(CENTRED)), {}
    if dtype.itemsize == 1:
        (k, k_scale), (v, v_scale) = (quantize_pages(x, dtype, PAGE_SIZE) for x in (k, v))
        scales = {"k_scale": k_scale, "v_scale": v_scale}
    used = torch.tensor([k.shape[1]], dtype=torch.int32)
    return dx.summarize_pages(dx.PagedCache(k.to(dtype), v.to(dtype), used, page_size=PAGE_SIZE, **scales), bound=0.5)


def measure(inputs, exact, dtype, share):
    caches = [cache_of(k, v, dtype) for _, k, v in inputs]
    budget = dx.PageBudget(share, sinks=PAGE_SIZE, window=2 * PAGE_SIZE, bound=0.5)
    step = lambda: [dx.sparse_decode(q, cache, budget) for (q, _, _), cache in zip(inputs, caches, strict=True)]
    step()
    start = time.thread_time()
    outs = step()
    seconds = time.thread_time() - start
    cosines = [torch.cosine_similarity(a.double(), b, dim=-1).flatten() for a, b in zip(outs, exact, strict=True)]
    errors = [float((a - b).abs().amax() / b.abs().amax()) for a, b in zip(outs, exact, strict=True)]
    return {
        "dtype": dtype,
        "budget": share,
        "cosine": float(torch.cat(cosines).mean()),
        "max_error": max(errors),
        "ms": 1e3 * seconds,
    }


def rounding():
    """Print the cosine to bf16 attention of attention in fp64 over keys, values, or both rounded to 8 bits."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(64, 1, 128, generator=generator).double()
    k, v = (torch.randn(64, 3328, 128, generator=generator).bfloat16() for _ in range(2))
    attend = lambda k, v: torch.softmax(q @ k.double().mT * q.shape[-1] ** -0.5, -1) @ v.double()
    cosine = lambda k, v: float(torch.cosine_similarity(attend(k, v).flatten(), exact.flatten(), dim=0))
    exact = attend(k, v)
    for dtype in (torch.float8_e4m3fn, torch.int8):
        rounded = []
        for x in (k, v):
            stored, scale = quantize_pages(x[:, :, None], dtype, 64)
            rounded.append((stored.double() * scale.repeat_interleave(64, 1)[..., None]).squeeze(2))
        both, keys, values = cosine(*rounded), cosine(rounded[0], v), cosine(k, rounded[1])
        print(f"{dtype}: keys alone {keys:.5f}, values alone {values:.5f}, both {both:.5f}")


def recall_of(q, k, page_size, share, bound, dtype):
    """Return the share of dense attention that falls in the chosen pages, averaged over heads."""
    cache = dx.summarize_pages(dx.PagedCache.contiguous(k, k, page_size=page_size), bound=bound, dtype=dtype)
    pages = dx.select_pages(q, cache, dx.PageBudget(share, sinks=page_size, window=2 * page_size, bound=bound))
    every = cache.max_pages
    scores = (
        torch.einsum("bnhgd,bmhd->bhgm", q.unflatten(2, (k.shape[2], -1)).double(), k.double()) * k.shape[3] ** -0.5
    )
    weights = torch.nn.functional.pad(scores.softmax(-1), (0, every * page_size - k.shape[1]))
    kept = torch.zeros(*pages.shape[:2], every + 1).scatter_(2, torch.where(pages < 0, every, pages).long(), 1.0)
    return float((weights.unflatten(-1, (every, -1)).sum(-1) * kept[:, :, None, :-1]).sum(-1).mean())


def summaries(inputs):
    """Print recall by the dtype of summaries, for each page size, bound and budget."""
    print("| pages | bound | budget | fp32 | bf16 | int8 |")
    print("|---|---|---|---|---|---|")
    for page_size, bound, share in itertools.product((32, 64), (1.0, 0.5, 0.0), (0.05, 0.1, 0.25)):
        found = [
            statistics.mean(recall_of(q, k, page_size, share, bound, dtype) for q, k, _ in inputs)
            for dtype in (torch.float32, torch.bfloat16, torch.int8)
        ]
        print(f"| {page_size} | {bound} | {share:.0%} | " + " | ".join(f"{x:.4f}" for x in found) + " |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1536)
    parser.add_argument("--model", default="smollm2", help="as the tools name it")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounding", action="store_true")
    parser.add_argument("--summaries", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.rounding:
        return rounding()
    inputs = random_inputs(args.tokens) if args.random else model_inputs(args.model, args.tokens, args.steps)
    if args.summaries:
        return summaries(inputs)
    exact = [
        dx.sparse_decode(q.double(), dx.PagedCache.contiguous(k.double(), v.double(), page_size=PAGE_SIZE))
        for q, k, v in inputs
    ]
    rows = [measure(inputs, exact, dtype, share) for dtype in DTYPES for share in BUDGETS]
    print("| cache | " + " | ".join(f"{share:.0%}" for share in BUDGETS) + " |")
    print("|---|" + "---|" * len(BUDGETS))
    for dtype in DTYPES:
        cells = [row for row in rows if row["dtype"] == dtype]
        print(
            f"| {dtype} | "
            + " | ".join(f"{c['cosine']:.5f}, {c['max_error']:.1e}, {c['ms']:.1f} ms" for c in cells)
            + " |"
        )
    if args.json:
        args.json.write_text(json.dumps({"tokens": args.tokens, "inputs": len(inputs), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
