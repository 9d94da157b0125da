# SPDX-License-Identifier: Apache-2.0
"""Check random problems of Native Sparse Attention on a GPU against fp64: out and every gradient.

    python benchmarks/kernels/nsa_sweep.py --cases 1200 --jobs 16 --seconds 130

Two kinds take turns: selected attention of any indices, and the whole of it (compression with weights, three branches,
gates) where every block is selected, so that rounding cannot choose others. What kernels are compiled for (backend,
dtype, head_dims, block, slots, group, compression windows) is a key, one of 32; every key meets many lengths, ragged
batches, empty rows, overlaps, numbers of kv heads, windows and values. Problems are drawn and expected on the
CPU. Prints failures with how to see them again, and counts; exits 1 on any.
"""

import argparse
import collections
import multiprocessing
import random
import sys
import time
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from dynaxx.lab.machine import need_gpu
from dynaxx.testing import make_qkv
from dynaxx.testing.oracle import check_forward, check_gradients, error_reports, oracle_attention
from dynaxx.trained.nsa.attention import compress, native_sparse_attention
from dynaxx.trained.nsa.spans import NsaSizes, nsa_spans
from dynaxx.trained.selected import selected_attention
from dynaxx.trained.testing.nsa import random_selected_case

LENGTHS = (0, 1, 63, 65, 130, 190)
WINDOWS = ((16, 8), (8, 8), (16, 16), (32, 16))


@dataclass(frozen=True)
class Key:
    """The compile-time choices of the kernels."""

    backend: str
    dtype: str
    head_dims: tuple[int, int]
    block: int
    slots: int
    group: int
    compressed: tuple[int, int]  # keys of a compression window, and between the starts of two


def all_keys():
    """List Hopper's groups, and Triton's over every group, block, head_dim and dtype in turn."""
    hopper = [
        Key("hopper", ("bfloat16", "float16")[i % 2], (dim, dim), block, (6, 16)[i % 2], group, WINDOWS[i % 4])
        for i, (group, dim, block) in enumerate(
            [(16, 128, 64), (8, 64, 64), (16, 64, 128), (32, 128, 64), (8, 128, 128), (64, 128, 64),
             (4, 128, 64), (1, 64, 64)]
        )
    ]  # fmt: skip
    some = [
        (1, 64, 64), (2, 128, 64), (3, 64, 32), (4, 128, 64), (5, 40, 16), (7, 64, 128), (8, 128, 64), (16, 128, 64),
        (16, 64, 32), (17, 64, 64), (32, 128, 64), (4, 64, 16), (2, 192, 64), (16, 192, 64), (1, 128, 128),
        (6, 128, 64), (4, 64, 64), (16, 64, 64), (1, 80, 32), (12, 64, 64), (2, 64, 64), (32, 64, 32), (8, 96, 64),
        (3, 128, 64),
    ]  # fmt: skip
    triton = [
        Key(
            "triton",
            ("bfloat16", "float32", "float16")[i % 3],
            (dim, dim if i % 4 else 64),
            block,
            (3, 6)[i % 2],
            group,
            WINDOWS[i % 4 if block > 16 else i % 3],
        )
        for i, (group, dim, block) in enumerate(some)
    ]
    return [key for pair in zip(hopper * 3, triton, strict=True) for key in pair]


def selected_reports(key, seed, device):
    """Check selected attention over random indices."""
    case = random_selected_case(
        seed, dtype=getattr(torch, key.dtype), head_dims=key.head_dims[:1], lengths=LENGTHS, groups=(key.group,),
        blocks=(key.block,), slots=(key.slots,),
    )  # fmt: skip
    indices = case.block_indices.to(device)

    def attend(q, k, v, _):
        result = selected_attention(
            q[0].to(device), k[0].to(device), v[0].to(device), indices, block_size=key.block,
            cu_seqlens_q=case.spans.ends_q, cu_seqlens_k=case.spans.ends_k, return_lse=True, backend=key.backend,
        )  # fmt: skip
        return result.out[None].cpu(), result.lse[None].cpu()

    parts = (attend, case.q, case.k, case.v, case)
    reports = check_forward(*parts)
    return (reports + check_gradients(*parts) if min(case.q.shape[1], case.k.shape[1]) else reports), case.label


def whole_reports(key, seed, device):
    """Report the errors of all branches: out, and gradients of q, k, v, both compressions' weights and the gates."""
    rng = random.Random(seed)
    count = max(3, -(-190 // key.block))
    sizes = NsaSizes(*key.compressed, key.block, count, 1, 1, window=rng.choice((1, 33, 100)))
    lengths = [rng.choice(LENGTHS) for _ in range(rng.choice((1, 3)))]
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    dtype, kv_heads = getattr(torch, key.dtype), rng.choice((1, 2))
    q, k, v = make_qkv(1, ends[-1], ends[-1], key.group * kv_heads, kv_heads, *key.head_dims, dtype=dtype, seed=seed)
    torch.manual_seed(seed)
    weights = [(torch.rand(sizes.cmp_block, kv_heads) / sizes.cmp_block * 2).to(dtype) for _ in range(2)]
    inputs = [q[0], k[0], v[0], *weights, torch.rand(ends[-1], q.shape[2], 3).to(dtype)]
    do = torch.randn(ends[-1], q.shape[2], v.shape[3]).to(dtype)
    masks = branch_masks(nsa_spans(sizes, ends))

    def exact(q, k, v, k_weight, v_weight, gates):
        pooled = [compress(x, sizes, w, cu_seqlens=ends) for x, w in ((k, k_weight), (v, v_weight))]
        pairs = (pooled, (k, v), (k, v))
        outs = [oracle_attention(q[None], *(x[None] for x in pair), mask)[0][0]
                for pair, mask in zip(pairs, masks, strict=True)]  # fmt: skip
        return sum(gate[..., None] * out for gate, out in zip(gates.unbind(-1), outs, strict=True))

    def ours(*inputs):
        q, k, v, k_weight, v_weight, gates = (x.to(device) for x in inputs)
        pooled = tuple(compress(x, sizes, w, cu_seqlens=ends) for x, w in ((k, k_weight), (v, v_weight)))
        return native_sparse_attention(
            q, k, v, pooled, gates, sizes, cu_seqlens_q=ends, backend="auto" if key.backend == "hopper" else key.backend
        ).cpu()

    def run(attend, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = attend(*leaves)
        return out, *torch.autograd.grad(out, leaves, do.to(dtype), allow_unused=True, materialize_grads=True)

    rounding_q, rounding_k = (3 * x for x in cancellation(q, k, v, do[None]))
    names = ("out", "dq", "dk", "dv", "dweight_k", "dweight_v", "dgates")
    reports = error_reports(names, run(ours, dtype), run(exact, dtype), run(exact, torch.float64))
    allowed = {"dq": rounding_q, "dk": rounding_k, "dweight_k": rounding_k}
    reports = [replace(report, budget=report.budget + 2 * allowed.get(report.name, 0.0)) for report in reports]
    return reports, f"lengths {lengths}, {sizes}, kv heads {kv_heads}"


def cancellation(q, k, v, do):
    """Return the rounding that dq and dk inherit from ds = weights * (do @ v.T - delta), which is a difference."""
    if not q.numel():  # sequences of no tokens alone
        return 0.0, 0.0
    single = torch.finfo(torch.promote_types(q.dtype, torch.float32)).eps
    cancelled = single * float(do.double().norm(dim=-1).amax() * v.double().norm(dim=-1).amax()) * q.shape[-1] ** -0.5
    return cancelled * float(k.abs().amax()), cancelled * float(q.abs().amax())


def branch_masks(spans):
    """Return the (T, keys) bool mask of each branch if every block is selected."""
    query = torch.arange(spans.ends_q[-1])
    key, token = query.clone(), torch.arange(spans.ends_cmp[-1])
    sequence = torch.zeros(spans.ends_q[-1], dtype=torch.long)
    for i, (begin, end) in enumerate(pairwise(spans.ends_q)):
        sequence[begin:end] = i
    causal = (sequence[:, None] == sequence) & (key <= query[:, None])
    local = token - spans.first_cmp[:, None]
    compressed = (local >= 0) & (local < spans.num_cmp[:, None])
    return compressed, causal, causal & (query[:, None] - key < spans.sizes.window)


def run_share(arguments):
    """Run one process's keys in turn."""
    keys, cases, first_seed, device, deadline = arguments
    torch.set_num_threads(1)
    counts, lines = collections.Counter(), []
    for i in range(cases):
        number, key = keys[i * len(keys) // cases]
        if time.time() > deadline:
            counts["not run (time)"] += cases - i
            break
        seed, run = first_seed + i, (selected_reports, whole_reports)[i % 2]
        try:
            reports, label = run(key, seed, device)
            bad = [str(report) for report in reports if not report.ok]
        except Exception as error:  # a sweep reports every failure and goes on
            bad, label = [f"{type(error).__name__}: {str(error)[-300:]}"], ""
        counts[f"{key.backend} {run.__name__.split('_')[0]} {'failed' if bad else 'passed'}"] += 1
        if bad:
            lines.append(f"--key {number} --seed {seed - i % 2} --cases {1 + i % 2}: {key} {'; '.join(bad)} {label}")
    return counts, lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--keys", type=int, default=48, help="how many of the keys: each compiles for seconds")
    parser.add_argument("--key", type=int, help="only this key, to see a failure again")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no case after so many seconds")
    args = parser.parse_args()
    need_gpu(args.device)
    began, numbered = time.time(), list(enumerate(all_keys()))
    numbered = numbered[: args.keys] if args.key is None else [numbered[args.key]]
    jobs = min(args.jobs, args.cases)
    each = -(-args.cases // jobs)
    shares = [
        (numbered[j::jobs] or numbered, min(each, args.cases - j * each), args.seed + j * each, args.device,
         began + args.seconds)
        for j in range(jobs) if args.cases > j * each
    ]  # fmt: skip
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        counts, failed = collections.Counter(), 0
        for found, lines in pool.imap_unordered(run_share, shares):
            counts, failed = counts + found, failed + len(lines)
            print("\n".join([*lines, f"so far: {dict(sorted(counts.items()))}"]), flush=True)
    print(f"{time.time() - began:.0f} s, seeds from {args.seed}:", dict(sorted(counts.items())))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
