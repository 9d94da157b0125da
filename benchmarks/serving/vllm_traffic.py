# SPDX-License-Identifier: Apache-2.0
"""Send prompts to a vLLM server: one at a time, mixed at a fixed rate, and many that decode together.

    python benchmarks/serving/vllm_traffic.py http://localhost:8001 --rate 1.5 --seconds 120 --out FILE

Requests of the mixed traffic arrive at random times (Poisson) with prompts of 1,000 to 64,000 random tokens, whose
logarithms are spread evenly. Every server gets the same requests at the same times, one server after the other. Nothing
is sent before the server is healthy. Traffic begins after some requests of every length on an idle server, the longest
first: that is the very first request of the server. Answers are streamed. The exit code is 1 if a request fails.

`vllm_serving.py` starts the servers.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import option_types

EDGES = (0, 2048, 8192, 32_768, 1 << 30)  # of the classes of prompt lengths


class Answer(NamedTuple):
    """A server's answer to a request."""

    tokens: int  # of the prompt
    sent: float  # seconds after the start of the traffic
    times: list[float]  # when each token came, in seconds after the request was sent


class Server:
    """A running server, and the requests that failed there."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = urllib.parse.urlsplit(url), model
        self.errors: list[str] = []

    def wait(self, seconds: float, alive: Callable[[], bool] = lambda: True) -> None:
        """Wait until the server is healthy.

        Raises:
            TimeoutError: it is not healthy in time, or `alive` says that it has ended.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until and alive():
            connection = http.client.HTTPConnection(self.url.hostname or "localhost", self.url.port, timeout=5)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            finally:
                connection.close()
            time.sleep(0.2)
        raise TimeoutError(f"{self.url.geturl()} is not healthy")

    def body(self, tokens: int, answer: int, seed: int) -> str:
        """Return a request with a random prompt."""
        draw = random.Random(seed)
        prompt = [draw.randrange(3, 31_000) for _ in range(tokens)]
        return json.dumps({"model": self.model, "prompt": prompt, "max_tokens": answer, "ignore_eos": True,
                           "temperature": 0, "stream": True})  # fmt: skip

    def send(self, body: str, tokens: int, sent: float = 0.0) -> Answer | None:
        """Send a request and read its answer; None if it fails, which is kept in `errors`."""
        times: list[float] = []
        try:
            connection = http.client.HTTPConnection(self.url.hostname or "localhost", self.url.port, timeout=300)
            begun = time.perf_counter()
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise ValueError(f"status {response.status}: {response.read()[:300]!r}")
            for line in response:
                if line.startswith(b"data: {"):
                    if b'"error"' in line:
                        raise ValueError(line[:300].decode())
                    times.append(time.perf_counter() - begun)
            if not times:
                raise ValueError("an empty answer")
            return Answer(tokens, sent, times)
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.errors.append(f"{tokens} tokens: {type(error).__name__}: {error}")
            return None


def one_at_a_time(server: Server, lengths: Sequence[int], repeats: int = 3, others: int = 0) -> dict[str, Any]:
    """Return the seconds to the first token of prompts on an idle server, the longest first, by length.

    Calls with another number of `others` send other prompts, which no prefix cache holds.
    """
    found: dict[str, list[float]] = {}
    for tokens in sorted(lengths, reverse=True):
        for at in range(6 * repeats if tokens < 4000 else max(1, repeats - (tokens > 100_000))):
            answer = server.send(server.body(tokens, 1, 1000 * tokens + 100 * others + at), tokens)
            found.setdefault(str(tokens), []).append(answer.times[0] if answer else math.nan)
    first = next(iter(found.values()))[0]
    return {"very_first_s": first, "first_token_s": found,
            "median_s": {tokens: statistics.median(each[1:] or each) for tokens, each in found.items()}}  # fmt: skip


def draw_arrivals(arguments: argparse.Namespace) -> list[tuple[float, int, int]]:
    """Draw when requests arrive, the tokens of their prompts, and a seed of each."""
    draw, at, arrivals = random.Random(0), 0.0, []
    while (at := at + draw.expovariate(arguments.rate)) < arguments.seconds:
        tokens = round(math.exp(draw.uniform(math.log(arguments.shortest), math.log(arguments.longest))))
        arrivals.append((at, tokens, draw.randrange(1 << 30)))
    return arrivals


def mixed(server: Server, arguments: argparse.Namespace) -> dict[str, Any]:
    """Send mixed traffic; return mean, median and 99th percentile of the time to first token, by prompt length."""
    arrivals, answers = draw_arrivals(arguments), list[Answer]()
    bodies = [server.body(tokens, arguments.answer, seed) for _, tokens, seed in arrivals]
    start = time.perf_counter() + 1

    def send(at: float, tokens: int, body: str) -> None:
        time.sleep(max(0.0, start + at - time.perf_counter()))
        answer = server.send(body, tokens, at)
        if answer is not None:
            answers.append(answer)

    run_together([lambda at=at, n=n, body=body: send(at, n, body)
                  for (at, n, _), body in zip(arrivals, bodies, strict=True)])  # fmt: skip
    taken = time.perf_counter() - start
    found = {"all": summary(answers)}
    for low, high in itertools.pairwise(EDGES):
        found[f"{low} to {high - 1}" if high < 1 << 30 else f"from {low}"] = summary(
            [each for each in answers if low <= each.tokens < high]
        )
    return {"rate": arguments.rate, "seconds": taken, "requests": len(arrivals), "first_token_ms": found}


def summary(answers: list[Answer]) -> dict[str, float]:
    """Summarize the times of some requests, in ms."""
    if not answers:
        return {"requests": 0}
    first = sorted(each.times[0] * 1e3 for each in answers)
    rest = [(each.times[-1] - each.times[0]) * 1e3 for each in answers]
    return {
        "requests": len(first), "mean": statistics.mean(first), "p50": statistics.median(first),
        "p99": first[math.ceil(0.99 * len(first)) - 1], "rest of the answer": statistics.mean(rest),
    }  # fmt: skip


def decoding(server: Server, sequences: int, tokens: int, steps: int) -> dict[str, Any]:
    """Decode some long prompts together; return the tokens per second while all of them decode and none is a prompt."""
    answer = sequences * (tokens // 2048 + 2) + steps  # early sequences decode while late ones are prompts
    bodies = [server.body(tokens, answer, 7 + at) for at in range(sequences)]
    begun, ends = time.perf_counter(), list[list[float]]()

    def send(body: str) -> None:
        sent = time.perf_counter() - begun
        found = server.send(body, tokens)
        if found is not None:
            ends.append([sent + each for each in found.times])

    run_together([lambda body=body: send(body) for body in bodies])
    if len(ends) < sequences:
        return {"sequences": sequences, "context": tokens, "failed": sequences - len(ends)}
    start, stop = max(each[0] for each in ends), min(each[-1] for each in ends)
    made = sum(start < at <= stop for each in ends for at in each)
    return {"sequences": sequences, "context": tokens, "seconds": stop - start,
            "tokens_per_second": made / (stop - start) if stop > start else math.nan}  # fmt: skip


def run_together(calls: list[Callable[[], None]]) -> None:
    """Run calls in threads, and wait for all of them."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def add_traffic_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the mixed traffic."""
    parser.add_argument("--rate", type=float, default=1.5, help="requests per second")
    parser.add_argument("--seconds", type=float, default=120, help="of mixed traffic")
    parser.add_argument("--shortest", type=int, default=1000, help="tokens of a prompt")
    parser.add_argument("--longest", type=int, default=64_000)
    parser.add_argument("--answer", type=int, default=32, help="tokens that each request generates")
    parser.add_argument(
        "--lengths",
        type=option_types.several(option_types.count),
        default="1000,8192,32768",
        help="prompts of the idle server, in tokens",
    )
    parser.add_argument("--repeats", type=int, default=3, help="requests of each length on the idle server")


def main() -> None:
    """Send the requests to one server after the other, and print the reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("urls", nargs="+")
    parser.add_argument("--model", default="model", help="the name that the servers know the model by")
    parser.add_argument("--out", type=Path, help="a JSON file")
    add_traffic_options(parser)
    arguments = parser.parse_args()
    reports, failed = {}, False
    for url in arguments.urls:
        server = Server(url, arguments.model)
        server.wait(900)
        alone = one_at_a_time(server, arguments.lengths, arguments.repeats)
        reports[url] = {"alone": alone, "mixed": mixed(server, arguments), "failed": server.errors}
        failed |= bool(server.errors)
        print(json.dumps({url: reports[url]}, indent=1), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(reports))
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
