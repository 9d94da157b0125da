# SPDX-License-Identifier: Apache-2.0
"""Measure perplexity on texts and answers to the prompts of tasks, dense or under a policy, for `tasks.py`."""

import contextlib
import copy
import sys
import time

import torch

from dynaxx.integrations.transformers.apply_policy import apply
from dynaxx.integrations.transformers.decoder import cache_of, with_cache
from dynaxx.lab.perplexity import logits_of, token_losses
from dynaxx.lab.tasks.score import other_answers

STARTED = time.monotonic()
TOGETHER = 6  # prompts whose caches are held at once, since applying a policy takes time


def shown(what):
    """Print a finished step and the seconds since the start on stderr."""
    print(f"{time.monotonic() - STARTED:.1f} s: {what}", file=sys.stderr, flush=True)


def attention_of(model, policy=None, own_kernels=False):
    """Return a context in which a model runs a policy, or dense attention.

    With `own_kernels`, dynaxx's exact kernels also compute what the policy leaves to the model: windows, for example,
    and everything without a policy. Long prompts of models with windows take a fraction of the time.
    """
    if policy is None:
        return apply(model) if own_kernels else contextlib.nullcontext()
    return apply(model, policy, own_pattern=own_kernels)


def dense_losses(model, texts):
    """Return the dense losses of the stretches of each text."""
    return [[token_losses(model, ids) for ids in each] for each in texts]


def perplexity_rise(model, policy, texts, dense):
    """Return the relative rise of perplexity on each text, a list of stretches, given its dense losses."""
    found = []
    with attention_of(model, policy):
        for each, before in zip(texts, dense, strict=True):
            rise = torch.cat([token_losses(model, ids) - known for ids, known in zip(each, before, strict=True)])
            found.append(float(rise.double().mean().expm1()))
    return found


@torch.no_grad()
def scored(model, samples, policy=None, others=False, own_kernels=False):
    """Return what each of the samples scores under a policy, or dense.

    A prompt is one prefill. Its answer then follows densely in one pass.

    Args:
        model: the model.
        samples: samples of one task.
        policy: the policy of the prompts.
        others: also score the answers of other samples after each prompt.
        own_kernels: see `attention_of`.

    Returns:
        The log-probability per token, the share of the answers whose tokens are all the most likely ones, and with
        `others` how much higher that log-probability is than that of the other answers; None without any.
    """
    found = []
    for at in range(0, len(samples), TOGETHER):
        some = samples[at : at + TOGETHER]
        with attention_of(model, policy, own_kernels) as handle:
            read = [model.base_model(each.prompt.to(model.device), use_cache=True) for each in some]
            assert policy is None or handle.stats()["sparse_calls"] > 0, "the prompts ran dense"
        for index, (sample, one) in enumerate(zip(some, read, strict=True), at):
            wrong = other_answers(samples, index) if others else ()
            rest = [answered(model, each, copy.deepcopy(one))[0] for each in wrong]
            logprob, match = answered(model, sample.answer, one, sample.ends)
            gap = (logprob - sum(rest) / len(rest) if rest else None,) if others else ()
            found.append((logprob, match, *gap))
    return found


def answered(model, answer, read, ends=()):
    """Score an answer (a,) after a prompt; `ends` are the numbers of its tokens up to each of its parts."""
    answer, cache = answer.to(model.device), cache_of(read)
    hidden = [read[0][:, -1:]]
    if len(answer) > 1:
        hidden.append(model.base_model(answer[None, :-1], use_cache=True, **with_cache(model.base_model, cache))[0])
    logprobs = logits_of(model, torch.cat(hidden, 1))[0].log_softmax(-1)
    right = logprobs.argmax(-1) == answer
    found = [bool(right[a:b].all()) for a, b in zip((0, *ends), ends, strict=False)]
    return float(logprobs.gather(1, answer[:, None]).mean()), sum(found) / max(1, len(found))
