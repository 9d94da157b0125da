# SPDX-License-Identifier: Apache-2.0
"""Send mixed prompts to vLLM servers at a fixed rate, and report the time to first token by prompt length.

    python benchmarks/vllm_traffic.py http://localhost:8001 http://localhost:8002 --rate 1.5 --seconds 120 --out FILE

Requests arrive at random times (Poisson) with prompts of 1,000 to 64,000 random tokens, their logarithms spread evenly.
Every server gets the same requests at the same times: give each a GPU of its own. Answers are streamed. The first
`--warm-up` seconds are not counted, and a request that fails ends the run with exit code 1.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import math
import random
import statistics
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any, NamedTuple


class Arrival(NamedTuple):
    """A request and the time at which it is sent."""

    seconds: float  # after the start
    tokens: int
    seed: int


class Answer(NamedTuple):
    """A server's answer to a request."""

    arrival: Arrival
    first_token: float  # seconds after it was sent
    whole: float


def draw_arrivals(arguments: argparse.Namespace) -> list[Arrival]:
    """Draw when requests arrive and how long their prompts are."""
    draw, at, arrivals = random.Random(0), 0.0, []
    while (at := at + draw.expovariate(arguments.rate)) < arguments.seconds:
        tokens = round(math.exp(draw.uniform(math.log(arguments.shortest), math.log(arguments.longest))))
        arrivals.append(Arrival(at, tokens, draw.randrange(1 << 30)))
    return arrivals


class Server:
    """A server, its answers, and its errors."""

    def __init__(self, url: str, arguments: argparse.Namespace) -> None:
        self.url, self.arguments = url, arguments
        self.answers: list[Answer] = []
        self.errors: list[str] = []

    def send(self, arrival: Arrival, start: float) -> None:
        """Wait for a request's time, send it and read its answer."""
        draw = random.Random(arrival.seed)
        prompt = [draw.randrange(3, 31_000) for _ in range(arrival.tokens)]
        body = json.dumps({"model": self.arguments.model, "prompt": prompt, "max_tokens": self.arguments.answer,
                           "ignore_eos": True, "temperature": 0, "stream": True})  # fmt: skip
        time.sleep(max(0.0, start + arrival.seconds - time.perf_counter()))
        begun, first = time.perf_counter(), 0.0
        try:
            place = urllib.parse.urlsplit(self.url)
            connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=300)
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise ValueError(f"status {response.status}: {response.read()[:300]!r}")
            for line in response:
                if line.startswith(b"data: {"):
                    if b'"error"' in line:
                        raise ValueError(line[:300].decode())
                    first = first or time.perf_counter() - begun
            if not first:
                raise ValueError("an empty answer")
            self.answers.append(Answer(arrival, first, time.perf_counter() - begun))
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.errors.append(f"{arrival.tokens} tokens: {type(error).__name__}: {error}")

    def report(self) -> dict[str, Any]:
        """Return mean, median and 99th percentile of the time to first token, in ms, by prompt length."""
        counted = [each for each in self.answers if each.arrival.seconds >= self.arguments.warm_up]
        edges = (0, 2048, 8192, 32_768, 1 << 30)
        found = {"all": summary(counted)}
        for low, high in itertools.pairwise(edges):
            some = [each for each in counted if low <= each.arrival.tokens < high]
            if some:
                found[f"{low} to {min(high, self.arguments.longest)} tokens"] = summary(some)
        return {"url": self.url, "first token, ms": found, "failed": self.errors}


def summary(answers: list[Answer]) -> dict[str, float]:
    """Summarise the times of some requests."""
    if not answers:
        return {"requests": 0}
    first = sorted(each.first_token * 1e3 for each in answers)
    rest = [(each.whole - each.first_token) * 1e3 for each in answers]
    return {
        "requests": len(first), "mean": statistics.mean(first), "median": statistics.median(first),
        "p99": first[math.ceil(0.99 * len(first)) - 1], "rest of the answer": statistics.mean(rest),
    }  # fmt: skip


def main() -> None:
    """Send the requests and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("urls", nargs="+")
    parser.add_argument("--model", default="soak", help="the name that the servers know the model by")
    parser.add_argument("--rate", type=float, default=1.5, help="requests per second")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--warm-up", type=float, default=10, help="seconds at the start that are not counted")
    parser.add_argument("--shortest", type=int, default=1000, help="tokens of a prompt")
    parser.add_argument("--longest", type=int, default=64_000)
    parser.add_argument("--answer", type=int, default=32, help="tokens that each request generates")
    parser.add_argument("--out", type=Path, help="a JSON file")
    arguments = parser.parse_args()
    arrivals = draw_arrivals(arguments)
    servers = [Server(url, arguments) for url in arguments.urls]
    start = time.perf_counter() + 6  # prompts are drawn until then
    threads = [threading.Thread(target=server.send, args=(each, start)) for each in arrivals for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reports = [server.report() for server in servers]
    print(json.dumps(reports, indent=1), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps({"rate": arguments.rate, "servers": reports}))
    raise SystemExit(any(server.errors for server in servers))


if __name__ == "__main__":
    main()
