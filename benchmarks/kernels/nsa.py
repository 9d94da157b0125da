# SPDX-License-Identifier: Apache-2.0
"""Check Native Sparse Attention on a GPU, then time it and measure its memory beside dense attention.

    python benchmarks/kernels/nsa.py                 # all of it, about 3 minutes
    python benchmarks/kernels/nsa.py --only selected --heads 32/8 --json out.json

Selected rows: 16 blocks of 64 tokens per query, bf16, head_dim 128, batch 1; an overlap of 75 % keeps that share of the
blocks from one query to the next. Whole rows: the paper's sizes (blocks of 32 every 16 tokens compressed, 16 of 64
selected, window 512), compression and gates included; drifting queries choose alike, each row says how much ("overlap":
0.95, 0.75 and 0.28 at 32k). The backend and schedule are those that dispatch chooses, unless --schedules: then Triton's
two. Medians of `do_bench`, one process.
"""

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

from dynaxx.lab.machine import need_gpu
from dynaxx.trained.nsa.attention import compress, native_sparse_attention, select_nsa
from dynaxx.trained.nsa.branches import compressed_attention, gated_sum, window_attention
from dynaxx.trained.nsa.kernels.gpu import config as nsa_config
from dynaxx.trained.nsa.spans import NsaSizes
from dynaxx.trained.packing import pack
from dynaxx.trained.selected import attend_selected, selected_attention
from dynaxx.trained.testing.nsa import random_selected_case

DIM, SIZES = 128, NsaSizes()
MAIN = ("64/4", "32/8")
DRIFTS = (0.999, 0.92, 0.0)
HEADS = {heads: tuple(map(int, heads.split("/"))) for heads in (*MAIN, "32/4", "32/16", "32/32")}


def time_of(run):
    return round(do_bench(run, warmup=10, rep=60, return_mode="median"), 3)


def block_indices(seqlen, heads, keep, slots=16, block=64):
    """Draw (T, heads, slots) int32: slot s takes blocks s, s + slots, ...; a share `keep` of slots stays as it was."""
    torch.manual_seed(0)
    shape = (seqlen, heads, slots)
    drawn, changes = torch.rand(shape, device="cuda"), torch.rand(shape, device="cuda") >= keep
    changes[0] = True
    at = torch.where(changes, torch.arange(seqlen, device="cuda")[:, None, None], 0).cummax(0).values
    own = torch.arange(seqlen, device="cuda")[:, None, None] // block
    slot = torch.arange(slots, device="cuda")
    count = torch.div(own - slot, slots, rounding_mode="floor") + 1
    chosen = slot + slots * (drawn.gather(0, at) * count).long()
    return torch.where(count > 0, chosen, -1).to(torch.int32)


def check(cases):
    """Check random problems against fp64, as dispatch chooses and by either schedule. Times follow only if all pass."""
    chosen = nsa_config.choose_schedule
    for schedule in (None, "union", "gather"):
        nsa_config.choose_schedule = (lambda group_size: schedule) if schedule else chosen  # noqa: B023
        for seed in range(cases):
            case = random_selected_case(seed, dtype=torch.bfloat16, device="cuda", head_dims=(128,), slots=(6,),
                                        groups=(4, 16), blocks=(64,), lengths=(1, 130, 517))  # fmt: skip
            for report in case.check("triton" if schedule else "auto"):
                if not report.ok:
                    sys.exit(f"{schedule or 'auto'} is wrong, so nothing is timed: {report}; {case.label}")
    nsa_config.choose_schedule = chosen


def time_selected(name, seqlen, keep, schedule):
    q_heads, kv_heads = HEADS[name]
    indices = block_indices(seqlen, kv_heads, keep)
    draw = lambda heads: torch.randn(1, seqlen, heads, DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    q, k, v = draw(q_heads), draw(kv_heads), draw(kv_heads)
    own = torch.arange(seqlen, device="cuda")[:, None, None]
    keys = torch.where(indices == own // 64, own % 64 + 1, 64) * (indices >= 0)
    flops = 4 * DIM * q_heads // kv_heads * int(keys.sum())
    chosen = nsa_config.choose_schedule
    if schedule:
        nsa_config.choose_schedule = lambda group_size: schedule
    run = lambda *leaves: selected_attention(*leaves, indices[None], backend="triton" if schedule else "auto")
    with torch.no_grad():
        forward = time_of(lambda: run(q, k, v))
    backward = backward_time(run, (q, k, v))
    nsa_config.choose_schedule = chosen
    return {"work": f"selected {name} {seqlen // 1024}k", "inputs": f"overlap {keep:.0%}", 
            "schedule": schedule or "auto", "forward_ms": forward, "forward_tflops": round(flops / forward / 1e9),
            "backward_ms": backward, "backward_tflops": round(2.5 * flops / backward / 1e9)}  # fmt: skip


def inputs_of(q_heads, kv_heads, seqlen, drift):
    """Draw q, k, v and gates; queries that drift slowly choose alike."""
    torch.manual_seed(0)
    draw = lambda heads, dim: torch.randn(1, seqlen, heads, dim, device="cuda")
    q = draw(q_heads, DIM)
    if drift:  # a walk of step sqrt(1 - drift^2), by blocks of 1024 so that powers stay in range
        steps = torch.arange(1024, device="cuda")
        decay = (drift ** (steps[:, None] - steps)).tril() * (1 - drift**2) ** 0.5
        q = torch.einsum("st,bntd->bnsd", decay, q[0].transpose(0, 1).unflatten(1, (-1, 1024)))
        q = q.flatten(1, 2).transpose(0, 1)[None]
    some = [x.bfloat16().requires_grad_() for x in (q, draw(kv_heads, DIM), draw(kv_heads, DIM))]
    return *some, torch.rand(1, seqlen, q_heads, 3, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def attend(q, k, v, gates):
    return native_sparse_attention(q, k, v, (compress(k, SIZES), compress(v, SIZES)), gates, SIZES)


def dense(q, k, v, gates=None):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        ).transpose(1, 2)


def backward_time(run, leaves):
    out = run(*leaves)
    do = torch.randn_like(out)
    return time_of(lambda: torch.autograd.grad(out, leaves, do, retain_graph=True))


def both_ways(run, leaves):
    """Time forward, backward and a step, launched and as a CUDA graph; return ms and the step's peak GiB.

    The peak is over what the leaves hold; the output goes where a loss would let it go.
    """
    with torch.no_grad():
        forward = time_of(lambda: run(*leaves))
        do = torch.randn_like(run(*leaves))
    backward = backward_time(run, leaves)
    step = lambda: torch.autograd.grad(run(*leaves), leaves, do)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(run(*leaves).sum(), leaves)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    times = {"forward_ms": forward, "backward_ms": backward, "step_ms": time_of(step)}
    return {**times, "step_graph_ms": time_of(captured(step).replay), "peak_gib": round(peak, 2)}


def captured(run):
    """Capture a call as a CUDA graph, so that its time has no host part."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        run()
    return graph


def time_whole(name, q_heads, kv_heads, seqlen, drift, schedule=None):
    leaves = inputs_of(q_heads, kv_heads, seqlen, drift)
    row = {"work": f"NSA {name} {seqlen // 1024}k", "inputs": f"drifting by {drift}" if drift else "random"}
    row |= {"overlap": round(overlap_of(leaves), 2), **both_ways(attend, leaves)}
    row |= {f"dense_{key}": value for key, value in both_ways(dense, leaves[:3]).items()}
    return row


def overlap_of(leaves):
    """Share of a query's blocks that the query before it selected, too."""
    indices = parts_of(leaves)["indices"].long()
    blocks = torch.zeros(*indices.shape[:2], int(indices.max()) + 2, dtype=torch.bool, device="cuda")
    blocks.scatter_(2, indices + 1, True)
    blocks[..., 0] = False
    return float((blocks[1:] & blocks[:-1]).sum() / blocks[1:].sum())


def parts_of(leaves):
    q, k, v, gates = (x.detach() for x in leaves)
    spans, packed = pack(q, k, v, SIZES, None, None)
    k_cmp, v_cmp = compress(k, SIZES)[0], compress(v, SIZES)[0]
    scale = DIM**-0.5
    out, lse = compressed_attention(packed, k_cmp, v_cmp, spans, scale, "auto")
    indices = select_nsa(packed.q, k_cmp, lse, spans, scale=scale)
    return locals()


def time_parts(q_heads, kv_heads, seqlen, drift):
    """Time each part: [forward, backward] in ms; selection has no backward."""
    p = parts_of(inputs_of(q_heads, kv_heads, seqlen, drift))
    packed, spans, scale = p["packed"], p["spans"], p["scale"]
    queried = lambda q: replace(packed, q=q)
    parts = {
        "compress": (lambda k, v: torch.cat((compress(k, SIZES), compress(v, SIZES))), (p["k"], p["v"])),
        "compressed": (
            lambda q, k, v: compressed_attention(queried(q), k, v, spans, scale, "auto")[0],
            (packed.q, p["k_cmp"], p["v_cmp"]),
        ),
        "selected": (
            lambda q, k, v: attend_selected(q, k, v, p["indices"], spans, scale, "auto")[0],
            (packed.q, packed.k, packed.v),
        ),
        "window": (
            lambda q, k, v: window_attention(replace(packed, q=q, k=k, v=v), spans, scale, "auto")[0],
            (packed.q, packed.k, packed.v),
        ),
        "gate": (lambda a, b, c, gates: gated_sum((a, b, c), gates, "triton"), (*(p["out"],) * 3, p["gates"][0])),
    }
    select = lambda: select_nsa(packed.q, p["k_cmp"], p["lse"], spans, scale=scale)
    times = {"select": [time_of(select), 0.0]}
    for name, (run, inputs) in parts.items():
        with torch.no_grad():
            times[name] = [time_of(lambda: run(*inputs))]  # noqa: B023
        times[name].append(backward_time(run, [x.detach().requires_grad_() for x in inputs]))
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["selected", "whole", "lengths", "parts"], help="one of the parts")
    parser.add_argument("--heads", nargs="+", choices=HEADS, help="only rows of these")
    parser.add_argument("--schedules", action="store_true", help="time both schedules of selected attention")
    parser.add_argument("--json", help="also write the rows here")
    parser.add_argument("--cases", type=int, default=10, help="random problems per schedule that must pass first")
    args = parser.parse_args()
    need_gpu()
    check(args.cases)
    print(
        f"{3 * args.cases} random problems agree with fp64; {torch.cuda.get_device_name()}, torch {torch.__version__}"
    )
    rows = []

    def report(row):
        rows.append(row)
        print(row, flush=True)
        if args.json:  # after every row: what was measured stays if the time is up
            Path(args.json).write_text(json.dumps(rows, indent=1))

    for part, heads, run in rows_to_time(args.schedules):
        if args.only in (None, part) and (not args.heads or heads in args.heads):
            report(run())


def rows_to_time(schedules):
    """Return (part, heads, function that makes a row) of every row."""
    whole = lambda heads, seqlen, drift: ("whole", heads, lambda: time_whole(heads, *HEADS[heads], seqlen, drift))
    for drift in DRIFTS:
        yield whole("64/4", 32768, drift)
    yield whole("32/8", 32768, 0.999)
    yield whole("64/4", 65536, 0.999)
    for heads in ("64/4", "32/8", "32/16", "32/32"):
        for keep in (0.0, 0.75) if heads in MAIN else (0.75,):
            for schedule in ("union", "gather") if schedules else (None,):
                yield "selected", heads, partial(time_selected, heads, 32768, keep, schedule)
    for seqlen in (8192, 16384):
        yield "lengths", *whole("64/4", seqlen, 0.999)[1:]
    for heads in ("32/32", "32/16", "32/8", "32/4"):
        for seqlen in (16384, 32768):
            yield "lengths", *whole(heads, seqlen, 0.999)[1:]
    for heads in MAIN:
        for drift in (0.999, 0.0):
            yield "parts", heads, partial(row_of_parts, heads, drift)


def row_of_parts(heads, drift):
    inputs = "drifting" if drift else "random"
    return {"work": f"parts {heads} 32k", "inputs": inputs, **time_parts(*HEADS[heads], 32768, drift)}


if __name__ == "__main__":
    main()
