# SPDX-License-Identifier: Apache-2.0
"""Measure what decode rules lose on real weights: the dense model's text, long generations, and tasks.

    python benchmarks/quality/decoding.py smollm2 --pages 16,64,128 --reads 0.125,0.25 --out decoding.json

A rule reads the first page, the last 128 tokens, and the best pages by `MinMax(bound=0.5)`, one share for all heads;
`--reads` counts all of them together. Prompts of five kinds of text are read densely, all but their last token.

"text": the dense model draws `--steps` tokens; along these, each rule's rise of the loss with its standard error and
the share of equal greedy tokens. "long": each rule draws `--long` tokens itself, with the random numbers of the dense
model; the dense model's loss on the first and the last quarter (drift), and the share of 8-grams that were there before
(repetition). "tasks": RULER's tasks, whose answers are decoded; nats lost per token, and answers found. Rows are
printed and written at once; a part ends when `--seconds` are over.
"""

import argparse
import copy
import json
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import dynaxx as dx
from dynaxx.integrations.transformers.apply_policy import model_facts
from dynaxx.integrations.transformers.decoder import cache_of, with_cache
from dynaxx.lab.kinds import KINDS, text_of
from dynaxx.lab.models import load_model
from dynaxx.lab.perplexity import evaluating, logits_of, token_losses
from dynaxx.lab.tasks.haystack import Haystack
from dynaxx.lab.tasks.suite import make_task, named_tasks
from dynaxx.lab.texts import encode, load_text, split_text
from dynaxx.lab.tune.decode import WINDOW, decode_rules

GRAM = 8  # tokens whose sequence counts as a repetition


def policy_of(model, page_size, read, tokens):
    """Return a policy that reads a share of the pages of `tokens` tokens, with the first page and the window."""
    facts = model_facts(model)
    share = round(read - (page_size + WINDOW) / tokens, 4)
    if share <= 0:
        raise SystemExit(f"the first page and the window of pages of {page_size} are more than {read:.1%}")
    layers = list(range(facts.layers))
    shares = [[share] * facts.kv_heads] * facts.layers
    rules = decode_rules(shares, layers, facts.q_heads // facts.kv_heads, page_size)
    return dx.Policy(model=facts, rules=tuple(rules))


@torch.no_grad()
def read(model, ids):
    """Return the cache of a prompt that was read densely."""
    return cache_of(model.base_model(ids, use_cache=True))


@torch.no_grad()
def decoded(model, cache, token, count, policy, feed):
    """Decode from a copy of a cache, and yield logits (batch, vocabulary); `feed(at, logits)` is the next token."""
    cache, handle = copy.deepcopy(cache), dx.apply(model, policy) if policy is not None else None
    try:
        for at in range(count):
            out = model.base_model(token, use_cache=True, **with_cache(model.base_model, cache))
            cache, logits = cache_of(out), logits_of(model, out[0][:, -1])
            yield logits
            token = feed(at, logits)
    finally:
        if handle is not None:
            handle.remove()


def drawn(model, cache, token, count, policy):
    """Return (batch, count) tokens that the model draws; the same random numbers for every policy."""
    generator, written = torch.Generator().manual_seed(0), []

    def feed(at, logits):
        noise = torch.rand(logits.shape, generator=generator).clamp_min(1e-20).log().neg().log().to(logits.device)
        written.append((logits.float() - noise).argmax(-1, keepdim=True))
        return written[-1]

    for _ in decoded(model, cache, token, count, policy, feed):
        pass
    return torch.cat(written, 1)


def repeated(rows):
    """Return the share of 8-grams that stand earlier in their row."""
    found = total = 0
    for row in rows.tolist():
        grams = [tuple(row[i : i + GRAM]) for i in range(len(row) - GRAM + 1)]
        found, total = found + len(grams) - len(set(grams)), total + len(grams)
    return found / total


def text(model, prompts, cache, dense, policies, args, report):
    """Compare each rule with the dense model along the dense model's own text."""
    ids = torch.cat([prompts[:, -1:], dense[:, : args.steps]], 1)
    found = {}
    for name, policy in (("dense", None), *policies):
        losses, best = [], []
        for at, logits in enumerate(
            decoded(model, cache, ids[:, :1], args.steps, policy, lambda at, _: ids[:, at + 1 : at + 2])
        ):
            losses.append(cross_entropy(logits.float(), ids[:, at + 1], reduction="none"))
            best.append(logits.argmax(-1))
        found[name] = torch.stack(losses, 1).double(), torch.stack(best, 1)
        rise, same = found[name][0] - found["dense"][0], found[name][1] == found["dense"][1]
        report("text", name, loss=float(found[name][0].mean()), rise=float(rise.mean().expm1()),
               error=float(rise.std() / rise.numel() ** 0.5), agreement=float(same.double().mean()),
               by_kind=rise.mean(1).expm1().tolist())  # fmt: skip


def long(model, prompts, cache, dense, policies, args, report):
    """Let each rule write a long text, and score it by the dense model."""
    quarter = args.long // 4
    for name, policy in (("dense", None), *policies):
        rows = dense if policy is None else drawn(model, cache, prompts[:, -1:], args.long, policy)
        losses = torch.cat([token_losses(model, torch.cat([p, r])[None]) for p, r in zip(prompts, rows, strict=True)])
        losses = losses[:, -args.long :].double()
        report("long", name, first=float(losses[:, :quarter].mean()), last=float(losses[:, -quarter:].mean()),
               repeated=repeated(rows), repeated_last=repeated(rows[:, -2 * quarter :]),
               same=float((rows == dense).double().cumprod(1).sum(1).mean()))  # fmt: skip


def tasks(model, tokenizer, policies, args, report):
    """Decode the answers of tasks under each rule."""
    haystack, found = Haystack(split_text(load_text("pydoc")).held_out), {}
    for index in range(args.samples):  # a run that is stopped has samples of every task
        for task in named_tasks(tuple(args.tasks.split(","))):
            sample = make_task(task, tokenizer, haystack, args.tokens, seed=0, index=index)
            prompt, answer = sample.prompt.to(model.device), sample.answer[None].to(model.device)
            cache = read(model, prompt[:, :-1])
            for name, policy in (("dense", None), *policies):
                steps = decoded(model, cache, prompt[:, -1:], answer.shape[1], policy,
                                lambda at, _: answer[:, at : at + 1])  # noqa: B023  # fmt: skip
                logits = torch.cat(list(steps))
                loss = float(cross_entropy(logits.float(), answer[0]))
                right = (logits.argmax(-1) == answer[0]).tolist()
                ends = (0, *sample.ends)
                parts = [all(right[a:b]) for a, b in zip(ends, sample.ends, strict=False)]
                found.setdefault(name, []).append((task, loss, sum(parts) / len(parts)))
        for name, rows in found.items():
            lost = torch.tensor([a[1] - b[1] for a, b in zip(rows, found["dense"], strict=True)], dtype=torch.float64)
            by_task = {task: sum(r[2] for r in rows if r[0] == task) / (index + 1) for task in {r[0] for r in rows}}
            report("tasks", name, samples=len(rows), lost=float(lost.mean()),
                   error=float(lost.std()) / len(rows) ** 0.5,
                   found=sum(r[2] for r in rows) / len(rows), by_task=by_task)  # fmt: skip
        if time.monotonic() > args.until:
            return


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4096, help="of a prompt")
    parser.add_argument("--pages", default="16,64,128")
    parser.add_argument("--reads", default="0.125,0.25", help="shares of the pages, first page and window included")
    parser.add_argument("--steps", type=int, default=512, help="tokens of the dense model's text that are compared")
    parser.add_argument("--long", type=int, default=2000, help="tokens of a long generation")
    parser.add_argument("--tasks", default="niah_single_2,niah_multikey_1,niah_multivalue,vt,cwe,qa_1")
    parser.add_argument("--samples", type=int, default=8, help="of each task, at most")
    parser.add_argument("--parts", default="text,tasks,long")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=3600, help="after which no sample and no part begins")
    parser.add_argument("--out", type=Path, default=Path("decoding.json"))
    args = parser.parse_args()
    args.until = time.monotonic() + args.seconds
    model, tokenizer = load_model(args.model, device=args.device)
    sizes, reads = (
        [kind(each) for each in given.split(",")] for kind, given in ((int, args.pages), (float, args.reads))
    )
    policies = [(f"{size} {share}", policy_of(model, size, share, args.tokens)) for share in reads for size in sizes]
    rows = {}

    def report(part, rule, **values):
        rows[f"{part} {rule}"] = values
        print(part, rule, json.dumps(values), flush=True)
        args.out.write_text(json.dumps(rows, indent=1))

    prompts = torch.cat([encode(tokenizer, split_text(text_of(kind)).held_out, args.tokens) for kind in KINDS]).to(
        model.device
    )
    with evaluating(model):
        cache = read(model, prompts[:, :-1])
        dense = drawn(model, cache, prompts[:, -1:], args.long, None)
        print("the dense model has written", flush=True)
        for part in args.parts.split(","):
            if time.monotonic() > args.until:
                break
            if part == "tasks":
                tasks(model, tokenizer, policies, args, report)
            else:
                {"text": text, "long": long}[part](model, prompts, cache, dense, policies, args, report)


if __name__ == "__main__":
    main()
