"""The GPU suite as a table, with the layout's build time and a captured graph beside it; JSON to a file if named.

python benchmarks/gpu_suite.py [--quick] [--json FILE]
"""

import argparse
import json
import time
from pathlib import Path

import torch
from triton.testing import do_bench

import dynaxx as dx
from dynaxx.lab.bench_gpu import HEAD_DIM, KV_HEADS, Q_HEADS, WORKLOADS, run_gpu_suite, time_layout_build


def time_graph(workload, device):
    """Milliseconds of one attention call eagerly (wall, with its launches) and as a replayed CUDA graph."""
    layout = workload.layout(device, 0)
    draw = lambda heads: torch.randn(1, workload.seqlen, heads, HEAD_DIM, device=device, dtype=torch.bfloat16)
    q, k, v = draw(Q_HEADS), draw(KV_HEADS), draw(KV_HEADS)
    dx.sparse_attention(q, k, v, layout)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    dx.sparse_attention(q, k, v, layout)
    launch_ms = (time.perf_counter() - begin) * 1e3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dx.sparse_attention(q, k, v, layout)
    return {"launch_ms": round(launch_ms, 4), "graph_ms": round(do_bench(graph.replay, return_mode="median"), 4)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = run_gpu_suite(quick=args.quick)
    device = torch.device("cuda", torch.cuda.current_device())
    windows = [workload for workload in WORKLOADS if workload.window is not None]
    result["layout_build_ms"] = {workload.name: round(time_layout_build(workload, device), 3) for workload in windows}
    result["graph"] = {workload.name: time_graph(workload, device) for workload in windows}
    print(f"{result['device']}, {result['versions']}; {result['shape']}; checks passed: {result['checks']}")
    for row in result["rows"]:
        times = "; ".join(row["skipped"]) if "skipped" in row else (
            f"forward {row['forward_ms']:8.3f} ms {row['forward_tflops']:6.0f} TF/s   "
            f"backward {row['backward_ms']:8.3f} ms {row['backward_tflops']:6.0f} TF/s"
        )  # fmt: skip
        print(
            f"{row['workload']:>26} {row['seqlen']:>6} density {row['density']:.3f} {row['implementation']:<18} {times}"
        )
    print("layout build, ms:", result["layout_build_ms"], "\nforward call:", result["graph"])
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
