# SPDX-License-Identifier: Apache-2.0
"""Time vLLM's own attention beside a policy on a GPU: first tokens, and decoding.

    python benchmarks/serving/vllm_gpu.py own --out own.json
    python benchmarks/serving/vllm_gpu.py dynaxx --out dynaxx.json

Starts one engine with random weights of Llama-3.1-8B's shape and vLLM's defaults (torch.compile, CUDA
graphs, chunks of a prompt): `own` with vLLM's FLASH_ATTN, `dynaxx` with a policy. Prompts from 2,048 tokens on read a
window of 1,024 tokens, the first 128 and 10 % of the rest; decoding reads 10 % of the pages. It sends one prompt at a
time of each length, the longest first: the very first request is the one that a kernel without a warm-up would delay
most. Then it decodes as many sequences of 32,768 tokens as the cache holds, up to 16. Kernels that are compiled in
requests are listed.

Results are written after every step. `vllm_tokens.py` compares tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import option_types

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

PAGE = 128  # tokens: decode rules choose pages of vLLM's cache, so --block-size is theirs
SHAPES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 64},
    "qwen3-30b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
                  "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128,
                  "num_experts_per_tok": 8, "vocab_size": 151_936},
    "small-moe": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8,
                  "num_key_value_heads": 2, "head_dim": 64, "moe_intermediate_size": 64, "num_experts": 8,
                  "num_experts_per_tok": 2},
    "small": {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 8,
              "num_key_value_heads": 2, "head_dim": 64},
}  # fmt: skip
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 500000.0, "hidden_act": "silu",
         "tie_word_embeddings": False}  # fmt: skip
SINKS = {**LLAMA, "architectures": ["SinkLlamaForCausalLM"], "attention_bias": True, "sliding_window": 128,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
         "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
                             "beta_slow": 1.0, "original_max_position_embeddings": 4096}}  # fmt: skip
GEMMA2 = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh",
          "tie_word_embeddings": True, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0,
          "query_pre_attn_scalar": 64, "sliding_window": 512}  # fmt: skip
QWEN3 = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "rope_theta": 10_000_000.0,
         "hidden_act": "silu", "attention_bias": False, "norm_topk_prob": True, "decoder_sparse_step": 1,
         "mlp_only_layers": [], "tie_word_embeddings": False}  # fmt: skip
FAMILIES = {"llama": LLAMA, "gemma2": GEMMA2, "sinks": SINKS, "qwen3": QWEN3}
MIXTURES = ("qwen3-30b", "small-moe")  # shapes of the family "qwen3"


def save_model(folder: Path, shape: str, dtype: str, family: str = "llama", layers: int = 0) -> Path:
    """Write a configuration; weights are random, made by vLLM. `layers` is another number than the shape's."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"vocab_size": 32000, "rms_norm_eps": 1e-5, "max_position_embeddings": 270_000, "torch_dtype": dtype,
              "bos_token_id": 1, "eos_token_id": 2, **FAMILIES[family_of(shape, family)],
              **sizes_of(shape, layers)}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def sizes_of(shape: str, layers: int) -> dict[str, Any]:
    """Return the sizes of a shape, with another number of layers if `layers` is not 0."""
    return SHAPES[shape] | ({"num_hidden_layers": layers} if layers else {})


def family_of(shape: str, family: str) -> str:
    """Return the family of a shape's model."""
    return "qwen3" if shape in MIXTURES else family


def save_policy(
    path: Path,
    shape: str,
    kind: str,
    family: str = "llama",
    share: float | tuple[float, ...] = 0.1,
    layers: int = 0,
    *,
    window: int = 1024,
    decode: tuple[int, Any] | None = None,
) -> Path:
    """Write a policy: "sparse" is what is timed, "everything" reads every key through the sparse kernels.

    `share` is the part of the blocks that prompts of the large shapes read besides the window and the first 128 tokens,
    or one part per head, where each head chooses alone. `decode` is another size of the pages, and the rule for them.
    """
    import dynaxx as dx
    from dynaxx.policy import ModelFacts

    sizes, chosen = sizes_of(shape, layers), dx.TopK(share, per="head" if isinstance(share, tuple) else "group")
    facts = ModelFacts(
        model_type=FAMILIES[family_of(shape, family)]["model_type"], layers=sizes["num_hidden_layers"],
        head_dim=sizes["head_dim"], q_heads=sizes["num_attention_heads"], kv_heads=sizes["num_key_value_heads"],
    )  # fmt: skip
    if kind == "everything":
        prefill, decoding, borders = dx.SlidingWindow(64) | dx.TopK(1.0), dx.TopK(1.0), {}
    elif shape in ("8b", "1b", "qwen3-30b"):
        always, borders = dx.SlidingWindow(window) | dx.Sink(128), {"dense_below": 2048, "sparse_from": 2048}
        prefill, decoding = always | chosen, dx.SlidingWindow(1024) | dx.Sink(128) | dx.TopK(0.1)
    else:
        prefill = dx.SlidingWindow(128) | dx.Sink(128) | chosen
        decoding, borders = dx.SlidingWindow(128) | dx.Sink(128) | dx.TopK(2), {"dense_below": 600}
    page, decoding = decode or (PAGE, decoding)
    rules = (dx.Rule.of(prefill), dx.Rule.of(decoding, phase="decode", block_size=page))
    dx.save_policy(dx.Policy(model=facts, block_size=128, rules=rules, **borders), path)
    return path


def has_gpu() -> bool:
    """Return whether there is an NVIDIA GPU, without the seconds that torch takes to load."""
    return shutil.which("nvidia-smi") is not None


class Result(dict[str, Any]):
    """Numbers that are written whenever one is added."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def add(self, **values: Any) -> None:
        """Add, print and write."""
        self.update(values)
        for name, value in values.items():
            print(f"{name}: {json.dumps(value)}", flush=True)
        if self.path:
            Path(self.path).write_text(json.dumps(self, indent=1))


def prompt(draw: random.Random, tokens: int) -> dict[str, list[int]]:
    """Draw random tokens."""
    return {"prompt_token_ids": [draw.randrange(3, 31_000) for _ in range(tokens)]}


def start(model: Path, which: str, policy: Path | None, **arguments: Any) -> Any:
    """Start an engine with vLLM's own backend or with ours."""
    import torch

    os.environ.pop("DYNAXX_POLICY", None)
    if policy is not None:
        os.environ["DYNAXX_POLICY"] = str(policy)
    if torch.cuda.is_available():
        arguments.setdefault("attention_backend", "FLASH_ATTN" if which == "own" else "CUSTOM")
    from vllm import LLM

    defaults = {"skip_tokenizer_init": True, "enable_prefix_caching": False, "seed": 1, "disable_log_stats": True}
    return LLM(str(model), **(defaults | arguments))


def first_token(llm: Any, request: dict[str, list[int]]) -> float:
    """Return the seconds to the first token of one prompt."""
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=1, temperature=0, detokenize=False, ignore_eos=True)
    begun = time.perf_counter()
    llm.generate([request], parameters, use_tqdm=False)
    return time.perf_counter() - begun


def decoding(
    llm: Any, draw: random.Random, sequences: int, tokens: int, steps: int, chunk: int = 2048
) -> dict[str, Any]:
    """Decode some sequences together: what a step takes while all of them decode and none is a prompt."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    chunks = sequences * (tokens // chunk + 2)  # tokens that early sequences decode while late ones are prompts
    parameters = SamplingParams(max_tokens=chunks + steps, temperature=0, detokenize=False, ignore_eos=True)
    for at in range(sequences):
        engine.add_request(f"decode-{at}", prompt(draw, tokens), parameters)
    made: dict[str, int] = {}
    seconds = []
    while len(seconds) < steps and engine.has_unfinished_requests():
        begun = time.perf_counter()
        outputs = engine.step()
        taken = time.perf_counter() - begun
        for output in outputs:
            made[output.request_id] = len(output.outputs[0].token_ids)
        if len(made) == sequences and len(outputs) == sequences:
            seconds.append(taken)
    engine.abort_request([f"decode-{at}" for at in range(sequences)])
    while engine.has_unfinished_requests():
        engine.step()
    step = statistics.median(seconds[5:])
    return {"sequences": sequences, "context": tokens, "ms_per_step": step * 1e3, "tokens_per_second": sequences / step}


def run_engine(arguments: argparse.Namespace) -> None:
    """Start an engine and time it."""
    import torch

    from dynaxx.integrations.runtime.paged_warmup import compiled_kernels

    result, folder, draw = Result(arguments.out), Path(tempfile.mkdtemp()), random.Random(0)
    cuda = torch.cuda.is_available()
    lengths = arguments.lengths
    model = save_model(folder / "model", arguments.shape, "bfloat16" if cuda else "float32")
    policy = save_policy(folder / "policy.json", arguments.shape, "sparse") if arguments.which == "dynaxx" else None
    options: dict[str, Any] = {"load_format": "dummy", "max_model_len": max(lengths) + 256, "max_num_seqs": 16}
    if arguments.which == "dynaxx" and cuda:
        options["block_size"] = PAGE
    if cuda:
        options["gpu_memory_utilization"] = 0.92
    if arguments.chunk:
        options["max_num_batched_tokens"] = arguments.chunk
    if arguments.eager:
        options["enforce_eager"] = True
    begun = time.perf_counter()
    llm = start(model, arguments.which, policy, **options)
    config = llm.llm_engine.vllm_config
    cache = config.cache_config
    result.add(
        which=arguments.which, engine_start_s=round(time.perf_counter() - begun, 1), torch=torch.__version__,
        device=torch.cuda.get_device_name() if cuda else "cpu", chunk=config.scheduler_config.max_num_batched_tokens,
        block_size=cache.block_size, graphs=str(config.compilation_config.cudagraph_mode),
    )  # fmt: skip
    with compiled_kernels() as compiled:
        result.add(very_first_request_s={str(lengths[-1]): first_token(llm, prompt(draw, lengths[-1]))})
        times: dict[str, list[float]] = {}
        for tokens in (*reversed(lengths[:-1]), lengths[-1]):
            runs = 7 if tokens < 4000 else 4 if tokens < 40_000 else 2
            times[str(tokens)] = [first_token(llm, prompt(draw, tokens)) for _ in range(runs)]
            result.add(first_token_s=times)
        result.add(first_token_median_s={tokens: statistics.median(each) for tokens, each in times.items()})
        room = (cache.num_gpu_blocks or 0) * cache.block_size
        context = min(32_768, max(lengths) // 2)
        sequences = max(1, min(16, room // (context + 600)))
        result.add(decoding=decoding(llm, draw, sequences, context, 60))
        for tokens in random.Random(1).sample(range(16, min(20_000, max(lengths))), 12):  # lengths of any kind
            first_token(llm, prompt(draw, tokens))
    result.add(compiled_in_requests=compiled)
    if arguments.which == "dynaxx":
        from dynaxx.integrations.vllm import status

        found = status()
        result.add(status={key: value for key, value in found.items() if key != "sparse_layers"})
    if arguments.profile:
        profile(llm, prompt(draw, min(32_768, max(lengths))), arguments.profile)


def profile(llm: Any, request: dict[str, list[int]], path: str) -> None:
    """Write which kernels a prompt's time goes to."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        first_token(llm, request)
    table = found.key_averages().table(sort_by="self_device_time_total", row_limit=40, max_name_column_width=90)
    Path(path).write_text(table)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=("own", "dynaxx"))
    parser.add_argument("--shape", choices=tuple(SHAPES), default="8b")
    parser.add_argument(
        "--lengths",
        type=option_types.several(option_types.count),
        default="1000,8192,32768,131072",
        help="of prompts, ascending",
    )
    parser.add_argument("--chunk", type=int, default=0, help="tokens of a step, at most; vLLM's default by default")
    parser.add_argument("--eager", action="store_true", help="no torch.compile and no CUDA graphs")
    parser.add_argument("--profile", default="", help="a file for the kernels of one prompt")
    parser.add_argument("--out", default="", help="a JSON file")
    run_engine(parser.parse_args())


if __name__ == "__main__":
    main()
