# SPDX-License-Identifier: Apache-2.0
"""Time the prefill of SmolLM2-135M in each engine that a CPU user could pick; see `run.py`.

python -m benchmarks.cpu_engines --policy demo/smollm2/policy.json
python -m benchmarks.cpu_engines --only "fp32 OpenVINO,fp32 transformers" --lengths 2048,8192 --threads 2
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.cpu_engines.run import run_suite


def main() -> int:
    """Measure, and return 1 if a figure misses its target."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    split = lambda text: text.split(",")
    parser.add_argument("--model", default="smollm2", help="a name or folder as `dynaxx tune` takes")
    parser.add_argument("--policy", type=Path, help="default: 30 %% of the blocks in all heads")
    parser.add_argument("--lengths", type=lambda text: [int(each) for each in text.split(",")], default=[])
    parser.add_argument("--only", type=split, default=[], help="rows whose names start with one of these")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, help="a folder that keeps converted models")
    parser.add_argument("--quick", action="store_true", help="two lengths")
    parser.add_argument("--json", action="store_true")
    options = vars(parser.parse_args())
    as_json = options.pop("json")
    found = run_suite(
        **options, progress=lambda line: print(line, file=sys.stderr if as_json else sys.stdout, flush=True)
    )
    if as_json:
        print(json.dumps(found, indent=1))
    return int(any(target["ok"] is False for target in found["targets"]))


if __name__ == "__main__":
    sys.exit(main())
