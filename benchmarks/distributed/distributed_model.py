# SPDX-License-Identifier: Apache-2.0
"""Compare the cost model of split sequences with measured times, and extrapolate to more GPUs and longer sequences.

Times per block come from the one-GPU rows of `benchmarks/distributed/distributed.py`, and from those of two GPUs where
fewer tokens lie on a GPU; the speed of the link from its first lines. The network between nodes is an assumption:
`--network`.

python benchmarks/distributed/distributed_model.py MEASURED.json [--beyond MEASURED_ON_FOUR.json]
    [--plot FILE.svg] [--record FILE.json --date YYYY-MM-DD]
"""

import argparse
import json
from pathlib import Path

from cost_model import Machine, Shape, Workload, predict

from dynaxx.distributed.plan import stages_of

SHAPE = Shape()
WORKLOADS = {
    "window": Workload("window", 4096),
    "random": Workload("random", 0.1),
    "hybrid": Workload("random", 0.1),  # times per block include the selection
    "top_k": Workload("top_k", 64),
}
TITLES = {"window": "window of 4,096 tokens", "random": "random 10 %", "top_k": "64 blocks per row"}
LENGTHS = (1 << 20, 1 << 22, 1 << 24)
GPUS = (1, 2, 8, 64, 512)
START = 2e-4  # seconds on the host before the first kernel, beyond those of one GPU, measured on two H200
RULE_START = 7e-4  # the same with blocks to be selected first


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
    backward = [(seqlen, both[seqlen] - one) for seqlen, one in forward if seqlen in both]
    start = RULE_START if name == "hybrid" else START
    half = half_of_shortest(by_key, workload, forward, link, call, start)
    return Machine(forward, tuple(sorted([*half, *backward])), link, network, call=call, start=start)


def half_of_shortest(by_key, workload, forward, link, call, start):
    """Time per block of a backward pass with half as many tokens on a GPU: what two of them took, less the exchange."""
    seqlen = forward[0][0]
    row = by_key[seqlen, "forward + backward"]
    blocks = workload.visited_blocks(seqlen, SHAPE.block) * SHAPE.q_heads / 2
    flat = Machine(forward, ((1, 0.0),), link, link, call=call, start=start)
    rest = predict(workload, SHAPE, flat, seqlen, 2, backward=True, stages=row.get("stages", 1))
    return [(seqlen // 2, (row["many_ms"] * 1e-3 - rest.seconds) / blocks)]


def compare(report, network, known=None):
    """Set what was measured on one GPU and on several beside what the model says.

    Args:
        report: what was measured.
        network: bytes per second and GPU between nodes.
        known: the report that gives the machine's speeds; `report` itself by default.
    """
    rows = []
    for row in report["rows"]:
        if row["name"] not in WORKLOADS:
            continue
        machine = machine_of(known or report, row["name"], network)
        backward = row["pass"] != "forward"
        for ranks, measured in ((1, row["one_ms"]), (report["gpus"], row["many_ms"])):
            if ranks == 1 and known:
                continue  # one GPU of another machine's turn tells nothing new
            options = {"backward": backward}
            if ranks > 1:
                options.update(imbalance=row.get("imbalance", 1.0), stages=row.get("stages", 1))
            predicted = predict(WORKLOADS[row["name"]], SHAPE, machine, row["seqlen"], ranks, **options).seconds * 1e3
            rows.append({"name": row["name"], "seqlen": row["seqlen"], "pass": row["pass"], "gpus": ranks,
                         "measured_ms": measured, "predicted_ms": round(predicted, 2),
                         "error": round(predicted / measured - 1, 3)})  # fmt: skip
    return rows


def extrapolate(report, network):
    """Forward and backward passes of one layer, in milliseconds, with their efficiency."""
    rows = []
    for name, workload in WORKLOADS.items():
        if name not in TITLES:
            continue
        machine = machine_of(report, "random" if name == "top_k" else name, network)
        for seqlen in LENGTHS:
            alone = predict(workload, SHAPE, machine, seqlen, 1, backward=True).seconds
            for gpus in GPUS:
                for by_heads in (1, 8) if gpus >= 8 and name != "window" else (1,):
                    count = stages(workload, seqlen, gpus // by_heads, SHAPE.kv_heads // by_heads)
                    cost = predict(workload, SHAPE, machine, seqlen, gpus, backward=True, by_heads=by_heads,
                                   stages=count)  # fmt: skip
                    rows.append({"name": name, "seqlen": seqlen, "gpus": gpus, "by_heads": by_heads,
                                 "ms": round(cost.seconds * 1e3, 2), "exchange_ms": round(cost.exchange * 1e3, 2),
                                 "GiB": round(cost.memory / 2**30, 2),
                                 "efficiency": round(alone / gpus / cost.seconds, 3)})  # fmt: skip
    return rows


def stages(workload, seqlen, ranks, kv_heads):
    """Return the number of stages that the library chooses by default."""
    received = workload.received_tokens(seqlen, ranks, SHAPE.block)
    return stages_of(kv_heads, received * SHAPE.token_bytes / SHAPE.kv_heads) if 4 * received > seqlen // ranks else 1


def shown(milliseconds):
    """Return a time with three or four digits."""
    return f"{milliseconds:,.0f}" if milliseconds >= 1000 else f"{milliseconds:.3g}"


def result_of(report, compared, ahead, args, beyond=()):
    """Return the predictions as `render.py` reads them."""
    rows = []
    for name, title in TITLES.items():
        for seqlen in LENGTHS:
            for by_heads in (1, 8):
                found = {row["gpus"]: row for row in ahead
                         if (row["name"], row["seqlen"], row["by_heads"]) == (name, seqlen, by_heads)}  # fmt: skip
                if found:
                    cells = [f"{shown(found[n]['ms'])} ms, {found[n]['efficiency']:.0%}, {found[n]['GiB']:.3g} GiB"
                             for n in (8, 64, 512)]  # fmt: skip
                    way = "sequence" if by_heads == 1 else "8 by heads, rest by sequence"
                    rows.append([f"{title}, {seqlen >> 20}M, {way}", *cells])
    worst = max(compared, key=lambda row: abs(row["error"]))
    return {
        "title": "Predicted attention of one layer, forward and backward",
        "command": "python benchmarks/distributed/distributed_model.py MEASURED.json",
        "commit": report["commit"],
        "date": args.date,
        "recorded": "measured",
        "device": f"predicted from {report['gpus']} x {report['gpu']}",
        "versions": {"torch": report["torch"]},
        "setting": f"bf16, 32/8 heads of 128, blocks of 128; nodes of 8 GPUs, {args.network / 1e9:g} GB/s per GPU "
        "between nodes (assumed); time, share of ideal speed, and memory per GPU",
        "columns": ["workload, tokens, split", "8 GPUs", "64 GPUs", "512 GPUs"],
        "rows": rows,
        "bars": [
            {
                "bar": "the model reproduces what was measured on 1 and 2 GPUs; farthest: "
                f"{worst['name']}, {worst['seqlen'] >> 10}k, {worst['pass']}, {worst['gpus']} GPUs",
                "asked": "within 10 %",
                "measured": f"{abs(worst['error']):.1%}",
                "met": abs(worst["error"]) <= 0.1,
            },
            *(
                {
                    "bar": f"{row['name']}, {row['seqlen'] >> 10}k, {row['pass']}, {row['gpus']} GPUs: "
                    f"predicted {shown(row['predicted_ms'])} ms, measured {shown(row['measured_ms'])} ms",
                    "asked": "within 10 %",
                    "measured": f"{abs(row['error']):.1%}",
                    "met": abs(row["error"]) <= 0.1,
                }
                for row in beyond
            ),
        ],
    }


def plot(rows, path):
    """Efficiency by GPUs: a panel per workload, a line per length."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "dynaxx", "font.size": 9})
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(9, 2.8), sharey=True)
    for panel, (name, title) in zip(panels, TITLES.items(), strict=True):
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
    parser.add_argument("measured", type=Path, help="what benchmarks/distributed/distributed.py --json wrote")
    parser.add_argument("--beyond", type=Path, nargs="*", default=[], help="the same of more GPUs, to compare what the "
                        "model predicts for them")  # fmt: skip
    parser.add_argument("--network", type=float, default=45e9, help="bytes per second and GPU between nodes")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--record", type=Path, help="write the predictions as a file of benchmarks/results")
    parser.add_argument("--date", default="", help="of the measurement, YYYY-MM-DD")
    args = parser.parse_args()
    report = json.loads(args.measured.read_text())
    compared, ahead = compare(report, args.network), extrapolate(report, args.network)
    beyond = [row for path in args.beyond for row in compare(json.loads(path.read_text()), args.network, report)]
    for row in [*compared, *beyond]:
        print(row)
    for row in ahead:
        print(row)
    worst = max(abs(row["error"]) for row in compared)
    print(f"largest difference from what was measured: {worst:.1%}")
    if args.record:
        args.record.write_text(json.dumps(result_of(report, compared, ahead, args, beyond), indent=1) + "\n")
    if args.plot:
        plot(ahead, args.plot)


if __name__ == "__main__":
    main()
