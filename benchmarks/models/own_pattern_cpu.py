# SPDX-License-Identifier: Apache-2.0
"""Time the prefill of a model with real weights on a CPU: transformers' SDPA beside `dynaxx.apply(model)`, in turns.

    python benchmarks/models/own_pattern_cpu.py [MODEL] [--tokens 8192] [--turns 2] [--threads 2] [--json FILE]

fp32, text of Python's documentation, batch of one. CPU time of the process is what neighbours on the machine disturb
least. The logits of the last 256 tokens are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from pydoc_data import topics
from statistics import median

import torch

import dynaxx as dx
from dynaxx.lab.models import load_model

LAST = 256  # tokens whose logits are compared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="gemma3-270m")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model, tokenizer = load_model(given.model)
    ids = tokenizer("\n".join(topics.topics.values()), return_tensors="pt").input_ids[:, : given.tokens]
    own = model.config._attn_implementation
    taken: dict[str, list[tuple[float, float]]] = {own: [], "dynaxx": []}
    logits = {}
    for _ in range(given.turns):
        for name, times in taken.items():
            handle = dx.apply(model) if name == "dynaxx" else None
            wall, cpu = time.perf_counter(), time.process_time()
            with torch.inference_mode():
                logits[name] = model(ids, logits_to_keep=LAST, use_cache=False).logits
            times.append((time.perf_counter() - wall, time.process_time() - cpu))
            print(
                f"{name}: {times[-1][0]:.1f} s, {times[-1][1]:.1f} s of the CPU, load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
            if handle is not None:
                handle.remove()
    wall_s, cpu_s = ({name: round(median(t[i] for t in times), 2) for name, times in taken.items()} for i in (0, 1))
    apart = (logits["dynaxx"] - logits[own]).abs().max() / logits[own].abs().max()
    same = (logits["dynaxx"].argmax(-1) == logits[own].argmax(-1)).float().mean()
    row = {
        "model": given.model, "tokens": ids.shape[1], "wall_s": wall_s, "cpu_s": cpu_s,
        "speedup": round(cpu_s[own] / cpu_s["dynaxx"], 2), "apart": float(apart), "same_tokens": float(same),
    }  # fmt: skip
    print(json.dumps(row))
    if given.json:
        given.json.write_text(json.dumps({"rows": [row]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
