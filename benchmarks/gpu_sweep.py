"""Random problems on a GPU, forward and gradients, against fp64.

    python benchmarks/gpu_sweep.py --cases 1000 --jobs 14

Every case is another compile, so several processes share the GPU. Prints each failure and a count; exits 1 on any.
"""

import argparse
import collections
import multiprocessing
import sys
import time

import torch

import dynaxx as dx
from dynaxx.testing import check_forward, check_gradients, random_case

HOPPER = {"head_dims": (64, 128), "block_sizes": (64, 128), "lengths": (1, 63, 64, 65, 127, 128, 129, 257, 400, 513)}


def poison(device):
    """Leave NaN in the memory that the allocator hands out next."""
    for size in (1 << 16, 1 << 20, 1 << 22):
        torch.full((size,), torch.nan, device=device)


def run_case(seed, backend, device, head_dims):
    dtype = (torch.bfloat16, torch.float16, torch.float32)[seed % 3]
    if backend == "hopper" and dtype == torch.float32:
        dtype = torch.bfloat16
    limits = {**(HOPPER if backend == "hopper" else {}), **({"head_dims": head_dims} if head_dims else {})}
    case = random_case(seed, dtype=dtype, device=device, **limits)
    softcap = 3.0 if backend == "triton" and seed % 5 == 0 else None
    attend = lambda q, k, v, layout: dx.sparse_attention(
        q, k, v, layout, softcap=softcap, return_lse=True, backend=backend
    )
    why = dx.explain(case.q, case.k, case.v, case.layout, softcap=softcap).reasons[backend]
    if why:
        return "refused", [f"seed {seed} {backend}: {'; '.join(why)}"]
    poison(device)
    reports = check_forward(attend, case.q, case.k, case.v, case.layout, softcap=softcap)
    reports += check_gradients(attend, case.q, case.k, case.v, case.layout, softcap=softcap)
    bad = [f"{backend} {dtype} {report} :: {case.label}" for report in reports if not report.ok]
    return ("failed" if bad else "passed"), bad


def run_share(arguments):
    seeds, backend, device, head_dims, deadline = arguments
    torch.set_num_threads(1)
    done = []
    for seed in seeds:
        if time.time() > deadline:
            done.append(("not run (time)", []))
            continue
        try:
            done.append(run_case(seed, backend, device, head_dims))
        except Exception as error:  # a sweep reports every failure and goes on
            done.append(("raised", [f"{backend} seed {seed}: {type(error).__name__}: {error}"]))
    return done


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--head-dims", type=int, nargs="*", default=(), help="only these: fewer kernels, more cases")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no case after this many seconds")
    args = parser.parse_args()
    seeds = range(args.seed, args.seed + args.cases)
    deadline = time.time() + args.seconds
    shares = [
        (seeds[i :: args.jobs], args.backend, args.device, tuple(args.head_dims), deadline) for i in range(args.jobs)
    ]
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        results = [result for share in pool.map(run_share, shares) for result in share]
    counts = collections.Counter(status for status, _ in results)
    for status, lines in results:
        if status in ("failed", "raised"):
            print("\n".join(line[:600] for line in lines))
    print(f"{args.backend}: {len(results)} cases, forward and gradients: {dict(counts)}")
    sys.exit(counts["failed"] + counts["raised"] > 0 or counts["passed"] == 0)


if __name__ == "__main__":
    main()
