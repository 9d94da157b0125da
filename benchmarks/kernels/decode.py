# SPDX-License-Identifier: Apache-2.0
"""Time decoding with chosen pages beside dense attention and beside the bytes that must be read, on a GPU or a CPU.

python benchmarks/kernels/decode.py [--quick | --combinations | --sizes] [--only NAME ...] [--json FILE]

Checks first: random caches against the definition in fp64; a wrong kernel gets no times. Times are medians. On a GPU,
of a replayed CUDA graph that runs 4 to 32 layers, each with a cache of its own as in a model, per layer: nobody's
launches count, and nothing is in the L2 cache. On a CPU, of one thread's CPU time. TB/s are the bytes of keys, values
and summaries that a run must read, over its time; "bytes" is the time that they take at the rate of dense attention,
the fastest reader here (on a CPU: of a copy).
"""

import argparse
import json
import math
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cosine_similarity, scaled_dot_product_attention

import dynaxx as dx
from dynaxx.layout.paging import quantize_pages

KV_HEADS, GROUP, HEAD_DIM = 8, 4, 128
EVEN_AND_UNEVEN = ("batch 16, 32k", "batch 1, 128k", "batch 64, 32k")  # cases that `--uneven` compares
UNEVEN = (0.25, 0.5, 0.5, 0.75, 1.0, 1.0, 1.5, 2.5)  # pages of the kv heads, in units of their mean
LAYERS_BYTES = 16 << 30  # of keys and values in bf16: so many layers that the start of a graph is no part of one


@dataclass(frozen=True)
class Case:
    """One step of `batch` sequences of `seqlen` keys that reads a share of the pages."""

    name: str
    batch: int
    seqlen: int
    page_size: int = 64
    share: float = 0.1
    bound: float = 1.0
    seqlen_q: int = 1
    dtype: str = "bfloat16"
    paged: bool = False
    exact: bool = False  # the first and last tokens of an 8-bit cache
    uneven: bool = False  # kv heads read different numbers of pages, with the same mean

    @property
    def budget(self):
        """Return a budget for this share of pages, counting the pages that are always read, such as the last one."""
        pages = math.ceil(self.share * self.seqlen / self.page_size)
        forced = 2 if self.exact else 1  # exact tokens: the first page is read, too, so that others see the same keys
        free = max(0, pages - forced)
        budget = tuple(round(free * factor) for factor in UNEVEN) if self.uneven else free
        return dx.PageBudget(budget, sinks=int(self.exact), bound=self.bound)

    @property
    def layers(self):
        return min(32, max(4, LAYERS_BYTES // (4 * self.batch * self.seqlen * KV_HEADS * HEAD_DIM)))


GPU_CASES = (
    Case("batch 16, 32k, mean", 16, 32768, bound=0.0),
    Case("batch 16, 32k", 16, 32768),
    Case("batch 16, 32k, uneven", 16, 32768, uneven=True),
    Case("batch 1, 128k, mean", 1, 131072, bound=0.0),
    Case("batch 16, 32k, paged", 16, 32768, bound=0.0, paged=True),
    Case("batch 16, 32k, pages of 16", 16, 32768, page_size=16),
    Case("batch 16, 32k, 4 queries", 16, 32768, seqlen_q=4),
    Case("batch 1, 128k", 1, 131072),
    Case("batch 1, 128k, uneven", 1, 131072, uneven=True),
    Case("batch 64, 32k", 64, 32768),
    Case("batch 64, 32k, uneven", 64, 32768, uneven=True),
    Case("batch 64, 32k, fp8", 64, 32768, dtype="float8_e4m3fn"),
    Case("batch 64, 32k, int8", 64, 32768, dtype="int8"),
    Case("batch 64, 32k, fp8, exact tokens", 64, 32768, dtype="float8_e4m3fn", exact=True),
    Case("batch 1, 32k, 64 queries", 1, 32768, seqlen_q=64),
)
COMBINATIONS = tuple(
    Case(f"batch 16, 32k, {dtype}, {share:.0%} of the pages", 16, 32768, dtype=dtype, share=share)
    for dtype in ("bfloat16", "float8_e4m3fn", "int8")
    for share in (0.05, 0.1, 0.25, 1.0)
)
SIZES = tuple(  # the same keys in pages of several sizes, and half as many in small pages
    Case(f"batch {batch}, 32k, {share:.0%} in pages of {size}", batch, 32768, page_size=size, share=share, dtype=dtype)
    for batch, dtype in ((16, "bfloat16"), (1, "float32"))
    for size, shares in ((64, (0.1,)), (32, (0.1, 0.2)), (16, (0.1, 0.2)), (8, (0.05, 0.1, 0.2)))
    for share in shares
)
CPU_CASES = (
    Case("batch 1, 32k", 1, 32768, dtype="float32"),
    Case("batch 1, 32k, uneven", 1, 32768, uneven=True, dtype="float32"),
    Case("batch 1, 32k, mean", 1, 32768, bound=0.0, dtype="float32"),
    Case("batch 1, 32k, pages of 16", 1, 32768, page_size=16, dtype="float32"),
    Case("batch 1, 32k, paged", 1, 32768, dtype="float32", paged=True),
    Case("batch 1, 32k, bf16", 1, 32768),
    Case("batch 1, 32k, fp8", 1, 32768, dtype="float8_e4m3fn"),
    Case("batch 1, 32k, fp8, exact tokens", 1, 32768, dtype="float8_e4m3fn", exact=True),
    Case("batch 1, 32k, int8", 1, 32768, dtype="int8"),
)


def make_inputs(case, device, seed=0):
    """Return q, k and v in bf16 (fp32 on a CPU unless the cache is bf16), and the cache in the case's dtype."""
    wide = torch.float32 if device.type == "cpu" and case.dtype != "bfloat16" else torch.bfloat16
    generator = torch.Generator(device).manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, device=device, dtype=wide, generator=generator)
    q = draw(case.batch, case.seqlen_q, KV_HEADS * GROUP, HEAD_DIM)
    k, v = (draw(case.batch, KV_HEADS, case.seqlen, HEAD_DIM).transpose(1, 2) for _ in range(2))
    return q, k, v, make_cache(case, k, v)


def make_cache(case, k, v):
    if case.exact and getattr(torch, case.dtype).itemsize == 1:
        cache = dx.PagedCache.quantized(k, v, getattr(torch, case.dtype), page_size=case.page_size)
        return dx.summarize_pages(cache, bound=case.bound)
    dtype = getattr(torch, case.dtype)
    scales = {}
    if dtype.itemsize == 1:
        (k, k_scale), (v, v_scale) = (quantize_pages(x, dtype, case.page_size) for x in (k, v))
        scales = {"k_scale": k_scale, "v_scale": v_scale}
    used = torch.full((case.batch,), case.seqlen, dtype=torch.int32, device=k.device)
    if not case.paged:
        cache = dx.PagedCache(k, v, used, page_size=case.page_size, **scales)
        return dx.summarize_pages(cache, bound=case.bound)
    pages = case.seqlen // case.page_size
    order = torch.randperm(case.batch * pages, device=k.device)
    scatter = lambda x: torch.empty_like(x).index_copy_(0, order, x)
    heads_first = lambda x: x.transpose(1, 2).unflatten(2, (pages, case.page_size)).transpose(1, 2).flatten(0, 1)
    by_page = lambda x: scatter(heads_first(x)).transpose(1, 2)  # memory (pages, heads, page_size, head_dim), as vLLM
    cache = dx.PagedCache(by_page(k), by_page(v), used, order.view(case.batch, pages).int())
    return dx.summarize_pages(cache, bound=case.bound)


def check(device):
    """Check random small caches against the definition in fp64, over the chosen pages."""
    for seed, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8) * 2):
        generator = torch.Generator().manual_seed(seed)
        k, v = torch.randn(2, 2, 500, 2, 64, generator=generator).to(device)
        q = torch.randn(2, 3, 6, 64, generator=generator).to(device, torch.bfloat16 if seed % 2 else torch.float32)
        scales = {}
        if dtype.itemsize == 1:
            (k, k_scale), (v, v_scale) = (quantize_pages(x, dtype, 32) for x in (k, v))
            scales = {"k_scale": k_scale, "v_scale": v_scale}
        used = torch.tensor([500, 77], dtype=torch.int32, device=device)
        cache = dx.PagedCache(k.to(dtype), v.to(dtype), used, page_size=32, **scales)
        cache = dx.summarize_pages(cache)
        pages = dx.select_pages(q, cache, dx.PageBudget(0.3, sinks=4, window=40))
        out = dx.sparse_decode(q, cache, dx.PageBudget(0.3, sinks=4, window=40)).double()
        exact = dx.sparse_decode(q.double(), cache, pages, backend="reference")
        error = float((out - exact).abs().amax() / exact.abs().amax())
        if not error < (2e-2 if q.dtype == torch.bfloat16 or dtype == torch.bfloat16 else 2e-3):
            raise SystemExit(f"no times: error {error:.1e} with a cache of {dtype} and queries of {q.dtype}")
    return 10


def measure(runs, device, layers=1):
    """Return the median milliseconds of each run per layer; on a CPU runs take turns and get layer 0."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return {name: do_bench(captured(run, layers), return_mode="median") / layers for name, run in runs.items()}
    seconds = {name: [] for name in runs}
    for _ in range(8):
        for name, run in runs.items():
            start = time.thread_time()
            run(0)
            seconds[name].append(time.thread_time() - start)
    return {name: 1e3 * statistics.median(each[1:]) for name, each in seconds.items()}


def captured(run, layers):
    for layer in range(layers):
        run(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            run(layer)
    return graph.replay


def dense_forms(layers, device):
    """Return SDPA as it would be called, and SDPA with the heads of a group as rows, where all queries see all keys."""
    inputs = []
    for q, k, v, _ in layers:
        rows = q.unflatten(2, (KV_HEADS, GROUP)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        inputs.append((q.transpose(1, 2), rows, k.transpose(1, 2), v.transpose(1, 2)))

    def as_called(layer):
        q, _, k, v = inputs[layer]
        return scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def as_rows(layer, backend=None):
        _, rows, k, v = inputs[layer]
        if backend is None:
            return scaled_dot_product_attention(rows, k, v)
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(rows, k, v)

    forms = {"sdpa, enable_gqa": as_called, "sdpa, groups as rows": as_rows}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION) if device.type == "cuda" else ():
        name = backend.name.split("_")[0].lower()
        forms[f"sdpa, groups as rows, {name}"] = lambda layer, backend=backend: as_rows(layer, backend)
    return forms


def bytes_read(case, cache):
    """Count the bytes that each run must read: keys and values of its pages, and all summaries if it chooses."""
    page = case.batch * KV_HEADS * case.page_size * 2 * HEAD_DIM * cache.k.dtype.itemsize
    attention = math.ceil(case.share * case.seqlen / case.page_size) * page
    summaries = {x.data_ptr(): x for x in (cache.summaries.low, cache.summaries.high, cache.summaries.scale)}
    selection = sum(x.numel() * x.dtype.itemsize for x in summaries.values())
    return {
        "selection and attention": selection + attention,
        "selection": selection,
        "attention, pages given": attention,
        "dense, ours": math.ceil(case.seqlen / case.page_size) * page,
    }


def copy_rate(device):
    """Return bytes per second, read and written, of a large copy."""
    size = 2**30 if device.type == "cuda" else 2**26
    x = torch.empty(size, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * size / (1e-3 * measure({"copy": lambda layer: y.copy_(x)}, device)["copy"])


def run_case(case, device, rate, alone=False):
    """Time every run of a case, or selection and attention alone."""
    layers = [make_inputs(case, device, seed) for seed in range(case.layers if device.type == "cuda" else 1)]
    q, k, v, cache = layers[0]
    budget = case.budget
    pages = [dx.select_pages(q, cache, budget) for q, _, _, cache in layers]
    at = lambda layer: (layers[layer][0], layers[layer][3])
    runs = {
        "selection and attention": lambda layer: dx.sparse_decode(*at(layer), budget),
        "selection": lambda layer: dx.select_pages(*at(layer), budget),
        "attention, pages given": lambda layer: dx.sparse_decode(*at(layer), pages[layer]),
        "summaries of one token": lambda layer: dx.summarize_pages(at(layer)[1], new_tokens=1),
        "dense, ours": lambda layer: dx.sparse_decode(*at(layer)),
    }
    notes = {}
    if alone:
        runs = {"selection and attention": runs["selection and attention"]}
    dense = {} if alone or (q.dtype == torch.bfloat16 and device.type == "cpu") else dense_forms(layers, device)
    for name, run in dense.items():
        try:
            run(0)
            runs[name] = run
        except RuntimeError as error:
            notes[name] = str(error).splitlines()[0]
    times = measure(runs, device, len(layers))
    best = min((ms for name, ms in times.items() if name.startswith("sdpa")), default=float("nan"))
    moved = {name: count for name, count in bytes_read(case, cache).items() if name in runs}
    wide_bytes = case.batch * KV_HEADS * case.seqlen * 2 * HEAD_DIM * k.dtype.itemsize
    moved |= dict.fromkeys((name for name in times if name.startswith("sdpa")), wide_bytes)
    if device.type == "cuda" and not alone:
        rate = max(moved[name] / (1e-3 * times[name]) for name in moved if name.startswith(("sdpa", "dense")))
    wide = make_cache(replace(case, dtype=str(k.dtype).removeprefix("torch.")), k, v)
    mine, theirs = (dx.sparse_decode(q, each, pages[0]).float().flatten() for each in (cache, wide))
    cosine = float(cosine_similarity(mine, theirs, dim=0))
    return {
        "case": case.name,
        "ms": times,
        "times_faster": best / times["selection and attention"],
        "terabytes_per_second": {name: moved[name] / (1e9 * times[name]) for name in moved},
        "bytes_ms": 1e3 * moved["selection and attention"] / rate,
        "attention_bytes_ms": 1e3 * bytes_read(case, cache)["attention, pages given"] / rate,
        "tokens_per_second": 1e3 * case.batch * case.seqlen_q / times["selection and attention"],
        "cosine": cosine,
        "notes": notes,
    }


def show(row, alone):
    own = f"{row['ms']['selection and attention']:.4f} ms, {row['tokens_per_second']:.0f} tokens/s"
    if alone:
        return print(f"{row['case']}: {own}")
    print(
        f"{row['case']}: {own}, {row['times_faster']:.2f}x the best dense; bytes {row['bytes_ms']:.4f} ms (attention's "
        f"{row['attention_bytes_ms']:.4f}); cosine {row['cosine']:.6f}"
    )
    for run, ms in row["ms"].items():
        speed = row["terabytes_per_second"].get(run)
        print(f"  {run:<36} {ms:9.4f} ms" + (f" {speed:6.2f} TB/s" if speed else ""))
    for run, why in row["notes"].items():
        print(f"  {run:<36} not run: {why}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first case alone")
    parser.add_argument("--combinations", action="store_true", help="precisions and budgets, dense forms left out")
    parser.add_argument("--uneven", action="store_true", help="kv heads with equal and unequal numbers of pages alone")
    parser.add_argument("--sizes", action="store_true", help="pages of several sizes alone")
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name contains one of these")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.set_num_threads(args.threads)
    print(f"{check(device)} random caches within tolerance")
    rate = copy_rate(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}; a copy moves {rate / 1e9:.0f} GB/s")
    cases = COMBINATIONS if args.combinations else GPU_CASES if device.type == "cuda" else CPU_CASES
    if args.sizes:
        cases = [case for case in SIZES if (case.batch > 1) == (device.type == "cuda")]
    if args.uneven:
        cases = [case for case in cases if case.uneven or case.name in EVEN_AND_UNEVEN]
    cases = [case for case in cases if not args.only or any(part in case.name for part in args.only)]
    rows = []
    for case in cases[:1] if args.quick else cases:
        alone = args.combinations or args.uneven or args.sizes
        rows.append(row := run_case(case, device, rate, alone))
        show(row, alone)
    if args.json:
        result = {"device": name, "torch": torch.__version__, "copy_bytes_per_second": rate, "rows": rows}
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
