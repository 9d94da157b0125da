# SPDX-License-Identifier: Apache-2.0
"""Invented results in the form that each tool writes, for the tests of the report."""

import base64
import json
import math
from pathlib import Path

from dynaxx.lab.about import policy_digest
from dynaxx.lab.validate.check import Check
from dynaxx.lab.validate.result import (
    LogitErrors,
    Perplexities,
    Repetition,
    SpeedRow,
    TaskScore,
    ValidationResult,
    slowdown_check,
)
from dynaxx.policy import Policy

LAYERS, HEADS = 30, 9
MODEL, TEXT = "0123456789abcdef", "fedcba9876543210"  # digests


def profile() -> dict:
    lengths = []
    for seqlen, attention, rest in ((512, 0.03, 0.9), (2048, 0.5, 3.1), (4096, 2.0, 6.3), (8192, 8.1, 12.8)):
        total = attention + rest
        lengths.append(
            {
                "seqlen": seqlen,
                "seconds": {
                    "attention": attention,
                    "projections": 0.33 * rest,
                    "mlp": 0.55 * rest,
                    "rest": 0.12 * rest,
                    "total": total,
                },
                "attention_share": attention / total,
                "attention_gflops_per_s": 92.0,
                "of_gemm_ceiling": 0.62,
                "max_speedup": total / rest,
            }
        )
    versions = {"dynaxx": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0"}
    return {
        "about": {"model": MODEL, "text": TEXT},
        "command": "dynaxx profile smollm2 --out run",
        "machine": {
            "system": "Linux x86_64",
            "cpu": "AMD EPYC 9R14",
            "cores": 2,
            "memory_gib": 7.6,
            "versions": versions,
        },
        "model": "SmolLM2-135M-Instruct",
        "ceilings": {"gemm_gflops": 148.0, "copy_gbs": 21.4},
        "lengths": lengths,
        "verdict": "attention's share of prefill is 3% at 512: not worth it; 39% at 8,192: up to 1.6x",
        "worth_it": True,
        "savings": [],
    }


def analysis(layers: int = LAYERS, heads: int = HEADS, size: int = 64) -> dict:
    found = []
    for layer in range(layers):
        for head in range(heads):
            width = 1 + (layer * 7 + head * 5) % 23
            codes = bytes(
                0 if x > y else max(1, min(255, int(225 * math.exp(-(y - x) / width)) + (190 if x == 0 else 0)))
                for y in range(size)
                for x in range(size)
            )
            kind = ("local", "selected", "broad", "lines")[(layer + head) % 4]
            found.append(
                {
                    "layer": layer,
                    "head": head,
                    "mass_by_distance": {"edges": [0, 1, 2], "mass": [0.4, 0.6]},
                    "median_distance": 17,
                    "sink_mass": 0.3,
                    "local_mass": 0.4,
                    "vertical_mass": 0.1,
                    "slash_mass": 0.05,
                    "entropy": 2.5,
                    "recall": {"streaming": [0.7, 0.9], "oracle": [0.8, 0.97]},
                    "recommended": {
                        "kind": kind,
                        "attention": "Sink(4) | SlidingWindow(256)",
                        "reason": f"{kind}: 97% of the mass within 256 tokens",
                        "density": 1.0 if kind == "broad" else 0.18,
                        "recall": 0.97,
                    },
                    "heatmap": {"size": size, "low": 1e-5, "scale": "log10", "data": base64.b64encode(codes).decode()},
                }
            )
    rule = lambda *recall: {"attention": ["a", "b", "c"], "density": [0.1, 0.3, 0.5], "recall": list(recall)}
    return {
        "about": {"model": MODEL, "text": TEXT},
        "command": "dynaxx analyze smollm2 --out run",
        "model": "SmolLM2-135M-Instruct",
        "tokens": 4096,
        "block_size": 64,
        "budgets": [0.1, 0.3, 0.5],
        "rules": {
            "streaming": rule(0.71, 0.88, 0.93),
            "mean_pool": rule(0.74, 0.88, 0.94),
            "min_max": rule(0.74, 0.9, 0.957),
            "mean_query": rule(0.74, 0.885, 0.942),
            "oracle": rule(0.79, 0.93, 0.976),
        },
        "heads": found,
        "summary": {
            "heads": len(found),
            "kinds": {"local": 94, "broad": 80, "selected": 71, "lines": 25},
            "mean_recommended_density": 0.48,
            "target_recall": 0.95,
            "mean_sink_mass": 0.27,
            "mean_local_mass": 0.41,
        },
    }


def about(policy_document: dict, text: str = TEXT) -> dict:
    return {"model": MODEL, "text": text, "policy": policy_digest(Policy(**policy_document))}


def _trial(density: float, change: float) -> dict:
    passed = change + 2 * 0.0004 <= 0.01
    return {"density": density, "perplexity": 14.49 * (1 + change), "ratio": 1 + change, "error": 0.0004} | {
        "passed": passed,
        "decided": True,
    }


def tuning(verdict: str = "sparse", ended: str = "done", of: dict | None = None) -> dict:
    """Return the result of a search with this verdict, about a policy (by default the one of that verdict)."""
    tuned = [_trial(0.5, 0.0003), _trial(0.3, 0.0021), _trial(0.21, 0.006), _trial(0.17, 0.0131), _trial(0.13, 0.031)]
    uniform = [
        _trial(0.5, 0.0016),
        _trial(0.4, 0.0048),
        _trial(0.33, 0.0091),
        _trial(0.27, 0.0163),
        _trial(0.15, 0.101),
    ]
    if verdict == "undecided":
        tuned, uniform = [_trial(0.239, 0.0105) | {"decided": False}], []
    if verdict == "dense":
        tuned, uniform = [_trial(0.9, 0.021)], []
    found = {
        "sparse": ("21.0% of the blocks keep perplexity within 1.00% at 4,096 tokens", ""),
        "dense": ("nothing sparse stays within 1.00%: at 90% of the blocks perplexity rises by 2.10%", ""),
        "undecided": (
            "time ended after 1 trial; no density is known to pass or to fail",
            "Run the same command with --time-budget 15m: it continues, and on this machine now its search would end.",
        ),
    }
    if ended == "interrupted":
        found["undecided"] = (
            "the search was stopped after 1 trial; no density is known to pass or to fail",
            "Run the same command again: it continues.",
        )
    if verdict == "sparse" and ended != "done":
        found["sparse"] = (
            found["sparse"][0],
            "Fewer blocks may do: the same command with --time-budget 15m continues.",
        )
    crossover = [(64, 0.02, 0.0204), (256, 0.06, 0.0602), (1024, 0.31, 0.29), (4096, 2.1, 1.62), (8192, 6.4, 4.0)]
    return {
        "model": "SmolLM2-135M-Instruct",
        "tokens": 4096,
        "tolerance": 0.01,
        "dense_perplexity": 14.49,
        "uniform": uniform,
        "tuned": tuned,
        "chosen": tuned[2] if verdict == "sparse" else None,
        "best_uniform_density": 0.33 if verdict == "sparse" else None,
        "crossover": [
            {
                "seqlen": n,
                "dense_seconds": d,
                "sparse_seconds": s,
                "low": 0.9 * d / s,
                "high": 1.1 * d / s,
                "busy": False,
            }
            for n, d, s in (crossover if verdict == "sparse" else ())
        ],
        "sparse_from": 563 if verdict == "sparse" else None,
        "ended": ended,
        "verdict": verdict,
        "why": found[verdict][0],
        "advice": found[verdict][1],
        "busy": False,
        "about": about(of or policy(verdict == "sparse")),
        "layers": list(range(LAYERS)),
        "budgets": []
        if verdict != "sparse"
        else [[((layer * 13 + head * 29) % 17) / 40 for head in range(HEADS)] for layer in range(LAYERS)],
        "seconds": 310.0,
        "command": "dynaxx tune smollm2 --out run",
    }


def policy(sparse: bool = True) -> dict:
    return {
        "format": "dynaxx.policy",
        "version": 1,
        "model": {"model_type": "llama", "layers": LAYERS, "q_heads": HEADS, "kv_heads": 3, "head_dim": 64},
        "block_size": 64,
        "dense_below": 512,
        "sparse_from": 563,
        "rules": [{"layers": [0], "heads": "all", "attention": {"kind": "full"}}] * sparse,
        "tolerances": {"perplexity_ratio": 1.01, "kl": None},
        "measured_on": {"device": "cpu", "hardware": "AMD EPYC 9R14", "versions": {"torch": "2.13.0"}},
        "evidence": [],
    }


def validation(
    passed: bool = True,
    speedup: float = 1.6,
    spread: float = 0.05,
    of: dict | None = None,
    whole: bool = True,
    pairs: int = 5,
) -> dict:
    """Return a validation about a policy; `spread` is half the interval of the speed-ups of so many pairs of runs.

    One that is not whole had no time for tasks and for more than the shortest prompt.
    """
    checks = [
        Check("perplexity_ratio", 1.006, 1.01, True, "", "held-out text of the sample"),
        Check("task_logprob_drop", 0.02, 0.1, True, "nats", "the task 'needle'"),
        Check("repetition_increase", 0.0 if passed else 0.31, 0.1, passed),
    ]
    times = [(640, 0.9, 0.88), (2048, 3.6, 3.2), (4096, 8.3, 6.3), (8192, 20.9, 20.9 / speedup)]
    speed = [
        SpeedRow(n, d, s, d / s, pairs, 900.0 + n / 8, 880.0 + n / 8, d / s - spread, d / s + spread, 2 * d, 2 * s)
        for n, d, s in times[: len(times) if whole else 1]
    ]
    checks.append(slowdown_check(speed, 1.03))
    found = ValidationResult(
        passed=all(check.passed for check in checks),
        checks=tuple(checks),
        logits=LogitErrors(3.1, 0.11, 0.973, 0.0041),
        perplexity=Perplexities(15.02, 15.11, 1.006, 1.007, 2.7094, 2.7154, 12285),
        tasks=(TaskScore("needle", 0.92, 0.91, -0.2, -0.22, 0.02, 0.01),) * whole,
        repetition=Repetition(0.04, 0.04, 0.0 if passed else 0.31, 0.01, 0.9),
        speed=tuple(speed),
        density=0.223,
        layer_calls={"sparse_calls": 90, "own_pattern_calls": 0},
        windows=3,
        window_tokens=4096,
        seed=0,
        sparse_from=563,
        skipped=() if whole else ("retrieval tasks", "the speed at 2,048 tokens", "the speed at 8,192 tokens"),
    )
    document = json.loads(json.dumps(found.to_dict()))
    command = "dynaxx validate smollm2 run/policy.json"
    return document | {"model": "SmolLM2-135M-Instruct", "about": about(of or policy()), "command": command}


DOCUMENTS = {
    "profile": profile,
    "analysis": analysis,
    "tuning": tuning,
    "policy": policy,
    "validation": validation,
}


def write_documents(folder: Path, names: object = tuple(DOCUMENTS), **replaced: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:  # type: ignore[attr-defined]
        (folder / f"{name}.json").write_text(json.dumps(replaced.get(name) or DOCUMENTS[name]()))
    return folder
