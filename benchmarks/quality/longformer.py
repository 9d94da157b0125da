# SPDX-License-Identifier: Apache-2.0
"""Time Longformer and BigBird: transformers' own attention beside dynaxx's, one pass beside two; and peak memory.

    python benchmarks/quality/longformer.py                                   # models of 2 layers, 1 and 2 threads
    python benchmarks/quality/longformer.py --models longformer --lengths 4096 --layers 12 --repeats 3
    python benchmarks/quality/longformer.py --pattern --lengths 4096 16384    # the pattern alone, on random q, k, v
    python benchmarks/quality/longformer.py --pattern --device cuda --dtype bfloat16 --tolerance 0.02 --lengths 4096

Models have random weights in the shapes of longformer-base and bigbird-base, in eval mode. Correctness comes first: the
variants must agree within `--tolerance` of the largest output, or there are no figures. Times are medians over turns in
one process, each variant once per turn. Peak memory is what a forward pass adds to the process at its highest (Linux),
or on a GPU to torch's allocations.
"""

import argparse
import gc
import json
import logging
import statistics
import time
from pathlib import Path

import torch

import dynaxx as dx
from dynaxx.integrations.encoders import apply_to_encoder
from dynaxx.integrations.encoders.longformer import SLOTS
from dynaxx.layout.hide_keys import hide_keys

BASE = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "vocab_size": 1000}


def longformer(layers, length):
    from transformers import LongformerConfig, LongformerModel

    config = LongformerConfig(
        **BASE, num_hidden_layers=layers, attention_window=512, max_position_embeddings=length + 2, pad_token_id=1
    )
    return LongformerModel(config, add_pooling_layer=False)


def bigbird(layers, length, kind="block_sparse"):
    from transformers import BigBirdConfig, BigBirdModel

    config = BigBirdConfig(
        **BASE, num_hidden_layers=layers, block_size=64, num_random_blocks=3, max_position_embeddings=length,
        attention_type=kind,
    )  # fmt: skip
    return BigBirdModel(config, add_pooling_layer=False)


def bigbird_full(layers, length):
    return bigbird(layers, length, "original_full")


def inputs_of(name, length, global_tokens):
    ids = torch.randint(5, 1000, (1, length), generator=torch.Generator().manual_seed(1))
    if name != "longformer":
        return {"input_ids": ids}
    is_global = torch.zeros_like(ids)
    is_global[:, torch.linspace(0, length - 1, global_tokens).long()] = 1
    return {"input_ids": ids, "global_attention_mask": is_global}


def peak_mib(call):
    """Return the MiB that a call adds to the peak memory of the process; None if the kernel cannot tell."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return round((torch.cuda.max_memory_allocated() - before) / 2**20)
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = status_kib("VmRSS")
        call()
        return round((status_kib("VmHWM") - before) / 1024)
    except OSError:
        return None


def status_kib(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def in_turns(calls, repeats):
    """Return the median ms of each call by name; the first turn warms up.

    On one thread it is the thread's CPU time, which neighbours on the machine disturb least, else the wall's; on a GPU
    it is the GPU's.
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        from triton.testing import do_bench

        return {name: round(do_bench(call, return_mode="median"), 3) for name, call in calls.items()}
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            start = clock()
            call()
            if turn:
                times[name].append(1e3 * (clock() - start))
    return {name: round(statistics.median(own), 1) for name, own in times.items()}


def check(expected, found, tolerance, what):
    worst = float((found - expected).abs().max() / expected.abs().max())
    if not worst <= tolerance:
        raise SystemExit(f"{what}: differs from the baseline by {worst:.2e} of its largest value: no figures")
    return worst


def measure_model(name, length, threads, options):
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    model = {"longformer": longformer, "bigbird": bigbird, "bigbird-full": bigbird_full}[name](options.layers, length)
    model.eval()
    inputs = inputs_of(name, length, options.global_tokens)

    def run():
        return model(**inputs).last_hidden_state

    def run_on_dynaxx():
        with apply_to_encoder(model) as handle:
            out = run()
        assert handle.stats() == {"sparse_calls": options.layers, "dense_calls": {}}, handle.stats()
        return out

    calls = {"transformers": run, "dynaxx": run_on_dynaxx}
    worst = check(run(), run_on_dynaxx(), options.tolerance, name)
    return {
        "problem": name,
        "tokens": length,
        "threads": threads,
        "ms": in_turns(calls, options.repeats),
        "peak_mib": {kind: peak_mib(call) for kind, call in calls.items()},
        "difference": worst,
    }


def measure_pattern(kind, length, threads, options):
    """Time a window of 512 with symmetric global tokens: in one layout, gathered in front, and in separate passes."""
    torch.set_num_threads(threads)
    draw = lambda seed: torch.randn(1, length, 12, 64, generator=torch.Generator().manual_seed(seed))
    q, k, v = (draw(i).to(options.device, getattr(torch, options.dtype)) for i in range(3))
    where = {
        "1 first": [0],
        "64 first": list(range(64)),
        "64 anywhere": torch.linspace(0, length - 1, 64).long().tolist(),
    }[kind]
    at = torch.tensor(where)
    slots = -(-len(at) // SLOTS) * SLOTS
    local = torch.ones(1, length, dtype=torch.bool)
    local[0, at] = False
    used = torch.arange(slots)[None] < len(at)
    window, every = dx.SlidingWindow((256, 256)), dx.Full()
    symmetric = window | dx.GlobalTokens(tuple(where), symmetric=True)
    layout = {
        "one layout": symmetric.layout(length, causal=False, block_size=64),
        "in front": (window | dx.GlobalTokens(slots)).layout(length, slots + length, causal=False, block_size=64),
        "window": window.layout(length, causal=False, block_size=64),
        "columns": every.layout(length, slots, causal=False, block_size=64),
        "rows": every.layout(len(at), length, causal=False, block_size=(16, 64)),
    }
    layout["in front"] = hide_keys(layout["in front"], torch.cat([used, local], 1))
    layout["window"] = hide_keys(layout["window"], local)
    layout["columns"] = hide_keys(layout["columns"], used)
    layout = {name: each.to(q.device) for name, each in layout.items()}
    at = at.to(q.device)

    def gathered(x):
        return torch.nn.functional.pad(x[:, at], (0, 0, 0, 0, 0, slots - len(at)))

    def with_rows(out):
        out[:, at] = dx.sparse_attention(q[:, at], k, v, layout["rows"])
        return out

    def in_front():
        front = (torch.cat([gathered(x), x], 1) for x in (k, v))
        return with_rows(dx.sparse_attention(q, *front, layout["in front"]))

    def merged():
        near = dx.sparse_attention(q, k, v, layout["window"], return_lse=True)
        far = dx.sparse_attention(q, gathered(k), gathered(v), layout["columns"], return_lse=True)
        return with_rows(dx.merge_states([near, far]).out)

    calls = {
        "one layout": lambda: dx.sparse_attention(q, k, v, layout["one layout"]),
        "in front": in_front,
        "merged": merged,
    }
    expected = calls["one layout"]()
    worst = max(check(expected, calls[name](), options.tolerance, f"{kind} {name}") for name in ("in front", "merged"))
    return {
        "problem": f"window 512, global {kind}",
        "tokens": length,
        "threads": threads,
        "ms": in_turns(calls, options.repeats),
        "peak_mib": {name: peak_mib(call) for name, call in calls.items()},
        "difference": worst,
    }


def show(row):
    baseline = next(iter(row["ms"].values()))
    cells = [
        f"{kind} {ms:9.1f} ms ({baseline / ms:4.2f}x) {row['peak_mib'][kind]} MiB" for kind, ms in row["ms"].items()
    ]
    return (
        f"{row['problem']:34} {row['tokens']:6} tokens {row['threads']} threads  "
        + "  |  ".join(cells)
        + f"  difference {row['difference']:.1e}"
    )


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", nargs="+", default=["longformer", "bigbird"], choices=["longformer", "bigbird", "bigbird-full"]
    )
    parser.add_argument("--pattern", action="store_true", help="measure the pattern alone, without a model")
    parser.add_argument("--device", default="cpu", help="of --pattern")
    parser.add_argument("--dtype", default="float32", help="of --pattern")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--global-tokens", type=int, default=1, help="of Longformer, spread over the sequence")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    problems = ["1 first", "64 first", "64 anywhere"] if options.pattern else options.models
    measure = measure_pattern if options.pattern else measure_model
    rows = []
    for problem in problems:
        for length in options.lengths:
            for threads in options.threads:
                rows.append(measure(problem, length, threads, options))
                if not options.json:
                    print(show(rows[-1]), flush=True)
    if options.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
