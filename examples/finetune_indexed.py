# SPDX-License-Identifier: Apache-2.0
"""Train the indexers of a converted model on real text, then the model with them, and ask it for hidden needles.

    dynaxx convert smollm2 --to indexed --tokens 1024 --out build/smollm2-indexed
    python examples/nsa_data.py build/text.bin
    python examples/finetune_indexed.py build/smollm2-indexed --out build/indexed --learn build/text.bin    # on a GPU
    python examples/finetune_indexed.py build/smollm2-indexed --out build/check --context 256 --tokens 64 \
        --dense-steps 2 --steps 2 --needles 2                                                           # on a CPU

`dynaxx convert` starts the indexers as some heads of attention. First attention sees everything, the model's own
weights stay, and the indexers learn what it looks at. Then every query attends to the tokens that its indexer chooses,
and all weights learn.

Text to measure on is Python's documentation, its odd sections. Text to learn from is --learn, or the even sections,
which are short. A needle is a sentence with a number, at a random place of a held-out sequence that asks for it at its
end. Printed and written to finetune.json, with dense attention and with chosen tokens: held-out loss, and the share of
needles whose digits all come first.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from finetune_nsa import autocast, loss_of, sequences
from nsa_trainer import check_finite, make_folder

from dynaxx.lab.files import write_text
from dynaxx.lab.models import LoadedModel, load_model, save_model
from dynaxx.lab.texts import load_text, split_text
from dynaxx.trained.tokens.choice import TopKTokens
from dynaxx.trained.transformers.indexed_llama import IndexedLlamaForCausalLM

PLACES = ("Lisbon", "Nairobi", "Oslo", "Quito", "Hanoi", "Cairo", "Perth", "Dublin")


def needle_rows(tokenizer, rows, count, seed):
    """Return (tokens, digits) of `count` sequences: the last `digits` tokens are the answer."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda most: int(torch.randint(most, (1,), generator=generator))
    encode = lambda text: torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    made = []
    for i in range(count):
        place, number = PLACES[draw(len(PLACES))], 10000 + draw(90000)
        needle = encode(f"\n\nThe secret number of {place} is {number}.\n\n")
        question, answer = encode(f"\n\nThe secret number of {place} is"), encode(f" {number}")
        row = rows[i % len(rows)]
        text = row[: len(row) - len(needle) - len(question) - len(answer)]
        at = draw(len(text))
        made.append((torch.cat([text[:at], needle, text[at:], question, answer]), len(answer)))
    return made


@torch.no_grad()
def found(model, needles):
    """Return the share of needles whose answer's tokens all come first."""
    right = 0
    for row, digits in needles:
        with autocast(model.device):
            logits = model(row[None].to(model.device), logits_to_keep=digits + 1).logits[0, :-1]
        right += bool((logits.argmax(-1).cpu() == row[-digits:]).all())
    return right / max(1, len(needles))


def without(text, held_out):
    """Return a text without the paragraphs of another."""
    measured = set(held_out.split("\n\n"))
    return "\n\n".join(part for part in text.split("\n\n") if part not in measured or len(part) < 80)


def measure(model, held_out, needles, dense):
    """Return held-out loss and the share of needles found, with dense attention or with chosen tokens."""
    model.eval()
    model.set_dense(dense)
    return {"loss": round(loss_of(model, held_out), 4), "needles": found(model, needles)}


def train(model, rows, args, steps, rates, only_indexers):
    """Train for some steps; return the mean recall of the last ten.

    Args:
        model: the model.
        rows: sequences.
        args: the command line.
        steps: how many.
        rates: learning rates of the indexers and of everything else.
        only_indexers: attend to everything, and let nothing but the indexers learn.
    """
    model.train()
    model.set_dense(only_indexers)
    groups = [[], []]
    for name, parameter in model.named_parameters():
        groups[".indexer." not in name].append(parameter)
        parameter.requires_grad_(".indexer." in name or not only_indexers)
    kept = [{"params": group, "lr": rate} for group, rate in zip(groups, rates, strict=True) if rate]
    optimizer = torch.optim.AdamW(kept, weight_decay=0.0)
    recalls, begin = [], time.perf_counter()
    for step in range(steps):
        generator = torch.Generator().manual_seed(args.seed * 10**7 + step)
        batch = rows[torch.randint(len(rows), (args.batch,), generator=generator)].to(model.device)
        for group, rate in zip(optimizer.param_groups, [rate for rate in rates if rate], strict=True):
            group["lr"] = rate * min(1.0, (step + 1) / 10, (steps - step) / (0.4 * steps))
        with autocast(model.device):
            if only_indexers:  # the loss of text has no gradient for them
                model.model(batch, use_cache=False)
                loss = model.index_loss()[0]
            else:
                loss = model(batch, labels=batch, use_cache=False).loss
        loss.backward()
        check_finite(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), f"gradients of step {step}")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        kl, recall = (float(x.detach()) for x in model.index_loss())
        recalls.append(recall)
        if step % 10 == 0 or step == steps - 1:
            said = f"indexers {kl / len(model.model.layers):.4f} per layer"
            if not only_indexers:
                said = f"loss {float(loss.detach()) - kl:.4f}, {said}"
            print(f"  step {step}: {said}, attention on chosen tokens {recall:.1%}, "
                  f"{time.perf_counter() - begin:.0f} s", flush=True)  # fmt: skip
    return sum(recalls[-10:]) / max(1, len(recalls[-10:]))


def run(args):
    """Train and measure; return what was found."""
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        text = load_text(args.text)
        learn = args.learn.read_bytes().decode("utf-8", "ignore") if args.learn else None  # may end within a character
        model, tokenizer = load_model(args.model, device=device)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if not isinstance(model, IndexedLlamaForCausalLM):
        raise SystemExit(f"{args.model} has no indexers; make it with `dynaxx convert MODEL --to indexed`")
    make_folder(args.out)
    if args.tokens:
        model.config.index_tokens = args.tokens
        for layer in model.model.layers:
            layer.self_attn.choice = TopKTokens(args.tokens)
    parts = split_text(text)
    learn = sequences(tokenizer, without(learn, parts.held_out) if learn else parts.calibration, args.context)
    held_out = sequences(tokenizer, parts.held_out, args.context)
    needles = needle_rows(tokenizer, held_out, args.needles, args.seed)
    held_out = held_out[: args.eval_sequences]
    rows = []

    def note(stage, dense):
        rows.append({"stage": stage, "attention": "dense" if dense else f"{model.config.index_tokens} tokens"})
        rows[-1] |= measure(model, held_out, needles, dense)
        print(rows[-1], flush=True)

    note("before", True)
    note("before", False)
    recall = {"indexers": train(model, learn, args, args.dense_steps, (args.index_lr, 0.0), True)}
    note("indexers trained", False)
    recall["all"] = train(model, learn, args, args.steps, (args.index_lr, args.lr), False)
    note("all trained", False)
    note("all trained", True)
    model.requires_grad_(True)
    results = {"context": args.context, "tokens": model.config.index_tokens, "recall": recall, "rows": rows}
    save_model(LoadedModel(model, tokenizer), args.out)
    write_text(args.out / "finetune.json", json.dumps(results, indent=1))
    return results


def arguments(argv=None):
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder that `dynaxx convert --to indexed` wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", default="pydoc", help="a text file, or 'pydoc'")
    parser.add_argument("--learn", type=Path, help="a text file to learn from, as nsa_data.py packs it; paragraphs "
                        "that are measured on are left out")  # fmt: skip
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--tokens", type=int, help="that each query attends to; default: the model's own")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dense-steps", type=int, default=60, help="of the indexers, beside dense attention")
    parser.add_argument("--steps", type=int, default=40, help="of all weights, over chosen tokens")
    parser.add_argument("--lr", type=float, default=2e-5, help="of the model's own weights")
    parser.add_argument("--index-lr", type=float, default=1e-3, help="of the indexers")
    parser.add_argument("--needles", type=int, default=32)
    parser.add_argument("--eval-sequences", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device")
    args = parser.parse_args(argv)
    if not (args.model / "config.json").is_file():
        parser.error(f"there is no model in {args.model}; make one with `dynaxx convert MODEL --to indexed --out ...`")
    if args.learn and not args.learn.is_file():
        parser.error(f"there is no text in {args.learn}; make one with `python nsa_data.py {args.learn}`")
    return args


if __name__ == "__main__":
    run(arguments())
