# SPDX-License-Identifier: Apache-2.0
"""Time to first token of a whole model: transformers' SDPA beside a policy, same process, Llama-3.1-8B's shape.

Weights are random, so this measures speed and memory, not quality. Needs a GPU of 80 GB for 128k tokens.

python benchmarks/models/gpu_prefill.py [--lengths 1024,8192,32768,131072] [--layers 32] [--json FILE]
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from triton.testing import do_bench

import dynaxx as dx
from dynaxx.integrations.transformers.apply_policy import model_facts
from dynaxx.lab.machine import need_gpu
from dynaxx.policy import Policy, Rule


def make_model(layers):
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=1 << 20, rope_theta=500000.0,
        attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    return model


def first_tokens(model, ids, policy, turns, passes):
    """Time SDPA and the policy in turns of `passes` forward passes; the first of several warms up.

    Returns:
        {"sdpa" | "dynaxx": (median milliseconds until the first token, peak of memory above the weights in MiB)}, and
        what the policy's layers did.
    """
    times, peaks = {"sdpa": [], "dynaxx": []}, {"sdpa": 0, "dynaxx": 0}
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()

    def turn(name):
        torch.cuda.reset_peak_memory_stats()
        taken = [first_token(model, ids) for _ in range(passes)]
        times[name] += taken[1:] or taken
        peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated() - before)

    for _ in range(turns):
        turn("sdpa")
        with dx.apply(model, policy) as handle:
            turn("dynaxx")
            stats = handle.stats()
    middle = lambda taken: sorted(taken)[(len(taken) - 1) // 2]
    return {name: (middle(times[name]), peaks[name] / 2**20) for name in times}, stats


def first_token(model, ids):
    """Return the milliseconds of the GPU until the first token."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    with torch.inference_mode():
        out = model(ids, logits_to_keep=1, use_cache=True)
        out.logits.argmax(-1)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def shares(seqlen, rule, block_size, layers):
    """Return milliseconds of all layers' dense attention, sparse attention and selection, alone, on random tensors."""
    q, k, v = (torch.randn(1, seqlen, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (32, 8, 8))
    choose = lambda: dx.select_blocks(q, k, rule, block_size=block_size)
    layout, views = choose(), [x.transpose(1, 2) for x in (q, k, v)]
    dense = lambda: torch.nn.functional.scaled_dot_product_attention(*views, is_causal=True, enable_gqa=True)
    timed = (dense, lambda: dx.sparse_attention(q, k, v, layout), choose)
    return [round(layers * do_bench(run, warmup=5, rep=30, return_mode="median"), 1) for run in timed]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="1024,8192,32768,131072")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--dense-below", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a fifth of the passes over short prompts")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    need_gpu()
    torch.manual_seed(0)
    model = make_model(args.layers)
    attention = dx.SlidingWindow(1024) | dx.Sink(128) | dx.TopK(0.1)
    policy = Policy(
        model=model_facts(model),
        block_size=args.block_size,
        dense_below=args.dense_below,
        rules=[Rule.of(attention)],
    )
    rows = []
    for seqlen in map(int, args.lengths.split(",")):
        ids = torch.randint(0, 128000, (1, seqlen), device="cuda")
        turns, passes = (2, 1) if seqlen > 65536 else (3, 2) if seqlen > 16384 else (2, 3) if args.quick else (5, 6)
        found, stats = first_tokens(model, ids, policy, turns, passes)
        (dense, dense_peak), (sparse, sparse_peak) = found["sdpa"], found["dynaxx"]
        dense_ms, attend_ms, select_ms = shares(seqlen, attention, args.block_size, args.layers)
        row = {
            "seqlen": seqlen,
            "sdpa_ms": round(dense, 1),
            "dynaxx_ms": round(sparse, 1),
            "speedup": round(dense / sparse, 3),
            "dense_attention_ms": dense_ms,
            "sparse_attention_ms": attend_ms,
            "selection_ms": select_ms,
            "rest_ms": round(dense - dense_ms, 1),
            "sdpa_peak_MiB": round(dense_peak),
            "dynaxx_peak_MiB": round(sparse_peak),
            "sparse_calls": stats["sparse_calls"],
            "dense_calls": stats["dense_calls"],
        }
        rows.append(row)
        print(row, flush=True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.layers} layers, {attention}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
