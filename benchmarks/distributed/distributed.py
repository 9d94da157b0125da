# SPDX-License-Identifier: Apache-2.0
"""Sparse attention with the sequence split over the GPUs of one machine, beside one GPU.

First the link is measured. Then results and gradients of every kind of rule are compared with one GPU's; a wrong result
gives no figures. Times are medians of turns: every GPU runs the whole workload by itself, all at once, then all share
it. If one GPU ran it alone, that GPU would reach its power limit, and the others would not. A turn has several calls,
of which the last counts: GPUs lower their clocks under load, and a single call would get the clock that the turn before
it left. Memory is the peak of a call with its inputs.

torchrun --nproc-per-node 2 benchmarks/distributed/distributed.py [--lengths 131072,524288] [--only NAME ...]
    [--json FILE]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import dynaxx as dx
from dynaxx import distributed as dxd
from dynaxx.distributed.by_rule.attention import default_stages
from dynaxx.distributed.peer_memory import peer_memory_bytes

BLOCK = 128
SHAPES = {"cuda": ((32, 8), (64, 4), 128), "cpu": ((4, 2), (4, 1), 16)}  # heads, of NSA, head_dim; a CPU only tries it
SIZES = dx.trained.NsaSizes()
HYBRID = dx.SlidingWindow(1024) | dx.Sink(128) | dx.TopK(0.1)
BARS = {"window": 1.85, "random": 1.85, "hybrid": 1.8, "nsa": 1.8}
MEMORY_BAR = 0.55
ALONE = {
    "all": "every GPU runs the whole workload by itself, all at once (1 GPU: their mean),",
    "first": "one GPU runs the whole workload",
}
ADVISED = {  # by docs/guides/distributed.md
    "DYNAXX_COPY_ENGINES": "1",
    "TORCH_NCCL_HIGH_PRIORITY": "1",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    "TORCH_FR_BUFFER_SIZE": "0",
}


class Setup:
    """The ranks, and this rank's device."""

    def __init__(self, device):
        self.rank, self.count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.cuda = device == "cuda"
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if self.cuda else torch.device("cpu")
        for name, value in ADVISED.items():
            os.environ.setdefault(name, value)  # read when the group is made
        options = {"timeout": timedelta(seconds=120)}
        if self.cuda:
            torch.cuda.set_device(self.device)
            options["device_id"] = self.device
        dist.init_process_group("nccl" if self.cuda else "gloo", **options)
        self.mesh = init_device_mesh(device, (self.count,), mesh_dim_names=("sequence",))

    def say(self, *what):
        if self.rank == 0:
            print(*what, flush=True)

    def wait(self):
        if self.cuda:
            torch.cuda.synchronize()
        dist.barrier()

    def most(self, number):
        """Return the largest of the ranks' numbers."""
        found = torch.tensor([number], dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.item()

    def all(self, number):
        """Return the numbers of all ranks."""
        own = torch.tensor([number], dtype=torch.float64, device=self.device)
        found = [torch.empty_like(own) for _ in range(self.count)]
        dist.all_gather(found, own)
        return [x.item() for x in found]

    def time(self, run, calls=1):
        """Return the milliseconds of this rank's last call, all ranks starting together; 0 without a call."""
        for _ in range(calls - 1):
            self.wait()
            if run is not None:
                run()
        self.wait()
        start = time.perf_counter()
        if run is not None:
            run()
        if self.cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3 if run is not None else 0.0

    def peak(self, run, before=0, shares=False):
        """Return the GiB that a call holds at most, its inputs included, without `before` bytes of other workloads.

        Memory that GPUs share, which torch's allocator does not count, is included if the call `shares` it.
        """
        self.wait()
        if not self.cuda or run is None:
            if run is not None:
                run()
            return 0.0
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        shared = peer_memory_bytes(self.mesh.get_group()) if shares else 0
        return (torch.cuda.max_memory_allocated() + shared - before) / 2**30


def measure_link(setup):
    """Return the GB/s that a rank sends while it receives as much, and the microseconds of a small exchange."""
    peer, found = setup.count - 1 - setup.rank, {}
    for name, size in (("large", 256 << 20 if setup.cuda else 1 << 20), ("16 MiB", 16 << 20), ("small", 4096)):
        out, into = (torch.zeros(size, dtype=torch.uint8, device=setup.device) for _ in range(2))

        def exchange(out=out, into=into):
            ops = [dist.P2POp(dist.isend, out, peer), dist.P2POp(dist.irecv, into, peer)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        exchange()
        milliseconds = setup.most(median(setup.time(exchange) for _ in range(7)))
        found[name] = {
            "bytes": size,
            "microseconds": round(milliseconds * 1e3, 1),
            "GB/s": round(size / milliseconds / 1e6, 1),
        }
    return found


def random_layout(seqlen, density=0.1, seed=0):
    """Choose the diagonal and random earlier blocks of each row, up to the density; shared by all heads."""
    blocks = -(-seqlen // BLOCK)
    scores = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(seed))
    row = torch.arange(blocks)
    scores.masked_fill_(row > row[:, None], -1.0)
    scores[row, row] = 2.0
    kept = ((row + 1) * density).ceil().long()
    order = scores.argsort(-1, descending=True)[:, : int(kept[-1])]
    indices = order.masked_fill(torch.arange(order.shape[1]) >= kept[:, None], -1)
    return dx.BlockLayout.from_block_indices(indices[None, None], seqlen, block_size=BLOCK)


class Case:
    """One workload: a function for one GPU alone, and one for all ranks together."""

    def __init__(self, setup, name, seqlen, dtype=torch.bfloat16):
        self.setup, self.name, self.seqlen, self.dtype = setup, name, seqlen, dtype
        heads, nsa_heads, self.dim = SHAPES[setup.device.type]
        self.heads = nsa_heads if name == "nsa" else heads
        self.layout = self.rows = None
        if name == "window":
            self.layout = dx.SlidingWindow(min(4096, seqlen // 8)).layout(seqlen, block_size=BLOCK)
        if name == "random":
            self.layout = random_layout(seqlen)
        self.whole = None  # the layout on the GPU, for a GPU alone
        if self.layout is not None:
            self.split = dxd.sequence_split(self.layout, setup.mesh)
            self.rows = dxd.ShardedLayout.of(self.layout, self.split, setup.rank, device=setup.device)
        else:
            self.split = dxd.SequenceSplit.zigzag(seqlen, setup.count, BLOCK)

    def draw(self, whole, seed=0):
        """Draw q, k, v (and gates): the whole sequence, or this rank's shard of the same numbers."""
        generator = torch.Generator(self.setup.device).manual_seed(seed)
        shapes = [(h, self.dim) for h in (self.heads[0], self.heads[1], self.heads[1])]
        shapes += [(self.heads[0], 3)] if self.name == "nsa" else []
        found = []
        for shape in shapes:
            make = torch.rand if shape[1] == 3 else torch.randn
            x = make(1, self.seqlen, *shape, generator=generator, device=self.setup.device, dtype=self.dtype)
            found.append(x if whole else self.split.shard(x, self.setup.rank))
        return found

    def one(self, *inputs):
        if self.name == "nsa":
            q, k, v, gates = inputs
            compressed = dx.trained.compress(k, SIZES), dx.trained.compress(v, SIZES)
            return dx.trained.native_sparse_attention(q, k, v, compressed, gates, SIZES)
        if self.layout is None:
            return dx.sparse_attention(*inputs, dx.select_blocks(*inputs[:2], HYBRID, block_size=BLOCK))
        if self.whole is None:
            self.whole = self.layout.to(self.setup.device)
        return dx.sparse_attention(*inputs, self.whole)

    def many(self, *inputs, stages=None):
        options = {} if stages is None else {"stages": stages}
        mesh = self.setup.mesh
        if self.name == "nsa":
            return dxd.native_sparse_attention(*inputs, SIZES, self.split, mesh, **options)
        if self.layout is None:
            return dxd.sparse_attention_by_rule(*inputs, HYBRID, self.split, mesh, block_size=BLOCK, **options)
        return dxd.sparse_attention(*inputs, self.rows, mesh, **options)


def step(attend, inputs, backward, **options):
    """Return a call without arguments: forward alone, or with gradients of all inputs."""
    if not backward:
        return lambda: attend(*inputs, **options)
    leaves = [x.requires_grad_() for x in inputs]
    do = torch.randn_like(inputs[0])

    def run():
        torch.autograd.grad(attend(*leaves, **options), leaves, do)

    return run


def check(setup, name, seqlen, dtype):
    """Compare results and gradients with one GPU's; the error relative to the largest value."""
    case = Case(setup, name, seqlen, dtype)
    whole, own = (case.draw(w) for w in (True, False))
    errors = {}
    for what, inputs, attend in (("one", whole, case.one), ("many", own, case.many)):
        leaves = [x.requires_grad_() for x in inputs]
        out = attend(*leaves)
        do = torch.randn(1, seqlen, *out.shape[2:], generator=torch.Generator(setup.device).manual_seed(5),
                         device=setup.device, dtype=dtype)  # fmt: skip
        grads = torch.autograd.grad(out, leaves, do if what == "one" else case.split.shard(do, setup.rank))
        errors[what] = [out.detach(), *grads]
    found = []
    for wanted, got in zip(errors["one"], errors["many"], strict=True):
        shard = case.split.shard(wanted, setup.rank).double()
        worst = (got.double() - shard).abs().max().item() if got.numel() else 0.0
        found.append(setup.most(worst) / max(1e-30, wanted.abs().max().item()))
    limit = 1e-4 if dtype == torch.float32 else 2e-2
    setup.say(f"check {name} {seqlen} {dtype}: relative errors {[f'{e:.1e}' for e in found]}")
    assert max(found) < limit, f"{name}: {found}"
    return [float(f"{e:.2e}") for e in found]


def measure(setup, name, seqlen, backward, repeats, alone_on="all", calls=1):
    """Return the row of one workload: one GPU and all GPUs in turns, and the memory of both.

    Args:
        setup: the ranks.
        name: workload.
        seqlen: tokens of the whole sequence.
        backward: include the backward pass.
        repeats: number of turns.
        alone_on: "all": in a turn, every GPU runs the whole workload by itself, all at once, so that all are equally
            warm and have the same clocks as later; the mean is compared. "first": only the first GPU does.
        calls: calls per turn, of which the last counts.
    """
    before = torch.cuda.memory_allocated() if setup.cuda else 0
    case = Case(setup, name, seqlen)
    runs_alone = alone_on == "all" or setup.rank == 0
    whole = case.draw(True) if runs_alone else None
    alone = step(case.one, whole, backward) if runs_alone else None
    if alone is not None:
        alone()
    peak_one = setup.peak(alone, before)
    del whole, alone
    case.whole = None
    if setup.cuda:
        torch.cuda.empty_cache()
    own = case.draw(False)
    if setup.cuda:
        torch.cuda.empty_cache()
    together = step(case.many, own, backward)
    together()
    peak_many = setup.most(setup.peak(together, before, shares=name != "nsa"))
    alone = step(case.one, case.draw(True), backward) if runs_alone else None
    times, by_gpu = {"one": [], "many": []}, {"one": [], "many": []}
    for i in range(repeats + 1):
        for which, run in (("one", alone), ("many", together)):
            took = setup.all(setup.time(run, calls))
            if i:
                times[which].append(max(took))
                by_gpu[which].append(took)
    many = median(times["many"])
    one = median(sum(took) / len(took) if alone_on == "all" else took[0] for took in by_gpu["one"])
    row = {
        "name": name,
        "seqlen": seqlen,
        "pass": "forward + backward" if backward else "forward",
        "heads": case.heads,
        "one_ms": round(one, 3),
        "many_ms": round(many, 3),
        "speedup": round(one / many, 3),
        "bar": BARS[name],
        "one_GiB": round(setup.most(peak_one), 3),
        "many_GiB": round(peak_many, 3),
        "spread_one": [round(min(times["one"]), 3), round(max(times["one"]), 3)],
        "spread_many": [round(min(times["many"]), 3), round(max(times["many"]), 3)],
        "one_by_gpu": [round(median(x), 3) for x in zip(*by_gpu["one"], strict=True)],
        "many_by_gpu": [round(median(x), 3) for x in zip(*by_gpu["many"], strict=True)],
        "alone_on": alone_on,
        "calls": calls,
        "runs_per_rank": [len(case.split.runs(rank)) for rank in range(setup.count)],
    }
    if setup.cuda:
        row["memory_share"] = round(row["many_GiB"] / row["one_GiB"], 3)
    if case.layout is not None:
        plan = dxd.exchange_plan(*own, case.rows, setup.mesh)
        row["stages"], row["MB_received"] = len(plan.stages), round(plan.bytes_received(*own[1:3]) / 1e6, 1)
        row["imbalance"] = round(dxd.split_cost(case.layout, case.split).imbalance, 4)
    elif name == "hybrid":
        row["stages"] = default_stages(*own[1:3], case.split)
    setup.say(row)
    return row


def sweep_stages(setup, name, seqlen, backward):
    """Print milliseconds by the number of stages."""
    case = Case(setup, name, seqlen)
    own = case.draw(False)
    found = {}
    for stages in (1, 2, 4, 8):
        if case.heads[1] % stages == 0:
            run = step(case.many, own, backward, stages=stages)
            run()
            found[stages] = round(median(setup.most(setup.time(run)) for _ in range(5)), 3)
    row = {"name": name, "seqlen": seqlen, "backward": backward, "ms by stages": found}
    setup.say(row)
    return row


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="131072,524288")
    parser.add_argument("--only", nargs="*", default=["window", "random", "hybrid", "nsa"])
    parser.add_argument("--check-length", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--calls", type=int, default=3, help="calls per turn, of which the last counts, "
                        "up to 128k tokens; longer calls have clocks of their own")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=400, help="start no measurement later than this")
    parser.add_argument("--sweep", action="store_true", help="also time other numbers of stages")
    parser.add_argument("--alone-on", default="all", choices=("all", "first"), help="which GPUs run the workload by "
                        "themselves in a turn")  # fmt: skip
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--commit", default=None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--record", nargs=3, metavar=("MEASURED", "RESULT", "DATE"), help="measure nothing; rewrite a "
                        "file of --json as a file of benchmarks/results")  # fmt: skip
    return parser.parse_args()


def workloads(names, lengths):
    """Return (name, seqlen, backward) of each measurement, short sequences first."""
    wanted = [("nsa", min(65536, lengths[0]), True), ("nsa", min(65536, lengths[0]), False)]
    wanted += [(name, n, b) for n in lengths for name in ("window", "random") for b in (False, True)]
    wanted += [("hybrid", lengths[0], b) for b in (False, True)]
    return sorted((job for job in wanted if job[0] in names), key=lambda job: job[1])


def main():
    args = arguments()
    if args.record:
        report = json.loads(Path(args.record[0]).read_text())
        Path(args.record[1]).write_text(json.dumps(result_of(report, args.record[2]), indent=1) + "\n")
        return
    begun = time.monotonic()
    setup = Setup(args.device)
    report = {
        "commit": args.commit or commit(),
        "gpus": setup.count,
        "gpu": torch.cuda.get_device_name() if setup.cuda else "cpu",
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if setup.cuda else None,
        "command": " ".join(sys.argv),
        "environment": {name: os.environ[name] for name in (*ADVISED, "DYNAXX_LAUNCH_GRAPHS") if name in os.environ},
        "link": measure_link(setup),
        "checks": {},
        "rows": [],
        "stages": [],
    }
    setup.say(report["link"])

    def keep():
        if args.json and setup.rank == 0:
            args.json.write_text(json.dumps(report, indent=1))

    for name in args.only:
        for dtype in (torch.bfloat16,) if setup.cuda else (torch.float32,):
            report["checks"][name] = check(setup, name, args.check_length, dtype)
    keep()
    lengths = [int(length) for length in args.lengths.split(",")]
    for name, seqlen, backward in workloads(args.only, lengths):
        if setup.most(time.monotonic() - begun) > args.seconds:
            setup.say(f"no time left for {name} at {seqlen}")
            continue
        repeats = args.repeats if seqlen <= 131072 else max(3, args.repeats // 2)
        report["rows"].append(measure(setup, name, seqlen, backward, repeats, args.alone_on,
                                      args.calls if seqlen <= 131072 else 1))  # fmt: skip
        if setup.cuda:
            torch.cuda.empty_cache()
        keep()
        if args.sweep and (seqlen == lengths[0] or name == "nsa"):
            report["stages"].append(sweep_stages(setup, name, seqlen, backward))
            keep()
    failed = [row for row in report["rows"] if row["speedup"] < row["bar"]]
    setup.say(f"{len(report['rows']) - len(failed)} of {len(report['rows'])} at or above their bars")
    dist.destroy_process_group()


def shown(milliseconds):
    """Return a time with three or four digits."""
    return f"{milliseconds:,.0f}" if milliseconds >= 1000 else f"{milliseconds:.3g}"


def result_of(report, date):
    """Return a report as `render.py` reads it."""
    titles = {"window": "window 4,096", "random": "random 10 %", "hybrid": "hybrid with selection", "nsa": "NSA 64/4"}
    rows, bars = [], []
    for row in report["rows"]:
        name = f"{titles[row['name']]}, {row['seqlen'] >> 10}k, {row['pass']}"
        share = f"{row['memory_share']:.2f}"
        rows.append([name, f"{shown(row['one_ms'])}", f"{shown(row['many_ms'])}", f"{row['speedup']:.2f}x",
                     f"{row['one_GiB']:.3g}", f"{row['many_GiB']:.3g}", share])  # fmt: skip
        if report["gpus"] == 2 and (row["name"] != "nsa" or "backward" in row["pass"]):
            bars.append({"bar": name, "asked": f"{row['bar']}x", "measured": f"{row['speedup']:.2f}x",
                         "met": row["speedup"] >= row["bar"]})  # fmt: skip
            bars.append({"bar": f"{name}: memory", "asked": f"{MEMORY_BAR}", "measured": share,
                         "met": row["memory_share"] <= MEMORY_BAR})  # fmt: skip
    link, calls = report["link"]["large"], report["rows"][0].get("calls", 1)
    return {
        "title": f"Sparse attention with the sequence split over {report['gpus']} GPUs",
        "command": f"torchrun --nproc-per-node {report['gpus']} benchmarks/distributed/distributed.py",
        "commit": report["commit"],
        "date": date,
        "recorded": "measured",
        "device": f"{report['gpus']} x {report['gpu']}",
        "versions": {"torch": report["torch"], "nccl": report["nccl"]},
        "setting": "bf16, batch 1, 32/8 heads of 128 (NSA 64/4), blocks of 128, causal; medians of turns, in which "
        f"{ALONE[report['rows'][0].get('alone_on', 'first')]} and then all GPUs share it"
        f"{f', each {calls} times up to 128k tokens, of which the last counts' if calls > 1 else ''}; "
        f"link: {link['GB/s']} GB/s each way at once in messages of {link['bytes'] >> 20} MiB"
        + "".join(f"; {name}={value}" for name, value in report.get("environment", {}).items()),
        "columns": ["workload", "1 GPU, ms", f"{report['gpus']} GPUs, ms", "speed-up", "1 GPU, GiB",
                    f"each of {report['gpus']}, GiB", "share of memory"],
        "rows": rows,
        "bars": bars,
    }  # fmt: skip


def commit():
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
