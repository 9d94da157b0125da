# SPDX-License-Identifier: Apache-2.0
"""Test the kernels, then time them beside dense attention and beside peers.

python -m benchmarks.suites cpu --threads 1 --only "window 512,decode"
python -m benchmarks.suites gpu --only window --peers flex --out gpu.json
python -m benchmarks.suites gpu --peers fa4,cudnn --sample 40

A kernel that fails its test is not timed, and gives exit code 1.
"""

import argparse
import json
import sys
from pathlib import Path

from dynaxx.lab.files import write_json
from dynaxx.lab.progress import LineProgress, SilentProgress


def main() -> None:
    """Measure, and print the rows as they come."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = lambda text: [name.strip() for name in text.split(",")]
    parser.add_argument("suite", choices=("cpu", "gpu"))
    parser.add_argument("--quick", action="store_true", help="fewer and smaller shapes")
    parser.add_argument("--threads", type=int, help="CPU threads; 1 by default")
    parser.add_argument("--only", type=names, default=[], help="rows whose names start with one of these")
    parser.add_argument("--peers", type=names, help="GPU: only peers whose names start with one of these")
    parser.add_argument("--sample", type=int, default=0, help="GPU: random problems of the sizes that models have")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quiet", action="store_true")
    args = parser.parse_args()
    if (args.peers or args.sample) and args.suite == "cpu":
        parser.error("--peers and --sample need the suite gpu")
    if args.sample and (args.only or args.quick):
        parser.error("--sample draws its own rows: leave out --only and --quick")

    def say(line: str) -> None:
        if not (args.json and args.quiet):
            print(line, file=sys.stderr if args.json else sys.stdout, flush=True)

    options = {"quick": args.quick, "seed": args.seed, "only": args.only, "progress": say}
    if args.suite == "cpu":
        from benchmarks.suites.cpu import run_cpu_suite

        with (SilentProgress() if args.quiet else LineProgress()).task("Testing and timing CPU kernels") as task:
            found = run_cpu_suite(**options, threads=args.threads, beat=lambda note: task.advance(0, note))
    else:
        from benchmarks.suites.gpu import run_gpu_suite

        found = run_gpu_suite(**options, peers=args.peers, sample=args.sample)
    if args.out:
        write_json(args.out, found)
    if args.json:
        print(json.dumps(found, allow_nan=False))


if __name__ == "__main__":
    try:
        main()
    except (RuntimeError, ValueError) as error:
        sys.exit(f"error: {error}")
