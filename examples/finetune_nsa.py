# SPDX-License-Identifier: Apache-2.0
"""Recover a converted model's loss on real text, on a schedule from dense to sparse.

    dynaxx convert smollm2 --out build/smollm2-nsa
    python examples/finetune_nsa.py build/smollm2-nsa --out build/smollm2-tuned --context 8192 --minutes 5   # GPU
    python examples/finetune_nsa.py build/smollm2-nsa --out build/check --context 512 --steps 4              # CPU

At first every query selects all blocks; over the first half of the run the count falls to the model's own, and stays
there. Text is Python's documentation, split in sections: even ones to learn from, odd ones to measure on. Printed and
written to finetune.json: held-out loss with dense attention, of the model as converted, by step, and at the end. Text
itself teaches something, so compare with the same run of dense attention, `--dense`. A killed run goes on from its
last checkpoint.
"""

import argparse
import contextlib
import json
import math
import time
from pathlib import Path

import torch
from nsa_trainer import cannot_write, check_finite, load, make_folder, save

import dynaxx.trained.transformers.nsa_llama  # registers the model with transformers
from dynaxx.lab.files import write_text
from dynaxx.lab.models import LoadedModel, load_model, save_model
from dynaxx.lab.texts import load_text, split_text

NOT_SETTINGS = ("out", "device", "checkpointing", "save_every")


def sequences(tokenizer, text, context):
    """Return (n, context) tokens."""
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    if len(ids) < context:
        raise SystemExit(f"text has {len(ids):,} tokens, too few for a context of {context:,}")
    return ids[: len(ids) // context * context].view(-1, context)


def autocast(device):
    """Return a context that computes in bf16 on a GPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


@torch.no_grad()
def loss_of(model, rows):
    """Return the mean loss over sequences."""
    losses = []
    for row in rows:
        with autocast(model.device):
            losses.append(float(model(row[None].to(model.device), labels=row[None].to(model.device)).loss))
    return sum(losses) / len(losses)


def set_dense(model, dense):
    """Choose whether every layer attends to all tokens."""
    for layer in model.model.layers:
        layer.self_attn.dense = dense


def count_at(share, most, least):
    """Return the selected blocks after a share of the run: from all to the model's own over the first half."""
    return max(least, round(most * (least / most) ** min(1.0, 2 * share)))


def optimizer_of(model, lr):
    """Return AdamW and its groups' rates; parameters that dense attention did not have learn ten times as fast."""
    fresh = [p for name, p in model.named_parameters() if "self_attn.gate" in name or "compress" in name]
    known = {id(p) for p in fresh}
    rest = [p for p in model.parameters() if id(p) not in known]
    optimizer = torch.optim.AdamW([{"params": fresh, "lr": 10 * lr}, {"params": rest, "lr": lr}], weight_decay=0.0)
    return optimizer, [group["lr"] for group in optimizer.param_groups]


def measure(model, held_out, most, least):
    """Measure held-out loss before training: with dense attention, with all blocks, with the model's own count."""
    before = {}
    for name, dense, count in (("dense", True, least), ("all_blocks", False, most), ("converted", False, least)):
        set_dense(model, dense)
        model.set_slc_count(count)
        before[name] = loss_of(model, held_out)
    print(f"held-out loss: dense {before['dense']:.4f}, all blocks {before['all_blocks']:.4f}, {least} blocks before "
          f"training {before['converted']:.4f}", flush=True)  # fmt: skip
    return before


def loaded(args, device):
    """Return the model, its tokenizer, and the text to learn from and to measure on, each (n, context) tokens."""
    try:
        text = load_text(args.text)
        model, tokenizer = load_model(args.model, device=device)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if not isinstance(model, dynaxx.trained.transformers.nsa_llama.NsaLlamaForCausalLM):
        raise SystemExit(f"{args.model} has no native sparse attention; make one with `dynaxx convert`")
    train, held_out = (sequences(tokenizer, part, args.context) for part in split_text(text))
    return model, tokenizer, train, held_out[: args.eval_sequences]


def train_step(model, rows, optimizer, rates, step, share):
    """Learn from (batch, context) tokens. Rates rise for ten steps, then fall along a cosine with the run's share."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * min(1.0, (step + 1) / 10) * (0.55 + 0.45 * math.cos(math.pi * share))
    model.train()
    with autocast(model.device):
        loss = model(rows, labels=rows, use_cache=False).loss
    loss.backward()
    check_finite(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), f"gradients of step {step}")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    model.eval()


def write_results(args, model, tokenizer, results):
    """Save the model and what was measured."""
    try:
        save_model(LoadedModel(model, tokenizer), args.out)
        write_text(args.out / "finetune.json", json.dumps(results, indent=1))
    except OSError as error:
        raise cannot_write(error) from None


def run(args):
    """Train, and return what was measured."""
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model, tokenizer, train, held_out = loaded(args, device)
    least = model.config.sizes.slc_count
    most = max(least, -(-args.context // model.config.sizes.slc_block))
    optimizer, rates = optimizer_of(model, args.lr)
    make_folder(args.out)
    settings = {name: str(value) for name, value in vars(args).items() if name not in NOT_SETTINGS}
    state = load(args.out / "checkpoint.pt", settings)
    if state:
        print(f"goes on from step {state['step']}")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        before, curve, step, spent = state["before"], state["curve"], state["step"], state["seconds"]
    else:
        before, step, spent = measure(model, held_out, most, least), 0, 0.0
        curve = [{"step": 0, "slc_count": most, "loss": before["all_blocks"]}]
    set_dense(model, args.dense)
    if args.checkpointing:
        model.gradient_checkpointing_enable()
    begin = saved = time.perf_counter()
    kept = lambda: {"step": step, "settings": settings, "before": before, "curve": curve, "seconds": seconds,
                    "model": model.state_dict(), "optimizer": optimizer.state_dict()}  # fmt: skip
    while True:
        seconds = spent + time.perf_counter() - begin
        share = min(1.0, step / args.steps if args.steps else seconds / 60 / args.minutes)
        if share == 1.0:
            break
        model.set_slc_count(count_at(share, most, least))
        generator = torch.Generator().manual_seed(args.seed * 10**7 + step)
        rows = train[torch.randint(len(train), (args.batch,), generator=generator)].to(device)
        train_step(model, rows, optimizer, rates, step, share)
        step += 1
        if step % args.eval_every == 0:
            curve.append({"step": step, "slc_count": model.config.sizes.slc_count, "loss": loss_of(model, held_out)})
            print(curve[-1], flush=True)
        if time.perf_counter() - saved > args.save_every:
            save(args.out / "checkpoint.pt", kept())
            saved = time.perf_counter()
    save(args.out / "checkpoint.pt", kept())
    model.set_slc_count(least)
    results = {"context": args.context, "steps": step, **before, "final": loss_of(model, held_out), "curve": curve}
    attention = "dense attention" if args.dense else f"{least} blocks"
    print(f"held-out loss with {attention} after {step} steps: {results['final']:.4f}", flush=True)
    write_results(args, model, tokenizer, results)
    return results


def arguments(argv=None):
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder that `dynaxx convert` wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", default="pydoc", help="a text file, or 'pydoc'")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int)
    length.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--dense", action="store_true", help="train with dense attention, to compare")
    parser.add_argument("--lr", type=float, default=2e-5, help="of old weights; new ones learn ten times as fast")
    parser.add_argument("--eval-every", type=int, default=20)
    parser.add_argument("--eval-sequences", type=int, default=4)
    parser.add_argument("--save-every", type=float, default=120.0, help="seconds between checkpoints")
    parser.add_argument("--checkpointing", action="store_true", help="less memory, more time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device")
    args = parser.parse_args(argv)
    if not (args.model / "config.json").is_file():
        parser.error(f"there is no model in {args.model}; make one with `dynaxx convert MODEL --out {args.model}`")
    return args


if __name__ == "__main__":
    run(arguments())
