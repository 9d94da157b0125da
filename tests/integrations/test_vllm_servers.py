# SPDX-License-Identifier: Apache-2.0
"""vLLM's HTTP servers under a policy, on the CPU: many clients, and changes while they wait for answers."""

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

import dynaxx as dx
from vllm_models import SPARSE, policy_file, prompts_of, same

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@contextlib.contextmanager
def server(folder, model, policy, *arguments, environment=()):
    """Run vLLM's HTTP server. Yield its port, its process and its log, and end it."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--served-model-name", "soak", "--dtype", "float32", "--enforce-eager", "--max-model-len", "4096"]
    command += ["--max-num-batched-tokens", "256", "--max-num-seqs", "16", *arguments]
    env = {**os.environ, "DYNAXX_POLICY": str(policy), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    env |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO", **dict(environment)}
    log = folder / "server.log"
    with log.open("w") as out:
        running = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 300
        while not answers(port):
            assert running.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(1)
        yield port, running, log
    finally:
        running.terminate()
        running.wait(60)


def call(port, method, path, **body):
    """Return the body of a server's answer, which must be well."""
    connection = http.client.HTTPConnection("localhost", port, timeout=300)
    with contextlib.closing(connection):
        connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        said = answer.read()
    assert answer.status == 200, said
    return said


def answers(port):
    """Return whether a server is healthy."""
    try:
        call(port, "GET", "/health")
    except (AssertionError, OSError):
        return False
    return True


def test_a_server_answers_many_clients_at_a_time(llama, tmp_path):
    """Over HTTP: prompts of all lengths, shared prefixes, clients that hang up; no error."""
    decode = dx.Rule.of(dx.Sink(32) | dx.TopK(1, dx.MinMax()), phase="decode", block_size=128)
    policy = policy_file(tmp_path, llama, dx.Rule.of(SPARSE), decode, dense_below=100)
    soak = Path(__file__).parents[2] / "benchmarks" / "serving" / "vllm_soak.py"
    with server(tmp_path, llama, policy, "--skip-tokenizer-init") as (port, running, log):
        command = [sys.executable, str(soak), "--url", f"http://localhost:{port}", "--model", "soak"]
        command += ["--minutes", "0.3", "--pid", str(running.pid)]
        command += ["--concurrent", "60", "--longest", "900", "--vocabulary", "319", "--most-growth", "1000"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout[-3000:] + log.read_text()[-3000:]
        assert json.loads(done.stdout.splitlines()[-1])["answered"] > 60
    assert "policy.json is active: 3 of 3 layers" in log.read_text()


def test_openai_clients_get_the_same_answer_in_every_way(llama, tmp_path):
    """Under a static rule: whole, again, streamed, among 200 clients; and a server that is ended answers first."""
    import openai

    policy = policy_file(tmp_path, llama, dx.Rule.of(dx.Sink(32) | dx.SlidingWindow(64)))
    prompts = prompts_of((5, 64, 130, 300, 900), seed=11)
    with (
        server(tmp_path, llama, policy, "--shutdown-timeout", "60") as (port, running, _),
        openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", timeout=200, max_retries=0) as client,
        ThreadPoolExecutor(200) as clients,
    ):

        def ask(prompt, tokens=8, **options):
            extra = {"return_token_ids": True, "ignore_eos": True}
            return client.completions.create(
                model="soak", prompt=prompt, max_tokens=tokens, temperature=0, extra_body=extra, **options
            )

        def whole(prompt, tokens=8):
            return ask(prompt, tokens).choices[0].token_ids

        first = [whole(prompt) for prompt in prompts]
        assert [whole(prompt) for prompt in prompts] == first
        assert [[t for part in ask(p, stream=True) for t in part.choices[0].token_ids or ()] for p in prompts] == first
        for stream in [ask(prompts[4], 500, stream=True) for _ in range(8)]:
            stream.close()  # a client that hangs up
        assert list(clients.map(whole, prompts * 40)) == first * 40
        last = [clients.submit(whole, prompt, 200) for prompt in prompts]
        time.sleep(2)
        running.terminate()
        assert [answer.result()[:8] for answer in last] == first


def test_no_request_is_lost_while_a_server_changes(llama, tmp_path):
    """Paused, with a new policy, under the kill switch and by the guard: each answer comes, whole and in its time."""
    kill, rule = tmp_path / "kill", dx.Rule.of(dx.Sink(32) | dx.SlidingWindow(64))
    prompts = prompts_of((130, 300, 500, 700, 900), seed=12)
    environment = {"DYNAXX_FOLLOW": "1", "DYNAXX_KILL_FILE": str(kill), "VLLM_SERVER_DEV_MODE": "1"}
    policy = policy_file(tmp_path, llama, rule)
    with (
        server(tmp_path, llama, policy, "--no-enable-prefix-caching", environment=environment) as (port, *_),
        ThreadPoolExecutor(40) as clients,
    ):

        def whole(prompt):
            body = {"model": "soak", "prompt": prompt, "max_tokens": 100, "temperature": 0, "logprobs": 2}
            body |= {"return_token_ids": True, "return_tokens_as_token_ids": True, "ignore_eos": True}
            (said,) = json.loads(call(port, "POST", "/v1/completions", **body))["choices"]
            ranked = [sorted(each.values(), reverse=True) for each in said["logprobs"]["top_logprobs"]]
            return said["token_ids"], [each[0] for each in ranked], [each[0] - each[1] for each in ranked]

        def table(answers):
            return dict(zip(("tokens", "logprobs", "margins"), zip(*answers, strict=True), strict=True))

        def under_way():
            waiting = [clients.submit(whole, prompt) for prompt in prompts * 4]
            next(as_completed(waiting))
            return waiting

        def lengths(waiting):
            return {len(each.result()[0]) for each in waiting}

        def until(wanted):
            deadline = time.monotonic() + 60
            while [whole(prompt) for prompt in prompts] != wanted:
                assert time.monotonic() < deadline, "the change never came into force"

        sparse = [whole(prompt) for prompt in prompts]
        waiting = under_way()
        call(port, "POST", "/pause?mode=keep&clear_cache=false")
        done = sum(each.done() for each in waiting)
        time.sleep(2)
        assert done <= sum(each.done() for each in waiting) < 20
        call(port, "POST", "/resume")
        same(table(each.result() for each in waiting), table(sparse * 4))
        waiting = under_way()
        call(port, "POST", "/pause?mode=keep")  # vLLM computes the answers so far again, by the prefill rule
        call(port, "POST", "/resume")
        assert lengths(waiting) == {100}

        waiting = under_way()
        kill.touch()
        assert lengths(waiting) == {100}
        dense = [whole(prompt) for prompt in prompts]
        assert dense != sparse
        waiting = under_way()
        kill.unlink()
        assert lengths(waiting) == {100}
        assert [whole(prompt) for prompt in prompts] == sparse

        waiting = under_way()
        policy_file(tmp_path, llama, rule, dense_below=10**6)
        assert lengths(waiting) == {100}
        until(dense)
        policy.write_text("{")  # a broken file changes nothing
        assert lengths(under_way()) == {100}
        policy_file(tmp_path, llama, rule)
        until(sparse)

        guard = {"sample": 1.0, "min_recall": 1.0, "window": 4, "action": "dense"}  # which no sparse rule can keep
        policy_file(tmp_path, llama, rule, guard=guard)
        assert lengths(under_way()) == {100}
        until(dense)
        policy_file(tmp_path, llama, rule)
        until(sparse)


def test_two_api_servers_and_two_ranks_are_watched_as_one(llama, tmp_path):
    """Every scrape shows all processes, whichever server answers it, and `dynaxx watch` reads it."""
    folder = tmp_path / "metrics"
    folder.mkdir()
    policy = policy_file(tmp_path, llama, dx.Rule.of(SPARSE))
    arguments = ("--api-server-count", "2", "--tensor-parallel-size", "2", "--skip-tokenizer-init")
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(folder), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with server(tmp_path, llama, policy, *arguments, environment=environment) as (port, *_):
        for prompt in prompts_of((300, 700, 900), seed=13):
            call(port, "POST", "/v1/completions", model="soak", prompt=prompt, max_tokens=4, detokenize=False)
        time.sleep(2)
        shown = [sparse_calls(call(port, "GET", "/metrics").decode()) for _ in range(12)]
        assert min(shown) > 0
        assert len(set(shown)) == 1, "scrapes differ by the server that answers"
        watch = [sys.executable, "-m", "dynaxx", "watch", f"http://localhost:{port}/metrics", "--json"]
        seen = json.loads(subprocess.run(watch, capture_output=True, text=True, timeout=120).stdout)
        assert "soak" in json.dumps(seen)


def sparse_calls(metrics):
    """Return the sparse calls that a page of metrics shows, over all ranks."""
    lines = [line for line in metrics.splitlines() if line.startswith("dynaxx_layer_calls_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines if 'backend="dense"' not in line)
