# SPDX-License-Identifier: Apache-2.0
"""Random models, policies and prompts for tests of the plugin, and runs of vLLM in processes of their own."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import torch

import dynaxx as dx
from dynaxx.policy import ModelFacts

RUN = Path(__file__).with_name("vllm_engine_run.py")
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
