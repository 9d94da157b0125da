# SPDX-License-Identifier: Apache-2.0
"""Requests to real vLLM engines that run a policy, on the CPU."""

import gc
import random
import re

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
