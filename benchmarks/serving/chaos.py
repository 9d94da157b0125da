# SPDX-License-Identifier: Apache-2.0
"""Serve from threads and forked workers under faults of files, signals, disk and clock. No request may fail.

    OMP_NUM_THREADS=1 python benchmarks/serving/chaos.py --minutes 20

A tiny random Llama serves prompts of random lengths from three threads. Meanwhile policies are replaced by good and
by hostile files, workers are forked and end, the kill file lies behind a path that cannot be read, snapshot files are
cut short and their disk is full, the clock jumps, and signals arrive. Every answer must be finite, and where the
policy is off for a request it must be the dense model's. Prints a table, or JSON with --json; exit code 1 if a check
fails: a failed or wrong request, a hang, memory that grew, or an event that the metrics do not show.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import dynaxx as dx
from dynaxx.integrations.transformers import model_facts
from dynaxx.policy import Policy, policy_text
from dynaxx.policy.kill import FILE_ENVIRONMENT
from dynaxx.telemetry import recorder
from dynaxx.telemetry.files import SnapshotFile

HANG = 60.0  # seconds without an answer
GROWTH = 0.10  # of memory after the first fifth of the time
MUST_SHOW = (  # a metric and one of its labels
    ("dynaxx_policy_reloads_total", "ok"),
    ("dynaxx_policy_reloads_total", "failed"),
    ("dynaxx_dense_calls_total", "kill switch"),
    ("dynaxx_dense_calls_total", "request asked for dense"),
)
HOSTILE = (
    b"",
    b"{",
    b"\x00" * 1000,
    b"[" * 100_000,
    b'{"format": "dynaxx-policy", "version": 1e400}',
    b'{"format": "dynaxx-policy", "version": 1, "model": {"layers": 3000000}}',
    b'{"rules": [{"pattern": {"random_blocks": 1' + b"0" * 5000 + b"}}]}",
    "\ud800".encode("utf-8", "surrogatepass"),
)


class Chaos:
    """A serving model, the faults that it meets, and what the run observes."""

    def __init__(self, folder: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.random, self.folder, self.seen = random.Random(seed), folder, Counter[str]()
        config = LlamaConfig(
            vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=1024,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config).eval()
        self.inputs = [torch.randint(1, 64, (1, n)) for n in (33, 64, 97, 150, 260, 400)]
        with torch.no_grad():
            self.dense = [self.model(ids, use_cache=False).logits for ids in self.inputs]
        rules = [
            dx.Rule.of(dx.SlidingWindow(32) | dx.Sink(4), block_size=16),
            dx.Rule.of(dx.SlidingWindow(16) | dx.TopK(0.3), block_size=16),
            dx.Rule.of(dx.Causal(), block_size=32),
        ]
        self.policies = [Policy(model=model_facts(self.model), rules=(rule,)) for rule in rules]
        self.stop, self.answered, self.problems = threading.Event(), time.monotonic(), list[str]()

    def serve(self, number: int) -> None:
        """Answer requests until the end; one in four asks for dense."""
        chosen = random.Random(number)
        while not self.stop.is_set():
            self.answer(chosen)

    def answer(self, chosen: random.Random) -> None:
        """Answer one request, and check the answer."""
        at, dense = chosen.randrange(len(self.inputs)), chosen.random() < 0.25
        try:
            with torch.no_grad(), self.handle.request(f"id {chosen.random()}", sparse=False if dense else None):
                out = self.model(self.inputs[at], use_cache=False).logits
            good = bool(out.isfinite().all())
            if dense:
                good &= torch.allclose(out, self.dense[at], atol=1e-4)
            self.seen["requests"] += 1
            if not good:
                self.problems.append(f"a wrong answer to a prompt of {self.inputs[at].shape[1]} tokens")
        except Exception as error:
            self.problems.append(f"a request failed: {type(error).__name__}: {error}")
        self.answered = time.monotonic()

    def run(self, minutes: float) -> dict[str, Any]:
        """Serve for so long with everything going on; return what was seen."""
        file = self.folder / "policy.json"
        file.write_text(policy_text(self.policies[0]))
        self.handle = dx.apply(self.model, self.policies[0])
        self.handle.follow(file, interval=0.05)
        self.handle.kill_switch.on_signals()
        full = Path("/dev/full")
        snapshots = [SnapshotFile(self.folder / "snapshot.json", interval=0.05)]
        begun, process, sizes = time.monotonic(), psutil.Process(), list[float]()
        threads = [threading.Thread(target=self.serve, args=(i,), daemon=True) for i in range(3)]
        for thread in threads:
            thread.start()
        events = [self.good_policy, self.hostile_policy, self.no_policy, self.fork, self.kill_file, self.signals,
                  self.cut_snapshot, self.clock]  # fmt: skip
        while time.monotonic() - begun < minutes * 60:
            event = self.random.choice(events)
            self.seen[event.__name__] += 1
            event(file)
            if full.exists() and self.random.random() < 0.1:
                self.full_disk(full)
            if time.monotonic() - begun > minutes * 12:
                sizes.append(process.memory_info().rss)
            if time.monotonic() - self.answered > HANG:
                self.problems.append("a hang")
                faulthandler.dump_traceback(file=sys.stderr)
                break
            time.sleep(0.05)
        self.stop.set()
        for thread in threads:
            thread.join(HANG)
            if thread.is_alive():
                self.problems.append("a thread does not end")
        for each in snapshots:
            each.close()
        series = [(each.metric.name, *each.labels) for each in recorder().snapshot() if each.value]
        for name, label in MUST_SHOW:
            if not any(each[0] == name and label in each for each in series):
                self.problems.append(f"the metrics do not show {name} {label}")
        self.handle.remove()
        first, last = (sum(part) / max(1, len(part)) for part in (sizes[: len(sizes) // 4], sizes[-len(sizes) // 4 :]))
        growth = last / first - 1 if first else 0.0
        if growth > GROWTH:
            self.problems.append(f"memory grew by {growth:.1%}")
        return {"minutes": minutes, "seen": dict(self.seen), "growth": round(growth, 4), "problems": self.problems[:20]}

    def good_policy(self, file: Path) -> None:
        """Replace the policy by another."""
        new = file.with_suffix(".new")
        new.write_text(policy_text(self.random.choice(self.policies)))
        os.replace(new, file)

    def hostile_policy(self, file: Path) -> None:
        """Replace the policy by something that is none, cut short or a FIFO."""
        file.unlink(missing_ok=True)
        if self.random.random() < 0.2:
            os.mkfifo(file)
        elif self.random.random() < 0.3:
            file.write_text(policy_text(self.policies[0])[: self.random.randrange(200)])
        else:
            file.write_bytes(self.random.choice(HOSTILE))

    def no_policy(self, file: Path) -> None:
        """Take the file away, or put a folder in its place."""
        file.unlink(missing_ok=True)
        if self.random.random() < 0.5:
            file.mkdir()
            time.sleep(0.1)
            file.rmdir()

    def fork(self, _: Path) -> None:
        """Fork a worker that answers and ends; it must end by itself."""
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                torch.set_num_threads(1)
                self.problems = []
                for _ in range(3):
                    self.answer(random.Random(os.getpid()))
                code = len(self.problems)
            os._exit(code)
        begun = time.monotonic()
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            if time.monotonic() - begun > HANG:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                self.problems.append("a forked worker hung")
                return
            time.sleep(0.01)
        if status:
            self.problems.append(f"a forked worker ended with status {status}")

    def kill_file(self, file: Path) -> None:
        """Engage the switch by a file, or by a path that nobody can look up; then release it."""
        link = self.folder / "loop"
        with contextlib.suppress(FileExistsError):
            link.symlink_to(link)
        there = self.folder / "kill"
        there.touch()
        os.environ[FILE_ENVIRONMENT] = str(self.random.choice([there, link / "kill", file / "x" / ("y" * 300)]))
        time.sleep(0.05)
        engaged = self.handle.kill_switch.engaged()
        if engaged is None and not os.environ[FILE_ENVIRONMENT].endswith("y"):
            self.problems.append(f"the kill file {os.environ[FILE_ENVIRONMENT]} did not engage the switch")
        os.environ.pop(FILE_ENVIRONMENT)

    def signals(self, _: Path) -> None:
        """Engage and release the switch by signals."""
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGUSR2)

    def cut_snapshot(self, _: Path) -> None:
        """Cut the snapshot file short while it is written."""
        with contextlib.suppress(OSError):
            path = self.folder / "snapshot.json"
            os.truncate(path, path.stat().st_size // 2)

    def full_disk(self, full: Path) -> None:
        """Write a snapshot where no byte fits."""
        self.seen["full_disk"] += 1
        with contextlib.suppress(OSError):
            from dynaxx.telemetry.files import write_snapshot
            from dynaxx.telemetry.snapshot import Snapshot

            write_snapshot(full / "snapshot.json", Snapshot.of(recorder()))

    def clock(self, _: Path) -> None:
        """Let the clock of this process jump, for a moment."""
        real, jump = time.time, self.random.choice([-1e6, 1e6, 3e9])
        time.time = lambda: real() + jump
        time.sleep(0.05)
        time.time = real


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = Chaos(Path(folder), asked.seed).run(asked.minutes)
    if asked.json:
        print(json.dumps(found))
    else:
        for name, count in sorted(found["seen"].items()):
            print(f"{name:16} {count:>8,}")
        print(f"memory           {found['growth']:>8.1%}")
        print("problems         " + ("\n                 ".join(found["problems"]) or "none"))
    sys.exit(bool(found["problems"]))


if __name__ == "__main__":
    main()
