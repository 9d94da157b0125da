# SPDX-License-Identifier: Apache-2.0
"""Time exported models in ONNX Runtime beside the same model exported dense, and beside dynaxx in torch, on a CPU.

    python benchmarks/models/onnx_runtime.py --only decoder --seqlen 8192 --threads 1
    python benchmarks/models/onnx_runtime.py --only encoder --seqlen 2048 --threads 1

Each round runs every form once, in turn, and the result is the median. With `--threads 1` the time is the processor's,
which neighbours disturb little. Before anything is timed, every form is compared with torch at 1,024 tokens; the exit
code is 1 if one differs by more than 1e-4 of the largest value, or if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import dynaxx as dx
from dynaxx.engines.onnx import OnnxModel, export_onnx
from dynaxx.integrations.transformers import model_facts
from dynaxx.policy import Policy, Rule

WINDOW = 256  # of the encoder: 255 keys on each side
HALVES = (128, 128)  # what Longformer calls a window of 256
STATIC = dx.Sink(64) | dx.SlidingWindow(512)
ALONE = "dense, ONNX Runtime's own settings"
DYNAMIC = dx.Sink(64) | dx.SlidingWindow(256) | dx.TopK(0.1)


def exported(folder, model, policy=None, **settings):
    """Return an exported model; what is in the folder already is used again."""
    if not folder.exists():
        export_onnx(model, folder, policy, **settings)
    return folder


def in_torch(model, policy, ids):
    with torch.no_grad(), dx.apply(model, policy):
        return model(torch.from_numpy(ids), logits_to_keep=1).logits.numpy()


def decoder(exports, threads):
    """Return by name what runs SmolLM2 on token ids."""
    from dynaxx.lab.models import load_model

    model = load_model("smollm2", dtype=torch.float32, device="cpu").model
    facts = model_facts(model)
    static, dynamic = (Policy(model=facts, rules=[Rule.of(rule)]) for rule in (STATIC, DYNAMIC))
    folders = {
        "static, portable": exported(exports / "portable", model, static, form="portable"),
        "static, custom": exported(exports / "static-custom", model, static, form="custom"),
        "dynamic, custom": exported(exports / "custom", model, dynamic, form="custom"),
    }
    ran = {name: OnnxModel(folder, threads=threads) for name, folder in folders.items()}
    portable = ran["static, portable"]

    def dense(ids):
        session = portable.session("decode")
        return session.run(["logits"], {"input_ids": ids, **empty(session)})[0]

    steps = {name: (lambda ids, each=each: each.step(ids)[0]) for name, each in ran.items()}
    return {
        "dense, portable": (dense, lambda ids: in_torch(model, Policy(model=facts, rules=[]), ids)),
        **{name: (step, None) for name, step in steps.items()},
        "static, dynaxx in torch": (lambda ids: in_torch(model, static, ids), None),
        "dynamic, dynaxx in torch": (lambda ids: in_torch(model, dynamic, ids), None),
    }


def empty(session):
    return {each.name: np.zeros((1, each.shape[1], 0, each.shape[3]), np.float32) for each in session.get_inputs()[1:]}


def encoder(exports, threads):
    """Return by name what runs an encoder of BERT-base's shape, with random weights."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    model = BertModel(BertConfig(max_position_embeddings=8192), add_pooling_layer=False).eval()
    forms = {
        "dense, portable": exported(exports / "bert-dense", model),
        "dense, custom": exported(exports / "bert-dense-custom", model, form="custom"),
        "window, portable": exported(exports / "bert-window", model, window=WINDOW),
        "window, custom": exported(exports / "bert-custom", model, window=WINDOW, form="custom"),
        "window of halves, portable": exported(exports / "bert-halves", model, window=HALVES),
        "window of halves, custom": exported(exports / "bert-halves-custom", model, window=HALVES, form="custom"),
    }
    ran = {name: OnnxModel(folder, threads=threads) for name, folder in forms.items()}
    alone = session_alone(forms["dense, portable"] / "model.onnx", threads)

    def windowed(window):
        def run(ids):
            with torch.no_grad(), dx.apply(model, window=window):
                return model(torch.from_numpy(ids))[0].numpy()

        return run

    return {
        ALONE: (lambda ids: alone.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0], None),
        **{name: ((lambda ids, each=each: each.encode(ids)), None) for name, each in ran.items()},
        "window, dynaxx in torch": (windowed(WINDOW), None),
        "window of halves, dynaxx in torch": (windowed(HALVES), None),
    }


def session_alone(path, threads):
    """Return a session with ONNX Runtime's own settings; `OnnxModel` leaves out a fusion that is slow."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def check(forms, ids):
    """Compare each form in ONNX Runtime with torch; return the largest difference, relative to the largest value."""
    worst = 0.0
    for name, (run, torch_run) in forms.items():
        rule = name.split(",")[0]
        twin = forms.get(f"{rule}, dynaxx in torch")
        reference = torch_run or (twin[0] if twin else None)
        if reference is not None and reference is not run:
            want = reference(ids)
            worst = max(worst, float(np.abs(run(ids) - want).max() / np.abs(want).max()))
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=("decoder", "encoder"), required=True)
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip", default="", help="names of forms to leave out, divided by semicolons")
    parser.add_argument("--exports", type=Path, help="folder whose exports are used again")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, on stdout")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as temporary:
        made = {"decoder": decoder, "encoder": encoder}[args.only](args.exports or Path(temporary), args.threads)
        vocabulary = 28_000
        rng = np.random.default_rng(0)
        difference = check(made, rng.integers(1000, vocabulary, (1, 1024)))
        forms = {name: run for name, (run, _) in made.items() if name not in args.skip.split(";")}
        ids = rng.integers(1000, vocabulary, (1, args.seqlen))
        clock = time.process_time if args.threads == 1 else time.perf_counter
        seconds = {name: [] for name in forms}
        for turn in range(args.rounds):
            for name, run in forms.items():
                begin = clock()
                run(ids)
                seconds[name].append(clock() - begin)
                print(f"round {turn + 1}, {name}: {seconds[name][-1]:.2f} s", file=sys.stderr, flush=True)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    dense, portable = medians.get(ALONE, medians.get("dense, portable")), medians.get("dense, portable")
    rows = [
        {
            "form": name,
            "tokens": args.seqlen,
            "seconds": each,
            "times faster than dense": dense / each if dense else None,
        }
        for name, each in medians.items()
    ]
    bars = []

    def bar(name, value, least, workload):
        bars.append({"name": name, "workload": workload, "bar": least, "value": value, "ok": value >= least})

    where = f"{args.seqlen:,} tokens"
    best = ("static, portable", "dynamic, custom", "window, custom", "window of halves, custom")
    for name in best:
        if dense and name in medians:
            bar(f"{name}: times faster than dense", dense / medians[name], 1.5, where)
    if ALONE in medians and "window, custom" in medians:
        bar(
            "window, custom: times faster than dense with OnnxModel's settings",
            portable / medians["window, custom"],
            1.5,
            where,
        )
    for rule in ("static", "dynamic"):
        ours, theirs = (medians.get(f"{rule}, {form}") for form in ("custom", "dynaxx in torch"))
        if ours and theirs:
            bar(f"{rule}, custom: speed relative to dynaxx in torch", theirs / ours, 0.9, where)
    load = os.getloadavg()[0]
    result = {"rows": rows, "bars": bars, "difference": difference, "threads": args.threads, "load": load}
    print(json.dumps(result) if args.json else json.dumps(result, indent=1))
    sys.exit(0 if difference < 1e-4 and all(each["ok"] for each in bars) else 1)


if __name__ == "__main__":
    main()
