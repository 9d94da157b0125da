# SPDX-License-Identifier: Apache-2.0
"""Serve requests while everything goes wrong that may in production, and check that no request fails.

    OMP_NUM_THREADS=1 python benchmarks/serving/soak.py smollm2 --minutes 10  # faults, reloads, a kill switch, drift
    OMP_NUM_THREADS=1 python benchmarks/serving/soak.py smollm2 --minutes 10 --steady  # traffic, nothing happens

Prompts of mixed lengths from real text, alone, in padded batches, some with a few tokens of decoding. Exit code 1 if
any check fails: a request that failed or returned what is not finite, memory that grew by 2 % or more after warm-up,
an event that the metrics do not show, drift that was not found within its stated delay, a false alarm. Prints a table,
or JSON with --json. `--policy FILE` keeps the policy with its recorded reference for the next run.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import dynaxx as dx
from dynaxx.integrations.transformers.apply_policy import full_attention_layers, model_facts
from dynaxx.integrations.transformers.handle import Handle
from dynaxx.lab.models import LoadedModel, load_model
from dynaxx.lab.texts import load_text
from dynaxx.lab.tune.retune import record
from dynaxx.policy import Policy, policy_text, save_policy
from dynaxx.telemetry import recorder

WARM_UP = 0.2  # of the time
RELOADS = (0.22, 0.26, 0.50, 0.80)  # when a good file appears, of the time
BAD_FILES = (0.24, 0.60)
FAILURES = (0.28, 0.34)  # from, to
CALLS_PER_FAILURE = 7  # meanwhile
KILLED = (0.36, 0.40)
DRIFT = 0.42
GROWTH = 0.02  # of memory, at most
ERRORS = (  # made anew for each failure: an exception holds its traceback, and that the tensors of the call
    lambda: RuntimeError("injected"),
    lambda: torch.OutOfMemoryError("injected"),
    lambda: RuntimeError("compilation failed: injected"),
)


class Check:
    """A condition, the value found, and whether it holds."""

    def __init__(self, name: str, found: Any, passed: bool) -> None:
        self.name, self.found, self.passed = name, found, passed


class Traffic:
    """Requests from random places of a text; once `drifted`, two tokens again and again."""

    def __init__(self, loaded: LoadedModel, text: str, lengths: list[int], seed: int) -> None:
        self.model, tokenizer = loaded
        self.ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        self.lengths = lengths
        self.random = random.Random(seed)
        self.drifted = False
        self.number = 0

    def prompt(self, seqlen: int) -> torch.Tensor:
        start = self.random.randrange(len(self.ids) - seqlen)
        found = self.ids[start : start + seqlen]
        if self.drifted:
            found = found[:2].repeat(seqlen)[:seqlen]
        return found

    @torch.no_grad()
    def serve(self) -> bool:
        """Serve one request; return whether everything it returned is finite."""
        self.number += 1
        kind = self.number % 8
        if kind == 3:  # two prompts, the shorter one padded on the left
            prompts = [self.prompt(self.random.choice(self.lengths)) for _ in range(2)]
            longest = max(map(len, prompts))
            ids = torch.stack([torch.cat([each.new_zeros(longest - len(each)), each]) for each in prompts])
            mask = torch.stack([torch.arange(longest) >= longest - len(each) for each in prompts]).long()
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            out = self.model(ids, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=1)
            return bool(out.logits.isfinite().all())
        ids = self.prompt(self.random.choice(self.lengths))[None]
        if kind == 7:
            out = self.model.generate(
                ids, max_new_tokens=4, do_sample=False, pad_token_id=0, output_logits=True, return_dict_in_generate=True
            )
            return all(bool(each.isfinite().all()) for each in out.logits)
        return bool(self.model(ids, logits_to_keep=1).logits.isfinite().all())


class Soak:
    """One run: the traffic, the faults, and what was observed."""

    def __init__(self, traffic: Traffic, policy: Policy, folder: Path, args: argparse.Namespace) -> None:
        self.traffic, self.policy, self.folder = traffic, policy, folder
        self.seconds, self.requests, self.steady = args.minutes * 60, args.requests, args.steady
        self.failed: list[str] = []
        self.memory: list[tuple[float, float]] = []  # (share of the time, MB)
        self.latencies: list[float] = []
        self.tried = self.injected = 0
        self.refusals = 0
        self.killed_calls = 0.0
        self.sparse_while_killed = 0
        self.drift_started: dict[str, float] = {}
        self.drift_found: dict[str, float] = {}
        self.failing = False

    def run(self) -> list[Check]:
        file = self.folder / "policy.json"
        save_policy(self.policy, file)
        numbers = recorder()
        model = self.traffic.model
        with dx.apply(model, self.policy, name="soak") as handle:
            handle.follow(file, interval=0.2)
            handle.record(self.folder / "statistics.json", interval=5)
            handle.faults.append(self.fault)
            started, todo = time.monotonic(), [] if self.steady else self.plan(handle, file)
            while (now := self.progress(started)) < 1:
                while todo and todo[0][0] <= now:
                    todo.pop(0)[1]()
                self.one(handle, now)
            for _, act in todo:  # a machine too slow for its own schedule
                act()
            handle.wait()
            handle.kill_switch.release()
            checks = self.checks(handle, numbers)
        return checks

    def progress(self, started: float) -> float:
        """Return the share of the run that is over, 0 to 1."""
        if self.requests:
            return self.traffic.number / self.requests
        return (time.monotonic() - started) / self.seconds

    def one(self, handle: Handle, now: float) -> None:
        before = handle.stats()
        begun = time.monotonic()
        try:
            if not self.traffic.serve():
                self.failed.append(f"request {self.traffic.number}: not finite")
        except Exception as error:
            self.failed.append(f"request {self.traffic.number}: {type(error).__name__}: {error}")
        self.latencies.append(time.monotonic() - begun)
        if handle.kill_switch.engaged():
            self.sparse_while_killed += handle.stats()["sparse_calls"] - before["sparse_calls"]
        if self.traffic.number % 5 == 0:
            gc.collect()
            self.memory.append((now, resident_mb()))
        if self.traffic.drifted and not self.drift_found and self.sampled("drift_found"):
            self.drift_found = {"requests": self.traffic.number, "calls": calls(handle)}

    def plan(self, handle: Handle, file: Path) -> list[tuple[float, Any]]:
        """Schedule the events: when, as a share of the run, and what."""
        borders = itertools.cycle((self.policy.dense_below + 1, self.policy.dense_below))
        text = policy_text(self.policy)
        cut, future = text[: len(text) // 3], text.replace('"version": 1', '"version": 9', 1)

        def good() -> None:
            new = self.policy.replace(dense_below=next(borders))
            save_policy(new, file)
            self.until(lambda: handle.policy == new)

        def bad(content: str) -> None:
            before = recorder().value("dynaxx_policy_reloads_total", result="failed")
            part = file.with_suffix(".part")  # else the empty file in between would be refused, too
            part.write_text(content)
            part.replace(file)
            self.refusals += 1
            self.until(lambda: recorder().value("dynaxx_policy_reloads_total", result="failed") > before)

        def drift() -> None:
            self.traffic.drifted = True
            self.drift_started = {"requests": self.traffic.number, "calls": calls(handle)}

        def failing(value: bool) -> None:
            self.failing = value

        def killed(value: str) -> None:
            os.environ["DYNAXX_KILL"] = value

        acts = [
            *((at, good) for at in RELOADS),
            (BAD_FILES[0], lambda: bad(cut)),
            (BAD_FILES[1], lambda: bad(future)),
            (FAILURES[0], lambda: failing(True)),
            (FAILURES[1], lambda: failing(False)),
            (KILLED[0], lambda: killed("1")),
            (KILLED[1], lambda: killed("0")),
            (DRIFT, drift),
        ]
        return sorted(acts, key=lambda act: act[0])

    def until(self, done: Any) -> None:
        """Wait for the daemon thread that follows the file."""
        deadline = time.monotonic() + 10
        while not done() and time.monotonic() < deadline:
            time.sleep(0.05)

    def fault(self, layer: int) -> None:
        self.tried += self.failing
        if self.failing and self.tried % CALLS_PER_FAILURE == 0:
            self.injected += 1
            raise ERRORS[self.injected % len(ERRORS)]()

    @staticmethod
    def sampled(event: str) -> float:
        return recorder().value("dynaxx_events_total", event=event)

    def checks(self, handle: Handle, numbers: Any) -> list[Check]:
        """Return every condition that must hold."""
        growth, levels = memory_growth(self.memory)
        found = [
            Check("requests", self.traffic.number, self.traffic.number > 0),
            Check("requests that failed", self.failed[:3] or 0, not self.failed),
            Check("memory after the warm-up, growth", f"{growth:+.2%} of {levels[0]:.0f} MB", growth < GROWTH),
            Check("sparse calls", handle.stats()["sparse_calls"], handle.stats()["sparse_calls"] > 0),
            Check("guard checks", *positive(numbers.value("dynaxx_guard_checks_total", verdict="ok"))),
            Check("telemetry errors", *zero(numbers.value("dynaxx_telemetry_errors_total"))),
            Check("statistics file", *positive((self.folder / "statistics.json").exists())),
        ]
        alarms = self.sampled("drift_found")
        if self.steady:
            events = sum(self.sampled(each) for each in ("kernel_failed", "out_of_memory", "compile_failed"))
            found += [Check("false alarms of drift", *zero(alarms)), Check("failures", *zero(events))]
            found.append(Check("windows that the drift detector judged", *positive(windows(handle))))
            return found
        failures = [self.sampled(each) for each in ("kernel_failed", "out_of_memory", "compile_failed")]
        settings = self.policy.drift
        bound = (settings.confirm + 1) * settings.window
        delay = self.drift_found.get("calls", math.inf) - self.drift_started.get("calls", 0)
        reloads, refused = (numbers.value("dynaxx_policy_reloads_total", result=each) for each in ("ok", "failed"))
        return [
            *found,
            Check("policies that came into force", reloads, reloads == len(RELOADS)),
            Check("policy files refused", refused, refused == self.refusals == self.sampled("policy_refused")),
            Check(
                "failures injected, and shown",
                f"{self.injected}, {sum(failures):g}",
                sum(failures) == self.injected > 0,
            ),
            Check("kill switch on and off", *equal(self.sampled("kill_switch_on"), self.sampled("kill_switch_off"), 1)),
            Check("sparse calls while killed", *zero(self.sparse_while_killed)),
            Check("drift found after so many sampled calls of a layer", delay, delay <= bound),
            Check("  its stated delay", bound, True),
            Check("re-tuning recommended", *positive(self.sampled("retune_recommended"))),
            Check("evidence", str(handle.drift()[0]) if handle.drift() else "none", bool(handle.drift())),
        ]


def calls(handle: Handle) -> float:
    """Return the number of sampled calls of the layer that has most."""
    found = handle.statistics()
    return max((each.calls for each in found.layers), default=0) if found else 0


def windows(handle: Handle) -> int:
    found = handle.statistics()
    return sum(each.calls // handle.policy.drift.window for each in found.layers) if found else 0


def positive(value: float) -> tuple[float, bool]:
    return value, value > 0


def zero(value: float) -> tuple[float, bool]:
    return value, value == 0


def equal(*values: float, least: float = 0) -> tuple[str, bool]:
    return " = ".join(f"{each:g}" for each in values), len(set(values)) == 1 and values[0] >= least


def resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


def memory_growth(samples: list[tuple[float, float]]) -> tuple[float, tuple[float, float]]:
    """Return the growth of memory from the first fifth after the warm-up to the last, and both medians."""
    after = [mb for at, mb in samples if at >= WARM_UP]
    part = max(1, len(after) // 5)
    if not after:
        return 0.0, (resident_mb(), resident_mb())
    first, last = statistics.median(after[:part]), statistics.median(after[-part:])
    return last / first - 1, (first, last)


def make_policy(loaded: LoadedModel, text: str, args: argparse.Namespace) -> Policy:
    """Build a policy with a guard that samples every call and a reference recorded on the same traffic."""
    facts = model_facts(loaded.model)
    layers = [layer for layer in full_attention_layers(loaded.model) if layer >= min(2, facts.layers - 1)]
    policy = Policy(
        model=facts,
        block_size=32,
        rules=(dx.Rule.of(dx.Sink(4) | dx.SlidingWindow(64) | dx.TopK(0.2), layers=layers),),
        guard={"sample": args.sample, "rows": 8, "kl_sample": 0.02, "action": "count"},
        drift={"window": args.window},
    )
    reference = record(policy, loaded, text, requests=args.reference, lengths=args.lengths, seed=args.seed + 1)
    return policy.replace(reference=reference)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--requests", type=int, help="run so many requests, however long they take")
    parser.add_argument("--steady", action="store_true", help="no reloads, no faults, no drift: no alarm may come")
    parser.add_argument("--text", default="pydoc")
    parser.add_argument("--lengths", type=lambda text: [int(each) for each in text.split(",")], default=[128, 192, 256])
    parser.add_argument("--sample", type=float, default=1.0, help="share of calls that the guard looks at")
    parser.add_argument("--window", type=int, default=24, help="sampled calls of a layer per drift test")
    parser.add_argument("--reference", type=int, default=96, help="requests behind the reference")
    parser.add_argument("--policy", type=Path, help="use this policy, or write it if it is not there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    loaded, text = load_model(args.model), load_text(args.text)
    if args.policy is not None and args.policy.exists():
        policy = dx.load_policy(args.policy).replace(drift={"window": args.window})
    else:
        print("recording the reference", file=sys.stderr)
        policy = make_policy(loaded, text, args)
        if args.policy is not None:
            save_policy(policy, args.policy)
    with tempfile.TemporaryDirectory() as folder:
        traffic = Traffic(loaded, text, args.lengths, args.seed)
        soak = Soak(traffic, policy, Path(folder), args)
        checks = soak.run()
    passed = all(check.passed for check in checks)
    seconds = sorted(soak.latencies)
    result = {
        "model": args.model,
        "minutes": args.minutes,
        "steady": args.steady,
        "passed": passed,
        "checks": [vars(check) for check in checks],
        "seconds_median": statistics.median(seconds),
        "seconds_p95": seconds[int(0.95 * (len(seconds) - 1))],
        "memory_mb": [(round(at, 3), round(mb, 1)) for at, mb in soak.memory],
    }
    if args.json:
        print(json.dumps(result))
    else:
        for check in checks:
            print(f"{'pass' if check.passed else 'FAIL'}  {check.name}: {check.found}")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
