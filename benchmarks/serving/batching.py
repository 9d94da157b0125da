# SPDX-License-Identifier: Apache-2.0
"""Time decoding steps in transformers' continuous batching: dense, and by a policy's page budget.

python benchmarks/serving/batching.py [--lengths 4000 3500 3800 3900] [--steps 40] [--threads 1]

A random Llama of 4 layers (8 / 2 heads of 64, fp32) on a CPU; a tenth of the pages of 64. Checks first: with all pages
a policy gives the tokens of dense. Times are CPU time of the process per step of all requests, the prompts taken off.
"""

import argparse
import time

import torch
import transformers

import dynaxx as dx
from dynaxx.integrations.transformers.apply_policy import model_facts

PAGE_SIZE = 64


def make_model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=32768,
        initializer_range=0.1,
        eos_token_id=None,
        bos_token_id=None,
    )
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()


def serve(model, prompts, new_tokens):
    """Return the new tokens of each request, and the CPU seconds of all requests together."""
    settings = transformers.GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    blocks = sum(-(-(len(ids) + new_tokens) // PAGE_SIZE) for ids in prompts) + 8
    config = transformers.ContinuousBatchingConfig(page_size=PAGE_SIZE, num_blocks=blocks, max_batch_tokens=4096)
    start = time.process_time()
    found = model.generate_batch(prompts, generation_config=settings, continuous_batching_config=config)
    seconds = time.process_time() - start
    return [one.generated_tokens for one in found.values()], seconds


def milliseconds(model, prompts, steps):
    """Return the CPU milliseconds of one decoding step."""
    few, many = (serve(model, prompts, new_tokens)[1] for new_tokens in (2, 2 + steps))
    return 1e3 * (many - few) / steps


def policy_of(model, rule):
    return dx.Policy(model=model_facts(model), rules=(dx.Rule.of(rule, phase="decode", block_size=PAGE_SIZE),))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4000, 3500, 3800, 3900])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = make_model()
    draw = lambda length: torch.randint(3, 320, (length,)).tolist()
    short, prompts = [draw(length) for length in (70, 200, 33)], [draw(length) for length in args.lengths]
    expected, _ = serve(model, short, 8)
    with dx.apply(model, policy_of(model, dx.TopK(1.0))) as handle, handle.continuous_batching():
        if serve(model, short, 8)[0] != expected:
            raise SystemExit("no times: with all pages a policy does not give the tokens of dense")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {args.threads} thread(s)")
    dense = milliseconds(model, prompts, args.steps)
    rule = dx.Sink(4) | dx.SlidingWindow(64) | dx.TopK(0.1, dx.MinMax())
    with dx.apply(model, policy_of(model, rule)) as handle, handle.continuous_batching():
        sparse = milliseconds(model, prompts, args.steps)
    print(f"requests of {args.lengths} tokens, a step: dense {dense:.1f} ms, by a tenth of the pages {sparse:.1f} ms,")
    print(f"{dense / sparse:.1f}x")


if __name__ == "__main__":
    main()
