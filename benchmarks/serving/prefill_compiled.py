# SPDX-License-Identifier: Apache-2.0
"""Time the prefill of a small model in eager mode, compiled, and as captured CUDA graphs, dense and under a policy.

    python benchmarks/serving/prefill_compiled.py [--lengths 1024,2048,4096,8192] [--turns 9] [--only graph]
        [--json FILE]

SmolLM2-135M's shape with random weights, bf16, on a GPU. A compiled model is one graph without breaks (`fullgraph`). A
captured graph serves one length, or every prompt up to it: shorter prompts are padded on the right, and the logits of
their last token are taken. Before anything is timed, the logits of each way must be those of the eager model, up to
rounding. `equal` says whether those of a prompt of the whole length are equal bit by bit.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import transformers
from policy_cost import RULE, make_model, twin

import dynaxx as dx
from dynaxx.integrations.transformers.apply_policy import model_facts
from dynaxx.lab.machine import need_gpu

WAYS = ("eager", "compiled", "graph")
MOST_APART = 0.1  # standard deviations of the logits; products of other lengths round otherwise in bf16


class CapturedPrompt:
    """A captured forward pass over prompts of up to `length` tokens."""

    def __init__(self, model: Any, length: int) -> None:
        self.ids = torch.zeros(1, length, dtype=torch.long, device="cuda")
        self.last = torch.full((1,), length - 1, device="cuda")
        run = lambda: model(self.ids, logits_to_keep=self.last, use_cache=True).logits
        for _ in range(3):  # compiles, and records the launches of layers
            run()
        self.equal = False
        self.graph = torch.cuda.CUDAGraph()
        # While a graph is captured, transformers would give SDPA a mask instead of its faster causal kernel.
        with patch("transformers.masking_utils.is_tracing", lambda *given: False), torch.cuda.graph(self.graph):
            self.logits = run()

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of the prompt's last token, valid until the next call."""
        self.ids[:, : ids.shape[1]].copy_(ids)
        self.last.fill_(ids.shape[1] - 1)
        self.graph.replay()
        return self.logits


def ways_of(model: Any, length: int, only: str | None) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the ways to run a model on a prompt, each checked against eager mode."""
    eager = lambda ids: model(ids, logits_to_keep=1, use_cache=True).logits
    found: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"eager": eager}
    ids = torch.randint(0, 49152, (1, length), device="cuda")
    if only in (None, "compiled"):
        torch.compiler.reset()
        compiled = torch.compile(model, fullgraph=True, dynamic=False)
        found["compiled"] = lambda ids: compiled(ids, logits_to_keep=1, use_cache=False).logits
        compare("compiled", found["compiled"](ids), eager(ids), 5 * MOST_APART)  # its fused operations round otherwise
    if only in (None, "graph"):
        graph = found["graph"] = CapturedPrompt(model, length)
        part = ids[:, : length - 128]  # the last block has no padding, whose queries would take part in its choice
        for prompt in (part, ids):
            compare("captured", graph(prompt), eager(prompt))
        graph.equal = bool(torch.equal(graph(ids), eager(ids)))
    return found


def compare(way: str, logits: torch.Tensor, wanted: torch.Tensor, most: float = MOST_APART) -> None:
    """Stop if logits differ from those of eager mode by more than `most` standard deviations."""
    apart = float((logits - wanted).abs().max() / wanted.float().std())
    print(f"{way}, {logits.shape}: {apart:.4f} standard deviations from eager mode", flush=True)
    if apart > most:
        raise SystemExit(f"error: the logits of a {way} prompt differ by {apart:.3f} standard deviations")


def time_ms(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3


@torch.inference_mode()
def rows_of(models: dict[str, Any], length: int, turns: int, only: str | None) -> list[dict[str, Any]]:
    """Return one row per way: milliseconds dense and under the policy, in turns."""
    runs = {name: ways_of(model, length, only) for name, model in models.items()}
    ids = torch.randint(0, 49152, (1, length), device="cuda")
    taken: dict[tuple[str, str], list[float]] = {}
    for turn in range(turns + 2):
        for name, ways in runs.items():
            for way, run in ways.items():
                ms = time_ms(lambda run=run: run(ids))  # type: ignore[misc]
                if turn >= 2:
                    taken.setdefault((way, name), []).append(ms)
    rows = []
    for way in runs["dense"]:
        dense, sparse = (round(median(taken[way, name]), 2) for name in ("dense", "policy"))
        speedup = round(dense / sparse, 2)
        equal = {name: getattr(ways[way], "equal", None) for name, ways in runs.items()}
        row = {"tokens": length, "way": way, "dense_ms": dense, "policy_ms": sparse, "speedup": speedup}
        rows.append({**row, "equal": equal} if way == "graph" else row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="1024,2048,4096,8192")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--only", choices=WAYS[1:], help="beside eager mode, by default both")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    need_gpu()
    rows: list[dict[str, Any]] = []
    facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "transformers": transformers.__version__}
    models = {"dense": make_model()}
    models["policy"] = twin(models["dense"])
    known = model_facts(models["policy"])
    policy = dx.Policy(model=known, block_size=64, dense_below=512, rules=[dx.Rule.of(RULE)])
    with dx.apply(models["policy"], policy):
        for length in map(int, given.lengths.split(",")):
            for row in rows_of(models, length, given.turns, given.only):
                rows.append(row)
                print(json.dumps(row), flush=True)
            if given.json:
                given.json.write_text(json.dumps({**facts, "rule": repr(RULE), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
