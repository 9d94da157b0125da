# SPDX-License-Identifier: Apache-2.0
"""Show what runs of `dynaxx tune` decided on each kind of text, as rows for `record.py`.

    dynaxx tune smollm2 --out run8 --tokens 8192 --kinds all --held-out ...
    python benchmarks/quality/tuned_runs.py run8 0.18 --json

Each folder is followed by the share of blocks that its run is asked to reach. No model is run.
"""

import argparse
import json
from pathlib import Path

KINDS = {"sample": "prose", "code": "code", "legal": "legal", "tables": "tables", "chat": "chat"}
LABELS = {
    "held-out text of the sample": "sample",
    "Python source code": "code",
    "licence texts": "legal",
    "tables": "tables",
    "conversations": "chat",
}


def rise(ratio, error=None):
    """Return a ratio of perplexities as a change, with its standard error if one is known."""
    return f"{ratio - 1:+.2%}" + ("" if error is None else f" ± {error:.2%}")


def row(tokens, what, blocks, by_kind):
    found = {"trial": f"{tokens:,} tokens, {what}", "blocks": blocks}
    return found | {name: by_kind.get(kind, "") for kind, name in KINDS.items()}


def rows_of(tuning, validation):
    """Return the trials of a run, the kinds that it left out, and its validation."""
    tokens = tuning["tokens"]
    for name, trials in (("budgets per head", tuning["tuned"]), ("one budget for all heads", tuning["uniform"])):
        for trial in trials:
            what = "chosen" if trial == tuning["chosen"] else "passes" if trial["passed"] else "fails"
            kinds = {each["kind"]: rise(each["ratio"], each["error"]) for each in trial["kinds"]}
            yield row(tokens, f"{name}, {what}", f"{trial['density']:.1%}", kinds)
    left_out = [each for each in tuning["held_out"] if each["ratio"] is not None]
    if left_out:
        shares = sorted(each["density"] for each in left_out)
        kinds = {each["kind"]: rise(each["ratio"], each["error"]) for each in left_out}
        yield row(tokens, "tuned without the kind of the column", f"{shares[0]:.1%} to {shares[-1]:.1%}", kinds)
    checks = [each for each in (validation or {}).get("checks", []) if each["name"] == "perplexity_ratio"]
    if checks:
        kinds = {LABELS[each["where"]]: rise(each["value"]) for each in checks}
        yield row(tokens, "chosen, on the held-out halves", f"{validation['density']:.1%}", kinds)


def bars_of(tuning, validation, asked):
    """Return the asked and the found share of blocks, and the largest rise on held-out text."""
    tokens, chosen = tuning["tokens"], tuning["chosen"]
    found = chosen["density"] if chosen else 1.0
    yield {
        "name": "blocks that the command chooses",
        "workload": f"{tokens:,} tokens",
        "target": f"{asked:.0%}",
        "value": f"{found:.1%}",
        "ok": found <= asked,
    }
    checks = [each for each in (validation or {}).get("checks", []) if each["name"] == "perplexity_ratio"]
    if checks:
        worst = max(each["value"] for each in checks)
        yield {
            "name": "largest rise of its policy on the held-out halves",
            "workload": f"{tokens:,} tokens",
            "target": "1 %",
            "value": f"{worst - 1:.2%}",
            "ok": worst <= 1.01,
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", nargs="+", metavar="FOLDER SHARE", help="folders of runs, each with the share asked for"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if len(args.runs) % 2:
        parser.error("give a share of blocks after each folder, such as run8 0.18")
    found = {"rows": [], "targets": []}
    for folder, asked in zip(args.runs[::2], args.runs[1::2], strict=True):
        tuning = json.loads((Path(folder) / "tuning.json").read_text())
        path = Path(folder) / "validation.json"
        validation = json.loads(path.read_text()) if path.exists() else None
        found["rows"] += rows_of(tuning, validation)
        found["targets"] += bars_of(tuning, validation, float(asked))
    print(json.dumps(found) if args.json else "\n".join(map(str, [*found["rows"], *found["targets"]])))


if __name__ == "__main__":
    main()
