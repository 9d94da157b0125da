"""Compare the cost model of split sequences with measured times, and extrapolate to more GPUs and longer sequences.

Times per block come from the one-GPU rows of `benchmarks/distributed.py`, and from those of two GPUs where fewer tokens
lie on a GPU; the speed of the link from its first lines. The network between nodes is an assumption: `--network`.

python benchmarks/distributed_model.py benchmarks/results/distributed_gpu.json [--plot FILE.svg] [--json FILE]
"""

import argparse
import json
from pathlib import Path

from dynaxx.distributed.cost_model import Machine, Shape, Workload, predict

SHAPE = Shape()
WORKLOADS = {"window": Workload("window", 4096), "random": Workload("random", 0.1), "top_k": Workload("top_k", 64)}
LENGTHS = (1 << 20, 1 << 22, 1 << 24)
GPUS = (1, 2, 8, 64, 512)


def machine_of(report, name, network):
    """Speeds of the machine that a report is of, for one workload."""
    workload = WORKLOADS[name]
    by_key = {(row["seqlen"], row["pass"]): row for row in report["rows"] if row["name"] == name}
    large, small = report["link"]["large"], report["link"]["16 MiB"]
    seconds = (large["microseconds"] - small["microseconds"]) * 1e-6
    link = (large["bytes"] - small["bytes"]) / seconds
    call = max(0.0, small["microseconds"] * 1e-6 - small["bytes"] / link)
    points = {"forward": [], "forward + backward": []}
    for (seqlen, what), row in by_key.items():
        blocks = workload.visited_blocks(seqlen, SHAPE.block) * SHAPE.q_heads
        points[what].append((seqlen, row["one_ms"] * 1e-3 / blocks))
    forward = tuple(sorted(points["forward"]))
    both = dict(points["forward + backward"])
    backward = [(seqlen, both[seqlen] - one) for seqlen, one in forward]
    half = half_of_shortest(by_key, workload, forward, link, call)
    return Machine(forward, tuple(sorted([*half, *backward])), link, network, call=call)


def half_of_shortest(by_key, workload, forward, link, call):
    """Time per block of a backward pass with half as many tokens on a GPU: what two of them took, less the exchange."""
    seqlen = forward[0][0]
    row = by_key[seqlen, "forward + backward"]
    blocks = workload.visited_blocks(seqlen, SHAPE.block) * SHAPE.q_heads / 2
    flat = Machine(forward, ((1, 0.0),), link, link, call=call)
    rest = predict(workload, SHAPE, flat, seqlen, 2, backward=True)
    return [(seqlen // 2, (row["many_ms"] * 1e-3 - rest.seconds) / blocks)]


def compare(report, network):
    """What was measured on one and two GPUs beside what the model says."""
    rows = []
    for row in report["rows"]:
        if row["name"] not in WORKLOADS:
            continue
        machine = machine_of(report, row["name"], network)
        backward = row["pass"] != "forward"
        for ranks, measured in ((1, row["one_ms"]), (report["gpus"], row["many_ms"])):
            options = {"backward": backward, "imbalance": row["imbalance"] if ranks > 1 else 1.0}
            predicted = predict(WORKLOADS[row["name"]], SHAPE, machine, row["seqlen"], ranks, **options).seconds * 1e3
            rows.append({"name": row["name"], "seqlen": row["seqlen"], "pass": row["pass"], "gpus": ranks,
                         "measured_ms": measured, "predicted_ms": round(predicted, 2),
                         "error": round(predicted / measured - 1, 3)})  # fmt: skip
    return rows


def extrapolate(report, network):
    """Forward and backward passes of one layer, in milliseconds, with their efficiency."""
    rows = []
    for name, workload in WORKLOADS.items():
        machine = machine_of(report, "random" if name == "top_k" else name, network)
        for seqlen in LENGTHS:
            alone = predict(workload, SHAPE, machine, seqlen, 1, backward=True).seconds
            for gpus in GPUS:
                for by_heads in (1, 8) if gpus >= 8 and name != "window" else (1,):
                    cost = predict(workload, SHAPE, machine, seqlen, gpus, backward=True, by_heads=by_heads)
                    rows.append({"name": name, "seqlen": seqlen, "gpus": gpus, "by_heads": by_heads,
                                 "ms": round(cost.seconds * 1e3, 2), "exchange_ms": round(cost.exchange * 1e3, 2),
                                 "GiB": round(cost.memory / 2**30, 2),
                                 "efficiency": round(alone / gpus / cost.seconds, 3)})  # fmt: skip
    return rows


def plot(rows, path):
    """Efficiency by GPUs: a panel per workload, a line per length."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "dynaxx", "font.size": 9})
    from matplotlib import pyplot

    titles = {"window": "window of 4,096 tokens", "random": "random 10 %", "top_k": "64 blocks per row"}
    figure, panels = pyplot.subplots(1, 3, figsize=(9, 2.8), sharey=True)
    for panel, (name, title) in zip(panels, titles.items(), strict=True):
        for seqlen, color in zip(LENGTHS, ("#9ecae1", "#4292c6", "#08306b"), strict=True):
            for by_heads, style in ((1, "-"), (8, "--")):
                some = [r for r in rows if (r["name"], r["seqlen"], r["by_heads"]) == (name, seqlen, by_heads)]
                if some:
                    label = f"{seqlen >> 20}M tokens" if by_heads == 1 else None
                    panel.plot([r["gpus"] for r in some], [r["efficiency"] for r in some], style, color=color,
                               label=label, marker="o", markersize=3)  # fmt: skip
        panel.set(title=title, xscale="log", xlabel="GPUs", ylim=(0, 1.15))
        panel.set_xticks(GPUS, [str(n) for n in GPUS])
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("share of ideal speed")
    panels[0].legend(loc="lower left", frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, help="what benchmarks/distributed.py --json wrote")
    parser.add_argument("--network", type=float, default=45e9, help="bytes per second and GPU between nodes")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = json.loads(args.measured.read_text())
    compared, ahead = compare(report, args.network), extrapolate(report, args.network)
    for row in compared:
        print(row)
    for row in ahead:
        print(row)
    worst = max(abs(row["error"]) for row in compared)
    print(f"largest difference from what was measured: {worst:.1%}")
    if args.json:
        found = {"of": report["commit"], "network": args.network, "compared": compared, "predicted": ahead}
        args.json.write_text(json.dumps(found, indent=1))
    if args.plot:
        plot(ahead, args.plot)


if __name__ == "__main__":
    main()
