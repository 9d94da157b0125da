# SPDX-License-Identifier: Apache-2.0
"""`examples/serve_transformers.py`: transformers' own HTTP server under a policy. `make test-serve` runs it."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import dynaxx as dx
from dynaxx.integrations.transformers.apply_policy import model_facts
from dynaxx.policy import save_policy
from tiny import TEXT, save_tiny_model

pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("uvicorn")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
TOKENS = 6


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


class Client:
    """Sends requests to a server."""

    def __init__(self, port, metrics, model):
        self.base, self.metrics, self.model = f"http://localhost:{port}", metrics, model

    def post(self, path, **body):
        request = urllib.request.Request(
            self.base + path,
            json.dumps({"model": self.model, **body}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.read().decode()

    def complete(self, prompt, **options):
        options = {"max_tokens": TOKENS, "temperature": 0, **options}
        return json.loads(self.post("/v1/completions", prompt=prompt, **options))["choices"][0]["text"]

    def calls(self, route):
        with urllib.request.urlopen(f"http://localhost:{self.metrics}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(route, line))


@contextmanager
def serving(folder, policy, *flags, environment=()):
    port, metrics = free_port(), free_port()
    command = [sys.executable, str(ROOT / "examples" / "serve_transformers.py"), str(folder), str(policy)]
    command += ["--port", str(port), "--metrics-port", str(metrics), "--device", "cpu", "--dtype", "float32", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **dict(environment)}
    log = folder / "server.log"
    with log.open("wb") as out, subprocess.Popen(command, env=environment, stdout=out, stderr=out) as server:
        try:
            deadline = time.monotonic() + 600
            while True:
                assert server.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < deadline, log.read_text()[-4000:]
                try:
                    urllib.request.urlopen(f"http://localhost:{port}/health", timeout=10).close()
                    break
                except (urllib.error.URLError, OSError):
                    time.sleep(0.1)
            yield Client(port, metrics, str(folder))
        finally:
            server.terminate()
            server.wait(60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def policy(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    rules = (
        dx.Rule.of(dx.SlidingWindow(64) | dx.Sink(4)),
        dx.Rule.of(dx.Sink(4) | dx.TopK(0.5), phase="decode", block_size=16),
    )
    found = dx.Policy(model=model_facts(model), rules=rules, block_size=32)
    save_policy(found, folder / "policy.json")
    return folder / "policy.json"


PROMPTS = [TEXT[start : start + length] for start, length in ((0, 700), (900, 400), (40, 90), (3000, 1000))]


@pytest.fixture(scope="module")
def wanted(folder, policy):
    """Return transformers' answers under the policy, without a server."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    said = []
    with dx.apply(model, dx.load_policy(policy)), torch.no_grad():
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
            out = model.generate(ids, max_new_tokens=TOKENS, do_sample=False)
            said.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return said


BATCHING = ("--continuous-batching", "--cb-num-blocks", "64", "--cb-max-batch-tokens", "512")


@pytest.mark.parametrize("flags", [(), BATCHING], ids=["one by one", "continuous batching"])
def test_requests_get_what_the_policy_says(folder, policy, wanted, flags):
    with serving(folder, policy, *flags) as client:
        assert [client.complete(prompt) for prompt in PROMPTS] == wanted
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(client.complete, PROMPTS * 2)) == wanted * 2
        assert client.calls(r"dynaxx_layer_calls_total\{.*backend=\"(?!dense)") > 0
        streamed = client.post("/v1/completions", prompt=PROMPTS[0], max_tokens=TOKENS, temperature=0, stream=True)
        pieces = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        assert "".join(piece["choices"][0]["text"] for piece in pieces if piece["choices"]) == wanted[0]
        if flags == BATCHING:  # there an empty prompt ends transformers' worker
            return
        with pytest.raises(urllib.error.HTTPError):
            client.post("/v1/completions")
        assert client.complete(PROMPTS[1]) == wanted[1]


def test_a_policy_is_replaced_and_killed_while_the_server_runs(folder, policy, tmp_path):
    served, kill = tmp_path / "policy.json", tmp_path / "kill"
    served.write_text(policy.read_text())
    with serving(folder, served, environment={"DYNAXX_KILL_FILE": str(kill)}.items()) as client:
        sparse, dense = r"dynaxx_layer_calls_total\{.*backend=\"(?!dense)", r"dynaxx_dense_calls_total\{.*kill"
        client.complete(PROMPTS[0])
        before = client.calls(sparse)
        kill.touch()
        time.sleep(1.5)
        client.complete(PROMPTS[0])
        assert client.calls(sparse) == before
        assert client.calls(dense) > 0
        kill.unlink()
        time.sleep(1.5)
        client.complete(PROMPTS[0])
        assert client.calls(sparse) > before
