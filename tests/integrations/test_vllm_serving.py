# SPDX-License-Identifier: Apache-2.0
"""Requests to real vLLM engines and servers that run a policy, on the CPU."""

import contextlib
import gc
import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

import dynaxx as dx
import vllm_engine_run as engine_run
from dynaxx.integrations.vllm import engine as vllm_engine
from vllm_models import (
    CHUNKS,
    DECODE,
    DECODE_EVERYTHING,
    EVERYTHING,
    PROMPTS,
    SPARSE,
    policy_file,
    prompts_of,
    run,
    same,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def served(llama, tmp_path_factory):
    """Start an engine in this process, with a sparse policy for some layers and heads."""
    rules = (dx.Rule.of(SPARSE, layers=[0], heads=[0, 1, 3]), dx.Rule.of(SPARSE, layers=[2]), DECODE)
    path = policy_file(tmp_path_factory.mktemp("served"), llama, *rules, dense_below=100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DYNAXX_POLICY", str(path))
        extension = "dynaxx.integrations.vllm.WorkerExtension"
        yield engine_run.make(llama, worker_extension_cls=extension, **CHUNKS), path


def test_sparse_runs_and_shows_it(served, own):
    llm, path = served
    (before,) = llm.collective_rpc("dynaxx_status")
    layouts = []
    vllm_engine.current().watchers.append(lambda layer, layout: layouts.append((layer, layout.density())))
    got = engine_run.generate(llm, PROMPTS["mixed"], 8)
    vllm_engine.current().watchers.clear()
    (after,) = llm.collective_rpc("dynaxx_status")
    assert after["active"]
    assert after["policy"] == str(path)
    assert after["sparse_layers"] == [0, 2]
    assert after["sparse_calls"] > before["sparse_calls"]
    assert {layer for layer, _ in layouts} == {0, 2}
    assert min(density for _, density in layouts) < 0.6
    numbers = vllm_engine.current().counts.numbers
    assert numbers.value("dynaxx_layer_calls_total", phase="decode", backend="cpu") > 0
    assert {"decode"} <= set(after["dense_calls"]) | set(after["dense_sequences"])
    want = own("mixed")
    assert got["logprobs"][1] == pytest.approx(want["logprobs"][1], abs=1e-4)  # below dense_below
    assert got["logprobs"][0] != pytest.approx(want["logprobs"][0], abs=1e-4)


def test_a_prefix_is_taken_from_the_cache(served):
    llm, _ = served
    prompt = prompts_of((900,), seed=5)[0]
    first = engine_run.generate(llm, [prompt], 8)
    again = engine_run.generate(llm, [prompt], 8)
    other = engine_run.generate(llm, [prompt[:800] + prompts_of((150,), seed=6)[0]], 8)
    assert first["cached"] == [0]
    assert again["cached"][0] >= 640
    assert other["cached"][0] >= 640
    assert len(again["tokens"][0]) == 8


def test_sparsity_is_switched_while_requests_come(served, own):
    llm, _ = served
    prompts = PROMPTS["long"]
    try:
        (status,) = llm.collective_rpc("dynaxx_switch", args=(False,))
        assert status["killed"] == "call"
        llm.reset_prefix_cache()
        same(engine_run.generate(llm, prompts, 8), own("long"))
    finally:
        (status,) = llm.collective_rpc("dynaxx_switch", args=(True,))
    assert status["killed"] is None
    llm.reset_prefix_cache()
    calls = vllm_engine.current().counts.to_dict()["sparse_calls"]
    engine_run.generate(llm, prompts, 8)
    assert vllm_engine.current().counts.to_dict()["sparse_calls"] > calls


def test_a_new_policy_comes_into_force_between_steps(served):
    llm, _ = served
    engine = vllm_engine.current()
    old = engine.policy
    try:
        assert engine.replace(old.replace(dense_below=5000))
        calls = engine.counts.to_dict()["sparse_calls"]
        engine_run.generate(llm, prompts_of((700,), seed=8), 4)
        assert engine.counts.to_dict()["sparse_calls"] == calls
    finally:
        assert engine.replace(old)


def test_a_kernel_that_fails_costs_a_request_nothing(served, own, monkeypatch):
    llm, _ = served

    def broken(*args, **kwargs):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr("dynaxx.integrations.runtime.paged_layer.attend_in_place", broken)
    same(engine_run.generate(llm, PROMPTS["failing"], 8), own("failing"))
    assert vllm_engine.current().counts.to_dict()["dense_calls"]["kernel failed"] > 0


def test_preempted_requests_are_answered_as_if_they_were_not(tmp_path, llama):
    """Eight prompts fit into the cache, but not with their answers, so vLLM puts requests back and computes them again.

    The metric says that it did. At density 1.0 tokens are vLLM's own with a large cache; with a choice, every request
    is still answered.
    """
    prompts, answer = prompts_of(range(600, 760, 20), seed=3), 120
    scarce = {"num_gpu_blocks_override": 52, "disable_log_stats": False, "max_num_seqs": 8}
    everything = policy_file(tmp_path, llama, dx.Rule.of(EVERYTHING), DECODE_EVERYTHING)
    got = run(tmp_path, llama, prompts, answer, policy=everything, **scarce)
    assert got["preemptions"] > 0
    same(got, run(tmp_path, llama, prompts, answer, disable_log_stats=False))
    decode = dx.Rule.of(dx.Sink(32) | dx.TopK(2, dx.MinMax()), phase="decode", block_size=128)
    sparse = policy_file(tmp_path, llama, dx.Rule.of(SPARSE), decode)
    got = run(tmp_path, llama, prompts, answer, policy=sparse, **scarce)
    assert got["preemptions"] > 0
    assert got["status"]["sparse_calls"] > 0
    assert got["status"]["dense_calls"].get("kernel failed", 0) == 0
    assert [len(tokens) for tokens in got["tokens"]] == [answer] * len(prompts)


def test_structured_answers_keep_their_form(llama, tmp_path):
    from transformers import AutoTokenizer

    policy = policy_file(tmp_path, llama, dx.Rule.of(SPARSE), DECODE)
    got = run(tmp_path, llama, PROMPTS["mixed"], 16, policy=policy, request={"regex": "[ab]{4,12}"})
    tokenizer = AutoTokenizer.from_pretrained(llama)
    assert all(re.fullmatch("[ab]{4,12}", tokenizer.decode(ids, skip_special_tokens=True)) for ids in got["tokens"])
    assert got["status"]["sparse_calls"] > 0


def test_keys_come_through_a_connector(llama, tmp_path):
    """A second engine takes the pages of the first; decode rules lack their summaries and are refused."""
    extra = {"shared_storage_path": str(tmp_path / "pages")}
    transfer = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    engine = {"kv_transfer_config": transfer, "enable_prefix_caching": False}
    policy = policy_file(tmp_path, llama, dx.Rule.of(dx.Sink(32) | dx.SlidingWindow(64)))
    first = run(tmp_path, llama, PROMPTS["failing"], policy=policy, **engine)
    second = run(tmp_path, llama, PROMPTS["failing"], policy=policy, **engine)
    same(first, second)
    assert second["cached"][0] >= 640
    policy = policy_file(tmp_path, llama, DECODE)
    done = run(tmp_path, llama, PROMPTS["failing"], policy=policy, check=False, **engine)
    assert "pages from a kv connector lack" in done.stderr


def test_two_hundred_requests_with_cancellations_leave_nothing(served):
    """Lengths from 1 to 900, a quarter cancelled on the way; then the cache is empty and memory what it was."""
    import psutil
    from vllm import SamplingParams

    llm, _ = served
    engine, draw = llm.llm_engine, random.Random(1)
    memory = []
    for turn in range(3):
        prompts = prompts_of([draw.choice((1, 5, 33, 64, 150, 400, 900)) for _ in range(200)], seed=turn)
        ids = [f"{turn}-{i}" for i in range(200)]
        for name, prompt in zip(ids, prompts, strict=True):
            parameters = SamplingParams(temperature=0, max_tokens=draw.randrange(1, 12), ignore_eos=True)
            engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
        cancelled, done = set(draw.sample(ids, 50)), {}
        for name in sorted(cancelled)[:10]:  # before they start
            engine.abort_request([name])
        waiting = sorted(cancelled)[10:]
        while engine.has_unfinished_requests():
            for output in engine.step():
                done[output.request_id] = output
            if waiting and draw.random() < 0.5:
                engine.abort_request([waiting.pop()])
        finished = {name for name, output in done.items() if output.finished}
        assert set(ids) - cancelled <= finished
        gc.collect()
        memory.append(psutil.Process().memory_info().rss)
    assert memory[2] - memory[1] < 32 * 2**20, memory


@contextlib.contextmanager
def server(folder, model, policy, *arguments):
    """Run vLLM's HTTP server. Yield its port, its process and its log, and end it."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--served-model-name", "soak", "--dtype", "float32", "--enforce-eager", "--max-model-len", "4096"]
    command += ["--max-num-batched-tokens", "256", "--max-num-seqs", "16", *arguments]
    env = {**os.environ, "DYNAXX_POLICY": str(policy), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    env |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO"}
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


def answers(port):
    """Return whether a server is healthy."""
    connection = http.client.HTTPConnection("localhost", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


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
