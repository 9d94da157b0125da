# SPDX-License-Identifier: Apache-2.0
"""The plugin in real vLLM engines, on the CPU: `make test-vllm` runs it in an environment of its own."""

import contextlib
import gc
import http.client
import importlib.metadata
import itertools
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
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

import dynaxx as dx
import vllm_engine_run as engine_run
import vllm_source
from dynaxx.integrations import vllm as plugin
from dynaxx.integrations.runtime.paged import Sequences, dense_attention, stored
from dynaxx.integrations.runtime.paged_graph import LayerLimits
from dynaxx.integrations.runtime.summary_updates import JointUpdates
from dynaxx.integrations.vllm import contract as vllm_contract
from dynaxx.integrations.vllm import engine as vllm_engine
from dynaxx.policy import ModelFacts

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
RUN = Path(__file__).parents[1] / "support" / "vllm_engine_run.py"
SPARSE = dx.Sink(32) | dx.SlidingWindow(64) | dx.TopK(0.2)
DECODE = dx.Rule.of(dx.Sink(32) | dx.TopK(2, dx.MinMax()), phase="decode", block_size=128, layers=[2])
DECODE_EVERYTHING = dx.Rule.of(dx.TopK(1.0), phase="decode", block_size=128)
EVERYTHING = dx.SlidingWindow(64) | dx.TopK(1.0)
LENGTHS = (3, 17, 63, 64, 65, 130, 300, 511, 700, 1030)
CHUNKS = {"max_num_batched_tokens": 256, "max_num_seqs": 16}  # prompts are cut, and mixed with decoding


def save(folder, config):
    """Save a random model whose head sizes vLLM serves."""
    import transformers

    from tiny import save_tiny_model

    save_tiny_model(folder)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


SIZES = {
    "vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096, "initializer_range": 0.2,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, "dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    import transformers

    return save(tmp_path_factory.mktemp("llama"), transformers.LlamaConfig(num_hidden_layers=3, **SIZES))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """Five windows to one layer that sees everything: two kv cache groups."""
    import transformers

    config = transformers.Gemma3TextConfig(
        num_hidden_layers=6, sliding_window=96, query_pre_attn_scalar=20, architectures=["Gemma3ForCausalLM"], **SIZES
    )
    return save(tmp_path_factory.mktemp("gemma"), config)


def policy_file(folder, model, *rules, **fields):
    import transformers

    facts = ModelFacts.of(transformers.AutoConfig.from_pretrained(model))
    path = folder / "policy.json"
    dx.save_policy(dx.Policy(model=facts, rules=rules, **{"block_size": 32, **fields}), path)
    return path


def prompts_of(lengths, seed=0, vocabulary=319):
    draw = random.Random(seed)
    return [[draw.randrange(2, vocabulary) for _ in range(n)] for n in lengths]


PROMPTS = {
    "all lengths": prompts_of(LENGTHS),
    "mixed": prompts_of((700, 30, 1030), seed=1),
    "long": prompts_of((700, 1030), seed=7),
    "failing": prompts_of((700,), seed=9),
}


def run(folder, model, prompts, max_tokens=8, policy=None, check=True, request=(), **engine):
    """Generate in a process of its own, with vLLM's own backend or with a policy."""
    question, answer = folder / "request.json", folder / "answer.json"
    body = {"model": str(model), "engine": engine, "prompts": prompts, "max_tokens": max_tokens, **dict(request)}
    question.write_text(json.dumps(body))
    env = {name: value for name, value in os.environ.items() if name != "DYNAXX_POLICY"}
    env |= {} if policy is None else {"DYNAXX_POLICY": str(policy)}
    command = [sys.executable, str(RUN), str(question), str(answer)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    if not check:
        return done
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(answer.read_text())


def same(got, want, tolerance=1e-4):
    """Token for token, but for ties closer than 1e-4; up to there the same log-probabilities."""
    for mine, theirs, ours, others, margins in zip(
        got["tokens"], want["tokens"], got["logprobs"], want["logprobs"], want["margins"], strict=True
    ):
        for at, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert abs(ours[at] - others[at]) <= tolerance
            if a != b:
                assert margins[at] < 1e-4, f"token {at}: {a} instead of {b}, a margin of {margins[at]}"
                break


def test_vllm_is_what_the_plugin_needs():
    assert vllm_contract.broken(vllm_contract.SHARED) == []
    assert vllm_contract.broken(vllm_contract.CPU) == []
    assert vllm_contract.broken(vllm_contract.CUDA) == []


def test_sources_say_what_imports_say():
    import vllm

    root = Path(vllm.__file__).parents[1]

    def read(name):
        if not (root / name).exists():
            raise KeyError(name)
        return (root / name).read_text()

    assert vllm_source.problems(vllm_source.Sources(read)) == {"CPU": [], "GPU": []}


def test_the_entry_point_leads_to_the_plugin():
    (found,) = (e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "dynaxx")
    assert found.load() is plugin.register


@pytest.fixture(scope="module")
def own(llama, tmp_path_factory):
    """Return the answers of vLLM's own backend to the prompts of this file; computed once."""
    prompts = [prompt for case in PROMPTS.values() for prompt in case]
    answer = run(tmp_path_factory.mktemp("own"), llama, prompts, **CHUNKS)
    assert answer.pop("status") == {"active": False, "reason": "DYNAXX_POLICY is not set"}
    assert answer.pop("prepared") == 0

    def of(name):
        places = [prompts.index(prompt) for prompt in PROMPTS[name]]
        return {key: [values[at] for at in places] for key, values in answer.items()}

    return of


@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_at_density_one_outputs_are_vllms_own(tmp_path, model, request):
    name, model = model, request.getfixturevalue(model)
    prompts = PROMPTS["all lengths"]
    policy = policy_file(tmp_path, model, dx.Rule.of(EVERYTHING), DECODE_EVERYTHING)
    got = run(tmp_path, model, prompts, policy=policy, **CHUNKS)
    assert got["status"]["active"]
    assert got["status"]["density"] in (1.0, None)  # a sample
    assert got["status"]["sparse_calls"] > 0
    assert len(got["status"]["sparse_layers"]) == (3 if name == "llama" else 1)  # windows stay vLLM's
    same(
        got,
        request.getfixturevalue("own")("all lengths") if name == "llama" else run(tmp_path, model, prompts, **CHUNKS),
    )


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


def test_steps_that_graphs_capture_decode_the_same_tokens(tmp_path, llama):
    """The device decides which sequences decode sparse, and kernels run before the first request, as on CUDA."""
    decode = dx.Rule.of(dx.Sink(32) | dx.TopK(1, dx.MinMax()), phase="decode", block_size=128)
    policy = policy_file(tmp_path, llama, dx.Rule.of(SPARSE), decode, dense_below=100, decode_dense_below=512)
    prompts, engine = PROMPTS["all lengths"], {**CHUNKS, "policy": policy}
    want = run(tmp_path, llama, prompts, **engine)
    got = run(tmp_path, llama, prompts, request={"as_on_cuda": True}, **engine)
    same(got, want)
    assert got["prepared"] > 0 == want["prepared"]
    assert got["status"]["sparse_calls"] == want["status"]["sparse_calls"]
    assert got["tokens"] != run(tmp_path, llama, prompts, **CHUNKS)["tokens"]


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM refuses an fp8 cache on CPUs without AVX-512")
def test_over_an_fp8_cache_density_one_is_dense(tmp_path):
    """In one layer: beyond it a difference of rounding makes a key another number in fp8. Both sides are dynaxx's
    kernels, since vLLM's CPU kernel rounds to other numbers than CUDA does."""
    import transformers

    model = save(tmp_path / "model", transformers.LlamaConfig(num_hidden_layers=1, **SIZES))
    prompts, engine = PROMPTS["all lengths"], {**CHUNKS, "kv_cache_dtype": "fp8"}
    rules = dx.Rule.of(EVERYTHING), DECODE_EVERYTHING
    sparse = run(tmp_path, model, prompts, policy=policy_file(tmp_path, model, *rules), **engine)
    dense = run(tmp_path, model, prompts, policy=policy_file(tmp_path, model, *rules, dense_below=10**6), **engine)
    assert sparse["status"]["sparse_calls"] > 0
    assert dense["status"]["sparse_calls"] == 0
    same(sparse, dense)


def test_two_ranks_give_what_one_gives(tmp_path, llama):
    """Each takes its heads of the rules, and its kv heads' pages."""
    decode = [dx.Rule.of(dx.Sink(32) | dx.TopK(pages, dx.MinMax()), phase="decode", block_size=128, heads=heads)
              for pages, heads in ((1, [0, 1]), (3, [2, 3]))]  # fmt: skip
    policy = policy_file(tmp_path, llama, dx.Rule.of(dx.Sink(32) | dx.TopK((0.1, 0.3, 0.2, 0.6), per="head")), *decode)
    one = run(tmp_path, llama, PROMPTS["long"], policy=policy)
    extension = "dynaxx.integrations.vllm.WorkerExtension"
    two = run(tmp_path, llama, PROMPTS["long"], policy=policy, tensor_parallel_size=2,
              distributed_executor_backend="mp", worker_extension_cls=extension)  # fmt: skip
    same(two, one)
    assert [each["sparse_calls"] for each in two["workers"]] == [one["status"]["sparse_calls"]] * 2
    assert one["tokens"] != run(tmp_path, llama, PROMPTS["long"])["tokens"]


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


class FlashAttention:
    """Stands for vLLM's FlashAttention where there is no GPU: the same inputs, in torch; counts what it was given."""

    def __init__(self, backend):
        self.tokens = []
        self.backend = backend

    def forward(self, impl, layer, query, key, value, kv_cache, metadata, output):
        starts = metadata.query_start_loc_cpu.tolist()
        lengths = metadata.seq_lens.tolist()
        sequences = Sequences(metadata.block_table_tensor, metadata.seq_lens, starts, lengths)
        self.tokens.append(starts[-1])
        q, pages = self.backend.widened(layer, query, output.dtype), self.backend.pages_of(layer, kv_cache)
        dense_attention(q, pages, sequences, sequences.rows, impl.paged.softmax, output)
        return output

    def build(self, common_prefix_len, common, fast_build=False):
        return SimpleNamespace(**vars(common))


@pytest.mark.parametrize("case", ["mixed", "mixed, fp8", "failing", "dense", "decoding"])
def test_on_cuda_flash_attention_gets_what_is_dense(case, telemetry, monkeypatch):
    """The routing of the CUDA backend, with stand-ins for the two calls that need a GPU. vLLM's cache in fp8 is bytes,
    and queries come in fp8, too."""
    from paged_steps import CLOSE, DECODE, STEPS, Batch, deployed, layer_of, policy_of
    from paged_steps import LENGTHS as MIXED
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from dynaxx.integrations.runtime.paged_layer import Step
    from dynaxx.integrations.vllm import backend as vllm_backend
    from dynaxx.integrations.vllm import cuda as vllm_cuda

    flash = FlashAttention(vllm_backend)
    parent = vllm_cuda.FlashAttentionMetadataBuilder
    monkeypatch.setattr(vllm_cuda.FlashAttentionImpl, "forward", lambda impl, *args: flash.forward(impl, *args))
    monkeypatch.setattr(parent, "build", lambda builder, *args: flash.build(*args))
    steps = case == "decoding"
    batch = Batch(STEPS if steps else MIXED, fp8="fp8" in case)
    ready = deployed(policy_of(*((DECODE,) if steps else ()), dense_below=50), telemetry)
    paged, sequences = layer_of(telemetry), batch.sequences
    starts = torch.tensor([0, *(n for n, _ in (STEPS if steps else MIXED))]).cumsum(0, dtype=torch.int32)
    tokens, most = int(starts[-1]), max(n for n, _ in (STEPS if steps else MIXED))
    common = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=sequences.seqused_k, num_reqs=8,
        num_actual_tokens=tokens, max_query_len=most, max_seq_len=300, block_table_tensor=sequences.page_table,
        slot_mapping=torch.arange(tokens), seq_lens_cpu_upper_bound=sequences.seqused_k,
    )  # fmt: skip
    builder = object.__new__(vllm_cuda.CudaBuilder)
    builder.bound, builder._parts, builder.updates = [paged], flash, JointUpdates(0)
    builder.limits, builder.most_captured = LayerLimits([0] if steps else [], "cpu"), 8
    builder.engine = SimpleNamespace(step=lambda found: Step(found, ready, killed=case == "dense"))
    metadata = builder.build(0, common)
    impl = object.__new__(vllm_cuda.CudaImpl)
    impl.paged = paged
    if case == "failing":
        monkeypatch.setattr("dynaxx.integrations.runtime.paged_layer.attend_in_place", lambda *args, **kwargs: 1 / 0)
    out = torch.full_like(batch.q, torch.nan)
    keys, memory, queries = torch.zeros(len(batch.q), 2, 16), batch.pages.memory, batch.q
    layer = SimpleNamespace(_k_scale=batch.pages.k_scale, _v_scale=batch.pages.v_scale, _q_scale=torch.tensor(0.02))
    if "fp8" in case:
        memory, queries = memory.view(torch.uint8), stored(batch.q, layer._q_scale)
        batch.q = queries.float() * layer._q_scale
    impl.forward(layer, queries, keys, keys, memory, metadata, out)
    step = Step(sequences, ready)
    want = torch.full_like(out, torch.nan)
    dense_attention(batch.q, batch.pages, sequences, sequences.rows, paged.softmax, want)
    if "mixed" in case:
        assert layer_of(telemetry).sparse(batch.q, batch.pages, step, want)
    if steps:
        assert paged.sparse(batch.q, batch.pages, step, want)
    expected = [] if steps else [1 + 40 + 1 + 3] if "mixed" in case else [tokens]
    assert flash.tokens == expected
    torch.testing.assert_close(out[:tokens], want[:tokens], **CLOSE)


def test_on_cuda_dynaxx_writes_the_chunks_of_layers_with_rules(monkeypatch):
    from dynaxx.integrations.vllm import cuda as vllm_cuda

    wrote = []
    monkeypatch.setattr(vllm_cuda.FlashAttentionImpl, "do_kv_cache_update", lambda impl, *args: wrote.append("vLLM"))
    monkeypatch.setattr(vllm_cuda, "write_chunk", lambda pages, k, v, slots: wrote.append(len(slots)) or len(slots) > 1)
    impl = object.__new__(vllm_cuda.CudaImpl)
    given = torch.zeros(2, 1, 4), torch.zeros(2, 1, 4), torch.zeros(3, 1, 16, 8)
    layer = SimpleNamespace(_k_scale=torch.ones(()), _v_scale=torch.ones(()))
    for paged, slots in ((None, [0, 1]), (object(), [0, 1]), (object(), [0])):
        impl.paged = paged
        impl.do_kv_cache_update(layer, *given, torch.tensor(slots))
    assert wrote == ["vLLM", 2, 1, "vLLM"]


@pytest.mark.parametrize(
    ("mode", "largest"), [("NONE", 0), ("PIECEWISE", 0), ("FULL_DECODE_ONLY", 48), ("FULL_AND_PIECEWISE", 48)]
)
def test_on_cuda_steps_are_captured_up_to_vllms_largest_graph(mode, largest):
    from vllm.config import CUDAGraphMode

    from dynaxx.integrations.vllm.cuda import CudaBuilder

    compilation = SimpleNamespace(cudagraph_mode=CUDAGraphMode[mode], max_cudagraph_capture_size=48)
    assert CudaBuilder.largest_capture(SimpleNamespace(compilation_config=compilation)) == largest


BROKEN = {
    "missing": (None, "no such file"),
    "no JSON": ("{", "is not JSON"),
    "wrong field": ('{"format": "dynaxx.policy", "version": 1, "model": {"model_type": "llama"}}', "`model.layers`"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_bad_policy_stops_the_engine(case, tmp_path, llama):
    text, said = BROKEN[case]
    path = tmp_path / "bad.json"
    if text is not None:
        path.write_text(text)
    done = run(tmp_path, llama, [[5, 6]], policy=path, check=False)
    assert done.returncode != 0
    assert said in done.stderr[done.stderr.rindex("Error: ") :]


def test_a_policy_of_another_model_stops_the_engine(tmp_path, llama, gemma):
    path = policy_file(tmp_path, gemma, dx.Rule.of(SPARSE))
    done = run(tmp_path, llama, [[5, 6]], policy=path, check=False)
    assert done.returncode != 0
    assert "the policy is for another model" in done.stderr


@pytest.fixture(scope="module")
def smollm2():
    from dynaxx.lab.models import resolve_model

    try:
        return resolve_model("smollm2")
    except ImportError as error:
        pytest.skip(str(error))


def test_smollm2_speaks_as_in_vllm_at_density_one(smollm2, tmp_path):
    """Real weights, real text: 20 prompts, greedy, token for token."""
    import transformers

    from dynaxx.lab.texts import pydoc_text

    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    ids = tokenizer(pydoc_text()[:200_000], add_special_tokens=False)["input_ids"]
    draw = random.Random(0)
    lengths = [draw.randrange(4, 400) for _ in range(18)] + [900, 1300]
    prompts = [ids[start : start + n] for start, n in ((draw.randrange(len(ids) - n), n) for n in lengths)]
    policy = policy_file(tmp_path, smollm2, dx.Rule.of(EVERYTHING), DECODE_EVERYTHING, block_size=64)
    arguments = {"max_num_batched_tokens": 512, "max_tokens": 16}
    got = run(tmp_path, smollm2, prompts, policy=policy, **arguments)
    assert len(got["status"]["sparse_layers"]) == 30
    same(got, run(tmp_path, smollm2, prompts, **arguments))


def test_guessed_tokens_change_nothing(smollm2, tmp_path):
    """Speculation by ngrams: several queries a step, at full density vLLM's own tokens, in fewer passes than tokens."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    prompts = [tokenizer("red, green, blue, white, black, " * 20, add_special_tokens=False)["input_ids"]]
    policy = policy_file(tmp_path, smollm2, dx.Rule.of(EVERYTHING), DECODE_EVERYTHING, block_size=64)
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    got = run(tmp_path, smollm2, prompts, max_tokens=24, policy=policy, speculative_config=ngram)
    same(got, run(tmp_path, smollm2, prompts, max_tokens=24))
    assert 0 < got["status"]["sparse_calls"] < 30 * 24, "no guess was right"


def test_a_lora_adapter_changes_a_sparse_answer(llama, tmp_path):
    from safetensors.torch import save_file

    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM"}))
    weights, gen = {}, torch.Generator().manual_seed(0)
    for layer, (name, size) in itertools.product(range(3), (("q_proj", 128), ("v_proj", 64))):
        place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        weights[f"{place}.lora_A.weight"] = 0.3 * torch.randn(8, 128, generator=gen)
        weights[f"{place}.lora_B.weight"] = 0.3 * torch.randn(size, 8, generator=gen)
    save_file(weights, adapter / "adapter_model.safetensors")
    engine = {"enable_lora": True, "max_lora_rank": 8}
    policy = policy_file(tmp_path, llama, dx.Rule.of(EVERYTHING), DECODE_EVERYTHING)
    asked = {"lora": str(adapter)}
    got = run(tmp_path, llama, PROMPTS["mixed"], policy=policy, request=asked, **engine)
    assert got["status"]["sparse_calls"] > 0
    same(got, run(tmp_path, llama, PROMPTS["mixed"], request=asked, **engine))
    assert got["tokens"] != run(tmp_path, llama, PROMPTS["mixed"], policy=policy)["tokens"]


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


def test_a_draft_model_is_refused(llama, tmp_path):
    policy = policy_file(tmp_path, llama, dx.Rule.of(SPARSE))
    draft = {"model": str(llama), "num_speculative_tokens": 2}
    done = run(tmp_path, llama, [[5, 6]], policy=policy, check=False, speculative_config=draft)
    assert "draft models are not supported; use ngram" in done.stderr
