# SPDX-License-Identifier: Apache-2.0
"""Time transformers' own HTTP server on a GPU, dense and under a policy, one server after the other.

    python benchmarks/serving/transformers_serving.py --out FILE

`examples/serve_transformers.py` serves a model with random weights of Llama-3.2-1B's shape and SmolLM2's tokenizer:
`dense` is transformers' server with SDPA, `policy` reads a window of 1,024 tokens, the first 128 and 10 % of the rest
in prompts from 2,048 tokens on. Prompts are text of Python's documentation, sent to `/v1/completions` as a stream:

- alone: prompts of each length one at a time, the longest first; seconds to the first token.
- together: some clients at a time, with continuous batching; seconds until all are answered.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_gpu import Result

from dynaxx.integrations.transformers.loading import from_config, from_folder

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve_transformers.py"
SHAPES = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 64},
    "small": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 32},
}  # fmt: skip


def save_model(folder: Path, shape: str, device: str, tokenizer_folder: str) -> None:
    """Write random weights, and a tokenizer: SmolLM2's if no folder is named."""
    import torch
    import transformers

    from dynaxx.lab.models import resolve_model

    tokenizer = from_folder(transformers.AutoTokenizer, tokenizer_folder or resolve_model("smollm2"))
    tokenizer.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=140_000, tie_word_embeddings=True, **SHAPES[shape]
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = from_config(transformers.AutoModelForCausalLM, config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None  # answers have the length that is asked for
    model.save_pretrained(folder)


def save_policy(folder: Path, path: Path) -> None:
    """Write the policy."""
    import transformers

    import dynaxx as dx
    from dynaxx.policy import ModelFacts

    facts = ModelFacts.of(from_folder(transformers.AutoConfig, folder))
    rule = dx.Rule.of(dx.SlidingWindow(1024) | dx.Sink(128) | dx.TopK(0.1))
    dx.save_policy(dx.Policy(model=facts, block_size=128, dense_below=2048, sparse_from=2048, rules=(rule,)), path)


def texts(folder: Path, lengths: list[int], repeats: int) -> dict[int, list[str]]:
    """Return texts of some lengths in tokens; no two begin alike."""
    import transformers

    from dynaxx.lab.texts import pydoc_text

    tokenizer = from_folder(transformers.AutoTokenizer, folder)
    ids = tokenizer(pydoc_text(), add_special_tokens=False)["input_ids"]
    ids = ids * (1 + (max(lengths) + 100_000) // len(ids))
    starts = {n: [997 * (at + 1) + n for at in range(repeats)] for n in lengths}
    return {n: [tokenizer.decode(ids[at : at + n]) for at in each] for n, each in starts.items()}


@contextmanager
def serving(kind: str, folder: Path, log: Path, flags: list[str]) -> Iterator[str]:
    """Start a server, wait until it is healthy, and end it; yields its address.

    Raises:
        RuntimeError: it does not start; the message ends with its log.
    """
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            ports.append(free.getsockname()[1])
    command = [sys.executable, str(EXAMPLE), str(folder / "model")]
    command += ["--plain"] if kind == "dense" else [str(folder / "policy.json")]
    command += ["--port", str(ports[0]), "--metrics-port", str(ports[1]), *flags]
    url = f"http://localhost:{ports[0]}"
    with (
        log.open("wb") as out,
        subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "HF_HUB_OFFLINE": "1"}) as running,
    ):
        try:
            for _ in range(1500):
                try:
                    urllib.request.urlopen(f"{url}/health", timeout=5).close()
                    break
                except (urllib.error.URLError, OSError):
                    if running.poll() is not None:
                        raise RuntimeError(log.read_text()[-4000:]) from None
                    time.sleep(0.2)
            yield url
        finally:
            running.send_signal(signal.SIGINT)
            try:
                running.wait(15)
            except subprocess.TimeoutExpired:
                running.kill()


def ask(url: str, model: str, text: str, answer: int) -> tuple[float, float]:
    """Send one prompt; return the seconds to the first and to the last token."""
    body = {"model": model, "prompt": text, "max_tokens": answer, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    begun, first = time.perf_counter(), 0.0
    with urllib.request.urlopen(request, timeout=300) as found:
        for line in found:
            if line.startswith(b"data: {") and not first and json.loads(line[6:])["choices"][0]["text"] != "":
                first = time.perf_counter() - begun
    whole = time.perf_counter() - begun
    return first or whole, whole


def alone(kind: str, folder: Path, arguments: argparse.Namespace, result: Result) -> None:
    """Time prompts one at a time."""
    lengths = sorted(int(each) for each in arguments.lengths.split(","))
    prompts, found = texts(folder / "model", lengths, arguments.repeats + 1), dict[str, Any]()
    with serving(kind, folder, log_of(kind, arguments, folder), flags_of(arguments)) as url:
        for tokens in reversed(lengths):
            times = [ask(url, str(folder / "model"), text, 4)[0] for text in prompts[tokens]]
            found[str(tokens)] = {"first_request_s": times[0], "median_s": statistics.median(times[1:])}
            result.add(**{f"{kind}, alone": found})


def together(kind: str, folder: Path, arguments: argparse.Namespace, result: Result) -> None:
    """Time some clients at a time, with continuous batching."""
    prompts = texts(folder / "model", [arguments.together], arguments.clients + 1)[arguments.together]
    flags = [*flags_of(arguments), "--continuous-batching", "--cb-max-batch-tokens", str(arguments.together)]
    flags += ["--cb-num-blocks", str(arguments.blocks)] if arguments.blocks else []
    with serving(kind, folder, log_of(f"{kind}.together", arguments, folder), flags) as url:
        ask(url, str(folder / "model"), prompts.pop(), 4)
        answers: list[tuple[float, float]] = []
        send = lambda text: answers.append(ask(url, str(folder / "model"), text, arguments.answer))
        threads = [threading.Thread(target=send, args=(text,)) for text in prompts]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        result.add(**{f"{kind}, together": {
            "clients": len(prompts), "tokens": arguments.together, "answered": len(answers),
            "mean_first_s": statistics.mean(first for first, _ in answers), "all_s": time.perf_counter() - begun,
        }})  # fmt: skip


def flags_of(arguments: argparse.Namespace) -> list[str]:
    """Return the flags that every server has."""
    return ["--device", arguments.device, "--dtype", arguments.dtype]


def log_of(kind: str, arguments: argparse.Namespace, folder: Path) -> Path:
    """Return the file for a server's log."""
    return Path(f"{arguments.out or folder / 'serving'}.{kind}.log")


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a table's rows of both servers side by side."""
    table = []
    for tokens, dense in found["dense, alone"].items():
        mine = found["policy, alone"][tokens]
        for name, key in (("", "median_s"), (", the first request of this length", "first_request_s")):
            table.append({
                "one prompt at a time": f"{int(tokens):,} tokens{name}", "dense": f"{dense[key] * 1e3:,.0f} ms",
                "policy": f"{mine[key] * 1e3:,.0f} ms", "speed-up": f"{dense[key] / mine[key]:.2f}x",
            })  # fmt: skip
    return table


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="1b")
    parser.add_argument("--lengths", default="1000,8192,32768,65536", help="of prompts, in tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clients", type=int, default=16, help="at a time, with continuous batching; 0 leaves it out")
    parser.add_argument("--together", type=int, default=8192, help="tokens of their prompts")
    parser.add_argument("--answer", type=int, default=16, help="tokens of their answers")
    parser.add_argument("--blocks", type=int, default=0, help="of the cache of continuous batching; 0 for its default")
    parser.add_argument("--tokenizer", default="", help="folder of a tokenizer; SmolLM2's by default")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", default="", help="a JSON file; logs go beside it")
    arguments = parser.parse_args()
    result = Result(arguments.out)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder / "model", arguments.shape, arguments.device, arguments.tokenizer)
        save_policy(folder / "model", folder / "policy.json")
        for part in (alone, together) if arguments.clients else (alone,):
            for kind in ("dense", "policy"):
                try:
                    part(kind, folder, arguments, result)
                except (RuntimeError, OSError) as error:
                    result.add(**{f"{kind}, {part.__name__}, error": str(error)[-3000:]})
        if {"dense, alone", "policy, alone"} <= result.keys():
            result.add(rows=rows(result))


if __name__ == "__main__":
    main()
