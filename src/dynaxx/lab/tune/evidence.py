# SPDX-License-Identifier: Apache-2.0
"""The evidence of a policy: the machine, the command, and the figures."""

from __future__ import annotations

import dataclasses

from dynaxx.lab.machine import machine_facts
from dynaxx.lab.tune.crossover import HYSTERESIS
from dynaxx.lab.tune.decode import DecodeResult, decode_rules
from dynaxx.lab.tune.result import TuneResult
from dynaxx.policy import Evidence, MeasuredOn

RATIO_ON = "perplexity_ratio on "  # and a kind of text: name of a figure in the evidence


def with_evidence(result: TuneResult, border: int, device: str, dtype: str, longest: int) -> TuneResult:
    """Return the result with a policy that contains its border, its machine and its evidence.

    Unless the verdict is "sparse", the policy has no rules for prompts and is dense everywhere. Borders are at most
    `longest`, the model's context; prompts of the length that was tuned on run sparse. `border` is the shortest length
    from which the policy is faster, 0 if there is none.
    """
    machine = machine_facts()
    runs_sparse = result.verdict == "sparse"
    start = min(int(border * HYSTERESIS), longest, max(border, result.tokens))
    figures: dict[str, bool | int | float | str | None] = {
        "verdict": result.verdict,
        "ended": result.ended,
        "busy": result.busy,
        "tokens": result.tokens,
        "scorer": result.scorer,
        "dense_perplexity": result.dense_perplexity,
        "best_uniform_density": result.best_uniform_density,
    }
    if result.chosen is not None:
        figures |= {"density": result.chosen.density, "perplexity_ratio": result.chosen.ratio}
        figures |= {"perplexity_ratio_error": result.chosen.error}
        for kind in result.chosen.kinds:
            figures[RATIO_ON + kind.kind] = kind.ratio
        for task in result.chosen.tasks:
            figures[f"nats lost on {task.task}"] = task.drop if task.informative else None
    for left_out in result.held_out:
        figures[f"{RATIO_ON}{left_out.kind}, tuned without it"] = left_out.ratio
    policy = result.policy.replace(
        rules=result.policy.rules if runs_sparse else (),
        dense_below=border,
        sparse_from=max(border, start),
        measured_on=MeasuredOn(
            device=device,
            hardware=machine.gpus[0] if device == "cuda" else machine.cpu,
            threads=machine.threads,
            dtype=dtype,
            versions=machine.versions,
        ),
        evidence=(Evidence(what="tuning on the calibration part of the text", command=result.command, values=figures),),
    )
    return dataclasses.replace(result, policy=policy)


def with_decode_rules(result: TuneResult, found: DecodeResult, page_size: int, command: str) -> TuneResult:
    """Return the result with the decoding measurements, and with decode rules if they keep perplexity and save time."""
    policy = result.policy
    if found.share is not None and found.dense_below is not None:
        best = next(trial for trial in found.trials if trial.share == found.share)
        figures: dict[str, bool | int | float | str | None] = {
            "share": found.share,
            "perplexity_ratio": best.ratio,
            "perplexity_ratio_error": best.error,
            "generated_perplexity_ratio": best.written_ratio,
            "generated_perplexity_ratio_error": best.written_error,
        }
        group = policy.model.q_heads // policy.model.kv_heads
        evidence = Evidence(
            what="decoding the end of the same texts, and ends that the model wrote", command=command, values=figures
        )
        policy = policy.replace(
            rules=(*policy.rules, *decode_rules(found.shares, result.layers, group, page_size)),
            decode_dense_below=found.dense_below,
            evidence=(*policy.evidence, evidence),
        )
    return dataclasses.replace(result, policy=policy, decode=found)
