# SPDX-License-Identifier: Apache-2.0
"""Check random problems on a GPU against fp64, forward and gradients, over everything that a backend serves.

    python benchmarks/kernels/gpu_sweep.py --cases 5000 --jobs 16 --seconds 200 --json sweep.json

What a kernel is compiled for (dtype, head_dims, blocks, softcap, alignment, strides by 16) is a key;
every key meets many problems of `dynaxx.testing`: groups, lengths, ragged packed batches, sinks, masks and patterns,
layouts per head, merged results, in two ways to lie in memory. Several processes share the GPU, each with keys of its
own. Prints what failed with how to see it again (`--key N --seed S --cases 1`), the element, the memory of each tensor
and the number of passes; how near to its budget each tensor came; and counts; exits 1 on any failure.
"""

import argparse
import collections
import hashlib
import json
import multiprocessing
import random
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import dynaxx
from dynaxx.kernels.registry import ATTENTION
from dynaxx.lab.machine import need_gpu
from dynaxx.testing.drawing import MEMORY
from dynaxx.testing.expected import Expected
from dynaxx.testing.problems import random_problem

BLOCKS = (16, 32, 64, 128)
HEAD_DIMS = (32, 40, 64, 80, 96, 128, 192, 256)
GROUPS = (1, 2, 3, 4, 5, 7, 8, 16, 32)
UNALIGNED = ("part of head_dim", "odd rows", "odd address")  # Triton compiles for the alignment of its arguments
ALIGNED = tuple(name for name in MEMORY if name not in UNALIGNED)
WAYS = 2  # in which the tensors of a key of `triton` lie in memory: it compiles for each; `hopper` does not
SHARE = 0.3  # of the cases on Hopper's own kernels, of which there are fewer


@dataclass(frozen=True)
class Key:
    """The compile-time choices of a backend's kernels."""

    backend: str
    dtype: str
    head_dims: tuple[int, int]
    block_size: tuple[int, int]
    capped: bool = False
    aligned: bool = True  # of `triton` alone

    def memories(self, seed):
        """Draw the memory of q, k, v, sinks and the gradient of out."""
        if self.backend == "hopper":
            return random.Random(seed).choices(tuple(MEMORY), k=5)
        rng = random.Random(f"{self} {random.Random(seed).randrange(WAYS)}")
        allowed = ALIGNED if self.aligned else (rng.choice(UNALIGNED),)
        return [rng.choice(allowed) for _ in range(5)]

    def fixed(self, rng):
        group = rng.choice(GROUPS)
        kv_heads = 2 if not self.aligned else rng.choice((1, 2)) if group < 16 else 1
        return {
            "dtype": getattr(torch, self.dtype),
            "head_dims": self.head_dims,
            "block_size": self.block_size,
            "heads": (group * kv_heads, kv_heads),
            "from_data": 0.0,  # selection has kernels and tests of its own
            "softcaps": (0.5, 3.0, 30.0) if self.capped else (None,),
            "memories": ("contiguous",),  # moved to others on the device
        }


def all_keys():
    """List the keys of both backends; the first few of each hold one of every kind, because time may end a sweep."""
    hopper = [
        Key("hopper", "bfloat16", (128, 128), (128, 128)),
        Key("hopper", "float16", (64, 64), (64, 64)),
        Key("hopper", "bfloat16", (256, 256), (128, 128)),
        Key("hopper", "bfloat16", (64, 64), (128, 64)),
        Key("hopper", "float16", (256, 256), (64, 64)),
        Key("hopper", "float16", (128, 128), (64, 128)),
        Key("hopper", "bfloat16", (256, 256), (128, 128), capped=True),
        Key("hopper", "float16", (128, 128), (128, 128), capped=True),
        Key("hopper", "bfloat16", (64, 64), (64, 128), capped=True),
    ]
    sizes = [(dim, m, n) for dim in (64, 128, 256) for m in (64, 128) for n in (64, 128)]
    every = [Key("hopper", "bfloat16", (dim, dim), (m, n)) for dim, m, n in sizes]
    hopper += [key for key in [*every, Key("hopper", "float16", (128, 128), (128, 128))] if key not in hopper]
    more = (("float16", 64, 128, 128), ("bfloat16", 128, 64, 64), ("float16", 256, 64, 64), ("bfloat16", 128, 128, 64))
    hopper += [Key("hopper", dtype, (dim, dim), (m, n), capped=True) for dtype, dim, m, n in more]
    rng = random.Random(0)
    triton = []
    for i, (m, n) in enumerate((m, n) for _ in range(8) for m in BLOCKS for n in BLOCKS):
        aligned = i % 4 != 2
        head_dim = HEAD_DIMS[(i + i // 16) % 8] if aligned else (64, 32)[i // 4 % 2]  # the others compile for minutes
        head_dim_v = head_dim if rng.random() < 0.6 or not aligned else rng.choice(HEAD_DIMS)
        dtype = ("bfloat16", "float16", "float32")[(i + i // 48) % 3]
        triton.append(Key("triton", dtype, (head_dim, head_dim_v), (m, n), capped=i % 3 == 1, aligned=aligned))
    even = lambda key: not any(dim % 16 for dim in key.head_dims)
    return hopper, sorted(triton, key=lambda key: not even(key))  # of the others Triton compiles for many strides


class Moved(torch.autograd.Function):
    """A tensor on another device and in other memory, `to`; its gradient comes back in the memory `back`."""

    @staticmethod
    def forward(ctx, x, device, to, back):
        ctx.device, ctx.back = x.device, back
        return MEMORY[to](x.to(device))

    @staticmethod
    def backward(ctx, grad):
        return MEMORY[ctx.back](grad.to(ctx.device)), None, None, None


def choose_passes(one):
    """Choose Hopper's gradients in one pass or in two; problems as small as these would all take two."""
    from dynaxx.kernels.attention.hopper import backward

    backward.backward_in_one_pass = lambda kv_block, head_dim, *_: one and kv_block == 128 and head_dim <= 128


def run_case(key, seed, device):
    """Draw and expect on the CPU, where small problems are fast; run on the device, which is shared.

    Returns:
        The status, what is wrong or refused, what the problem is made of, and the reports.
    """
    problem = random_problem(seed, "cpu", **key.fixed(random.Random(seed)))
    asks = replace(problem.asks, device=torch.device(device))
    if why := ATTENTION.reasons(key.backend, asks):
        return "refused", "; ".join(why), problem.traits, []
    expected = Expected(problem, seed)
    memories = key.memories(seed)
    if key.backend == "hopper":
        choose_passes(seed % 2 == 0)

    def attend(*inputs):
        for size in (1 << 14, 1 << 18):  # NaN in the memory that the allocator hands out next
            torch.full((size,), torch.nan, device=device)
        kinds = [memory if x.ndim == 4 else "contiguous" for x, memory in zip(inputs, memories, strict=False)]
        there = [Moved.apply(x, device, kind, "contiguous") for x, kind in zip(inputs, kinds, strict=True)]
        out, lse = problem.attend(*there, backend=key.backend)
        return Moved.apply(out, "cpu", "contiguous", memories[4]), None if lse is None else lse.cpu()

    reports = expected.reports(attend)
    bad = [str(report) for report in reports if not report.ok]
    for name in memories:
        problem.traits.setdefault("memory", []).append(name)
    if bad:
        passes = {"hopper": f"; gradients in one pass: {seed % 2 == 0}"}.get(key.backend, "")
        bad += [problem.label, f"q, k, v, sinks and the gradient of out in memory: {', '.join(memories)}{passes}"]
    return ("failed" if bad else "passed"), "; ".join(bad), problem.traits, reports


def run_key(task):
    """Run the cases of one key until the time is over.

    Returns:
        Counts by status, what was covered, lines to print, each tensor's error closest to its budget, and seconds.
    """
    number, key, cases, first_seed, device, deadline = task
    torch.set_num_threads(1)
    counts, traits, lines, nearest, first = collections.Counter(), {}, [], {}, 0.0
    began = time.time()
    for seed in range(first_seed, first_seed + cases):
        if time.time() > deadline:
            counts["not run (time)"] += first_seed + cases - seed
            break
        try:
            status, line, found, reports = run_case(key, seed, device)
        except Exception as error:  # a sweep reports every failure and goes on
            status, line, found, reports = "raised", f"{type(error).__name__}: {str(error)[:300]}", {}, []
        counts[status] += 1
        for report in reports:
            near = (round(report.error / report.budget, 3) if report.budget else 0.0, f"--key {number} --seed {seed}")
            nearest[report.name] = max(near, nearest.get(report.name, near))
        first = first or time.time() - began
        for kind, names in found.items() if status == "passed" else ():
            traits.setdefault(kind, collections.Counter()).update(names)
        if line:
            lines.append(
                (status, line if status == "refused" else f"--key {number} --seed {seed} --cases 1: {key} {line}")
            )
    return key, counts, traits, lines, nearest, (first, time.time() - began)


def state_of_sources():
    """Hash the source files that a result depends on: sweeps with the same hash may be counted together."""
    digest = hashlib.sha256()
    for room in ("kernels", "layout", "ops"):
        for path in sorted((Path(dynaxx.__file__).parent / room).rglob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def tasks_of(args, deadline):
    """Deal cases to keys of both backends in turn, each with its own seeds."""
    hopper, triton = all_keys()
    numbered = list(enumerate(hopper + triton))
    hopper, triton = numbered[: len(hopper)], numbered[len(hopper) :][: args.keys]
    if args.key is not None:
        plans = [([numbered[args.key]], args.cases)]
    elif args.backend == "both":
        plans = [(hopper, round(args.cases * SHARE)), (triton, args.cases - round(args.cases * SHARE))]
    else:
        plans = [({"hopper": hopper, "triton": triton}[args.backend], args.cases)]
    tasks, seed = [], args.seed
    for keys, cases in plans:
        for i, (number, key) in enumerate(keys):
            count = cases // len(keys) + (i < cases % len(keys))
            tasks.append((i / len(keys), (number, key, count, seed, args.device, deadline)))
            seed += count
    return [task for _, task in sorted(tasks, key=lambda each: each[0])]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--keys", type=int, default=21, help="how many of Triton's keys: each compiles for seconds")
    parser.add_argument("--backend", choices=("both", "triton", "hopper"), default="both")
    parser.add_argument("--key", type=int, help="only this key, to see a failure again")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no case after so many seconds")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    need_gpu(args.device)
    began = time.time()
    counts, refused, traits, nearest = collections.Counter(), collections.Counter(), {}, {}
    failures, known, firsts, rest, cores = [], 0, 0.0, 0.0, 0
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for key, found, kinds, lines, near, (first, seconds) in pool.imap_unordered(
            run_key, tasks_of(args, began + args.seconds), chunksize=1
        ):
            counts.update({(key.backend, status): n for status, n in found.items()})
            for kind, names in kinds.items():
                traits.setdefault(kind, collections.Counter()).update(names)
            refused.update(line for status, line in lines if status == "refused")
            failures += [line for status, line in lines if status != "refused"]
            nearest.update({name: max(each, nearest.get(name, each)) for name, each in near.items()})
            firsts, rest, cores = firsts + first, rest + seconds - first, cores + (first > 0)
            print(f"{time.time() - began:5.0f} s: {dict(found)} {key}", *failures[known:], sep="\n  ", flush=True)
            known = len(failures)
    seconds = time.time() - began
    summary = {
        "seconds": round(seconds, 1),
        "counts": {f"{backend} {status}": n for (backend, status), n in sorted(counts.items())},
        "refused": dict(refused),
        "covered": {kind: dict(sorted(names.items())) for kind, names in sorted(traits.items())},
        "error of budget, largest": dict(sorted(nearest.items())),
        "failures": failures,
        "keys": cores,
        "seconds of a key's first case, which compiles": round(firsts / max(1, cores), 2),
        "seconds of another": round(rest / max(1, sum(counts.values()) - cores), 3),
        "first_seed": args.seed,
        "state": state_of_sources(),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
    }
    if args.json:
        args.json.write_text(json.dumps(summary, indent=1))
    print(json.dumps({k: v for k, v in summary.items() if k != "failures"}))
    print(*failures, sep="\n", end="\n" * bool(failures))
    ran = sum(n for (_, status), n in counts.items() if status in ("passed", "failed", "raised"))
    print(
        f"{ran} cases, forward and gradients, in {seconds:.0f} s ({ran / seconds:.1f} per second): {summary['counts']}"
    )
    sys.exit(bool(failures) or ran == 0)


if __name__ == "__main__":
    main()
