# SPDX-License-Identifier: Apache-2.0
"""Which kernels a real vLLM's tokens get: outputs equal vLLM's own, on the CPU and by stand-ins for CUDA."""

import itertools
import json
import random
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

import dynaxx as dx
from dynaxx.integrations.runtime.paged import Sequences, dense_attention, stored
from dynaxx.integrations.runtime.paged_decode import LayerLimits
from dynaxx.integrations.runtime.summary_updates import JointUpdates
from vllm_models import (
    CHUNKS,
    DECODE_EVERYTHING,
    EVERYTHING,
    PROMPTS,
    SIZES,
    SPARSE,
    policy_file,
    run,
    same,
    save,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


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


@pytest.mark.parametrize("page", [128, 16])
def test_steps_that_graphs_capture_decode_the_same_tokens(page, tmp_path, llama):
    """The device decides which sequences decode sparse, and kernels run before the first request, as on CUDA."""
    decode = dx.Rule.of(dx.Sink(32) | dx.TopK(128 // page, dx.MinMax()), phase="decode", block_size=page)
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
