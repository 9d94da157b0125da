# SPDX-License-Identifier: Apache-2.0
"""Send many requests at a time to a vLLM server for some minutes, and watch its errors and its memory.

    DYNAXX_POLICY=policy.json vllm serve MODEL --attention-backend CUSTOM --served-model-name soak --port 8019
    python benchmarks/serving/vllm_soak.py --url http://localhost:8019 --model soak --minutes 10 --pid PID

Prompts are random tokens, from one token to `--longest`; half of them begin with a prefix that others share, and one
request in ten is cut off by the client while the server streams its answer. Prints a line every 10 s, and at the end
whether every other request was answered, by how much the process tree of `--pid` grew in the second half, and the
memory of both the tree and the first visible GPU over time. Exits with 1 if a request failed, or memory grew by more
than `--most-growth` MiB.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import subprocess
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable
from typing import Any

PREFIX = 700  # tokens that half of the prompts share


class Client(threading.Thread):
    """A thread that sends one request after another until a deadline."""

    def __init__(self, arguments: argparse.Namespace, number: int, until: float, counts: Counter[str]) -> None:
        super().__init__(daemon=True)
        self.arguments, self.until, self.counts = arguments, until, counts
        self.draw = random.Random(number)
        self.errors: list[str] = []

    def run(self) -> None:
        """Send requests."""
        while time.monotonic() < self.until:
            try:
                self.counts[self.request()] += 1
            except (OSError, ValueError, http.client.HTTPException) as error:
                self.counts["failed"] += 1
                self.errors.append(f"{type(error).__name__}: {error}")

    def request(self) -> str:
        """Send one; returns what became of it.

        Raises:
            ValueError: another status than 200, or another number of tokens than asked for.
            OSError, http.client.HTTPException: no connection, or one that broke.
        """
        draw, longest, vocabulary = self.draw, self.arguments.longest, self.arguments.vocabulary
        tokens = int(longest ** draw.random()) or 1
        shared = draw.random() < 0.5
        prompt = [7 + at % (vocabulary - 10) for at in range(PREFIX if shared and tokens > PREFIX else 0)]
        prompt += [draw.randrange(3, vocabulary - 1) for _ in range(tokens - len(prompt))]
        wanted, cut = draw.randrange(2, 33), draw.random() < 0.1
        body = {"model": self.arguments.model, "prompt": prompt, "max_tokens": wanted, "ignore_eos": True,
                "temperature": 0, "stream": cut}  # fmt: skip
        url = urllib.parse.urlsplit(self.arguments.url)
        connection = http.client.HTTPConnection(url.hostname or "localhost", url.port, timeout=self.arguments.timeout)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise ValueError(f"status {response.status}: {response.read(300)!r}")
            if cut:
                response.readline()
                return "cut off"
            made = json.loads(response.read())["usage"]["completion_tokens"]
            if made != wanted:
                raise ValueError(f"{made} tokens instead of {wanted}")
            return "answered"
        finally:
            connection.close()


def resident(pid: int) -> float:
    """MiB that a process and its children hold; 0 without a process."""
    if not pid:
        return 0.0
    import psutil

    process = psutil.Process(pid)
    tree = [process, *process.children(recursive=True)]
    return float(sum(each.memory_info().rss for each in tree if each.is_running())) / 2**20


def used_gpu_memory() -> int:
    """MiB in use on the first visible GPU; 0 without a GPU."""
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", f"--id={card}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return int(found.stdout.strip() or 0)


def soak(arguments: argparse.Namespace, progress: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
    """Run all clients; returns what happened. `progress` gets what happened so far, every 10 s."""
    begun, counts = time.monotonic(), Counter[str]()
    until = begun + 60 * arguments.minutes
    clients = [Client(arguments, at, until, counts) for at in range(arguments.concurrent)]
    for client in clients:
        client.start()
    memory, gpu = list[float](), list[int]()

    def so_far() -> dict[str, Any]:
        half, gpu_half = (each[len(each) // 2 :] or [0] for each in (memory, gpu))
        errors = [error for client in clients for error in client.errors]
        return {"seconds": round(time.monotonic() - begun, 1), **counts, "grew_mib": round(half[-1] - half[0], 1),
                "gpu_grew_mib": gpu_half[-1] - gpu_half[0], "errors": errors[:5],
                "memory_mib": [round(each) for each in memory], "gpu_mib": gpu}  # fmt: skip

    while any(client.is_alive() for client in clients):
        time.sleep(min(10.0, max(0.2, 6 * arguments.minutes)))
        memory.append(resident(arguments.pid))
        gpu.append(used_gpu_memory())
        sizes = f"{memory[-1]:,.0f} MiB, GPU {gpu[-1]:,} MiB"
        print(f"{time.monotonic() - begun:6.0f} s  {dict(counts)}  {sizes}", flush=True)
        if progress is not None:
            progress(so_far())
    return so_far()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--model", required=True, help="its served name")
    parser.add_argument("--concurrent", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--longest", type=int, default=8000, help="tokens of a prompt, at most")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one request")
    parser.add_argument("--pid", type=int, default=0, help="of the server, to watch its memory")
    parser.add_argument("--most-growth", type=float, default=64, help="MiB")
    arguments = parser.parse_args()
    found = soak(arguments)
    print(json.dumps(found))
    raise SystemExit(
        bool(found.get("failed"))
        or not found.get("answered")
        or max(found["grew_mib"], found["gpu_grew_mib"]) > arguments.most_growth
    )


if __name__ == "__main__":
    main()
