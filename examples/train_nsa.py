# SPDX-License-Identifier: Apache-2.0
r"""Train the same decoder with dense attention, a window, native sparse attention or an indexer, on equal tokens.

    python examples/nsa_data.py build/text.bin
    python examples/train_nsa.py --text build/text.bin --out build/nsa --minutes 6      # on a GPU, 30M parameters
    python examples/train_nsa.py --text build/text.bin --out build/tiny --tiny --steps 30  # on a CPU, a check
    python examples/train_nsa.py --data needle --text build/text.bin --out build/needle --steps 500 --context 8192 \
        --from-context 64 --lr 3e-3 --layers 4 --hidden 256 --cmp 8,4 --rotary 0.5 --find-first --eval-at 16384,32768

The variants take turns, a few steps each on the same batches, so that at any moment they have seen equal tokens; the
learning rate follows the share of steps done. A killed run goes on from its last checkpoint, whole or not there; one
that is done is measured again, as --eval-at and --speed-at say.
Written: results.json (held-out loss or accuracy by step, tokens per second, memory) and curves.png.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from nsa_data import KINDS, Text, make_data
from nsa_decoder import VARIANTS
from nsa_trainer import Trainer, cannot_write, check_finite, load, make_folder, save, sizes_of

from dynaxx.lab.files import write_text

LEARNED = 0.9  # accuracy of a task from which it counts as learned
SAY_EVERY = 15  # seconds between lines of progress in a log
ROUND = 10  # steps that a variant trains before the next one does
FULL = {"context": 4096, "batch": 8, "hidden": 512, "layers": 12, "heads": [8, 2, 64], "window": 512, "cmp": [32, 16],
        "slc_block": 64, "slc_count": 16}  # fmt: skip
TINY = {"context": 256, "batch": 4, "hidden": 64, "layers": 2, "heads": [4, 1, 16], "window": 32, "cmp": [16, 8],
        "slc_block": 16, "slc_count": 6}  # fmt: skip
NOT_SETTINGS = ("out", "device", "minutes", "tiny", "compile", "graphs", "save_every", "speed_at", "eval_at")


def context_at(args, share):
    """Return the tokens per sequence after a share of the run.

    With --from-context the length doubles, faster and faster, up to --context from 0.85 of the run on. Short contexts
    are learned in few steps, and longer ones build on them.
    """
    begin = args.from_context or args.context
    doublings = (args.context // begin).bit_length() - 1
    return begin << min(doublings, int((doublings + 1) * (share / 0.85) ** 1.5))


def run(args):
    """Train every variant, write the results, return them."""
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if args.text is None and args.data in ("text", "needle"):
        raise SystemExit("--text is needed: make the file with `python examples/nsa_data.py FILE`")
    source = make_data(args.data, Text(args.text) if args.text else None)
    settings = {name: str(value) for name, value in vars(args).items() if name not in NOT_SETTINGS}
    make_folder(args.out)
    saved = load(args.out / "checkpoint.pt", settings)
    trainers = {variant: Trainer(variant, args, device) for variant in args.variants}
    for variant, trainer in trainers.items():
        if saved:
            trainer.load(saved[variant])
    step = train(trainers, source, args, settings, saved or {"step": 0, "steps": args.steps})
    results = {
        "data": args.data,
        "context": args.context,
        "batch": args.batch,
        "steps": step,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "variants": {
            variant: {
                "parameters": trainer.parameters,
                "tokens": trainer.tokens,
                "tokens_per_second": round(trainer.tokens / trainer.seconds),
                "curve": trainer.curve,
                "at": {context: trainer.evaluate(held_out(source, args, context)) for context in args.eval_at},
                "speed": {context: trainer.speed(source, context) for context in args.speed_at},
            }
            for variant, trainer in trainers.items()
        },
    }
    for variant, values in results["variants"].items():
        _, loss, accuracy = values["curve"][-1]
        print(f"{variant}: {values['parameters']:,} parameters, loss {loss:.4f}, accuracy {accuracy:.3f}")
        for context, (loss, accuracy) in values["at"].items():
            print(f"    at {context:,}: loss {loss:.4f}, accuracy {accuracy:.3f}")
        for context, speed in values["speed"].items():
            peak = f", peak {speed['peak_gib']:.2f} GiB" if speed["peak_gib"] else ""
            print(f"    at {context:,}: {speed['tokens_per_second']:,} tokens/s{peak}")
    for line in unlearned(results, args.tiny):
        print(line)
    try:
        write_text(args.out / "results.json", json.dumps(results, indent=1))
        plot(results, args.out / "curves.png")
    except OSError as error:
        raise cannot_write(error) from None
    return results


def unlearned(results, tiny):
    """Return a line for each variant that did not learn its task, and what follows from it."""
    missed = {} if results["data"] == "text" else {
        variant: values["curve"][-1][2] for variant, values in results["variants"].items()
        if values["curve"][-1][2] < LEARNED
    }  # fmt: skip
    guess = f"(guessing: {1 / KINDS:.1%})"
    lines = [
        f"{variant} did not learn to {results['data']}: {found:.1%} right {guess}" for variant, found in missed.items()
    ]
    if missed and tiny:
        lines.append("--tiny checks that training runs; leave it out, or give sizes and --steps, to compare variants")
    elif missed:
        lines.append("docs/guides/train.md names settings under which dense and native sparse attention learn it")
    return lines


def train(trainers, source, args, settings, at):
    """Train from where a run is to its end, with evaluations and checkpoints; return the number of steps."""
    step, steps, begin = at["step"], at["steps"], time.perf_counter()
    if step:
        print(f"goes on from step {step} of {steps}")
    saved = last = said = begin
    tty = sys.stderr.isatty()
    print(f"training {', '.join(trainers)}, the first {ROUND} steps of each take longest", file=sys.stderr, flush=True)
    batches_held_out = held_out(source, args, args.context)
    while steps is None or step < steps:
        count = ROUND if steps is None else min(ROUND, steps - step)
        shares = [(step + i) / steps if steps else 0.0 for i in range(count)]
        contexts = [context_at(args, share) for share in shares]
        batches = [
            source.batch(args.batch * args.context // context, context, args.seed * 10**7 + step + i)
            for i, context in enumerate(contexts)
        ]
        for trainer in trainers.values():
            trainer.train(batches, shares)
        step += count
        if steps is None and step >= 2 * ROUND:  # the first round compiles; the second says how many fit in the time
            round_seconds = time.perf_counter() - last
            left = args.minutes * 60 * 0.85 - (time.perf_counter() - begin)
            steps = step + max(ROUND, int(left / round_seconds) * ROUND)
        if tty or time.perf_counter() - said > SAY_EVERY:
            said = time.perf_counter()
            spent, done = said - begin, step - at["step"]
            left = spent / done * (steps - step) if steps else args.minutes * 60 - spent
            line = f"{step}/{steps or '?'} steps, about {left:.0f} s to go "
            print(f"\r{line}\r" if tty else line, end="" if tty else "\n", file=sys.stderr, flush=True)
        if step % args.eval_every < count or step == steps:
            for variant, trainer in trainers.items():
                loss, accuracy = trainer.evaluate(batches_held_out)
                check_finite(loss, f"held-out loss of {variant} after {step} steps")
                trainer.curve.append((step, loss, accuracy))
                speed = trainer.tokens / max(1e-9, trainer.seconds)
                print(
                    f"{step}/{steps} {variant}: loss {loss:.4f}, accuracy {accuracy:.3f}, {speed:,.0f} tokens/s",
                    flush=True,
                )
            if steps and (step == steps or time.perf_counter() - saved > args.save_every):
                states = {variant: trainer.state() for variant, trainer in trainers.items()}
                save(args.out / "checkpoint.pt", {"step": step, "steps": steps, "settings": settings, **states})
                saved = time.perf_counter()
        last = time.perf_counter()
    return step


def held_out(source, args, context):
    """Return the batches to measure on: as many tokens each as in training, or one sequence."""
    rows = max(1, args.batch * args.context // context)
    return [source.batch(rows, context, 10**6 + i, "held_out") for i in range(args.eval_batches)]


def plot(results, path):
    """Plot held-out loss (or accuracy, for tasks) by tokens, and speed by context; nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return print("no curves.png: pip install matplotlib")
    timed = any(values["speed"] for values in results["variants"].values())
    figure = Figure(figsize=(11 if timed else 5.5, 4), layout="constrained")
    left, *right = figure.subplots(1, 1 + timed, squeeze=False)[0]
    which = 1 if results["data"] == "text" else 2
    for variant, values in results["variants"].items():
        tokens = [row[0] * results["batch"] * results["context"] / 1e6 for row in values["curve"]]
        left.plot(tokens, [row[which] for row in values["curve"]], label=variant)
        lengths = [int(context) for context in values["speed"]]
        for axes in right:
            speeds = [row["tokens_per_second"] for row in values["speed"].values()]
            axes.plot(lengths, speeds, marker="o", label=variant)
    left.set(
        xlabel="million tokens",
        ylabel="held-out loss" if which == 1 else "accuracy",
        title=f"{results['data']}, equal tokens",
    )
    for axes in right:
        axes.set(xlabel="context", ylabel="training tokens per second", xscale="log", title=results["device"])
    left.legend()
    figure.savefig(path, dpi=120)


def arguments(argv=None):
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="bytes to learn from, as nsa_data.py packs them")
    parser.add_argument("--data", choices=["text", "recall", "copy", "needle"], default="text")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results and the checkpoint")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        help="indexed learns beside dense attention for the first part of the run (--warm-up), then by itself",
        default=list(VARIANTS[:3]),
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help="of each variant")
    length.add_argument("--minutes", type=float, default=6.0, help="as many steps as fit, measured by the second round")
    parser.add_argument("--from-context", type=int, help="to start with: it doubles up to --context in the "
                        "course of the run, in batches of as many tokens")  # fmt: skip
    numbers = lambda text: [int(x) for x in text.split(",") if x]
    for name, kind, metavar, what in (
        ("context", int, "N", "tokens per sequence"),
        ("batch", int, "N", "sequences per step"),
        ("hidden", int, "N", "width of the decoder"),
        ("layers", int, "N", "of the decoder"),
        ("heads", numbers, "Q,KV,DIM", "q heads, kv heads and head_dim"),
        ("window", int, "N", "tokens, of the window and nsa variants"),
        ("cmp", numbers, "BLOCK,STRIDE", "compressed tokens: how long, how far apart"),
        ("slc_block", int, "N", "tokens per block that a query of the nsa variant selects"),
        ("slc_count", int, "N", "blocks that it selects"),
    ):
        full, tiny = (str(sizes[name]).strip("[]").replace(" ", "") for sizes in (FULL, TINY))
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar,
                            help=f"{what}: {full}, with --tiny {tiny}")  # fmt: skip
    parser.add_argument("--find-first", action="store_true", help="let layers of the nsa variant learn to find "
                        "through compressed tokens alone, for the first 0.6 of the run")  # fmt: skip
    parser.add_argument("--warm-up", type=float, default=0.6, metavar="SHARE", help="of the run, in which indexers "
                        "learn beside dense attention; they should see long contexts in it")  # fmt: skip
    parser.add_argument("--compression", choices=["mlp", "weighted", "mean"], default="mlp",
                        help="of the nsa variant; weighted and mean add next to no parameters")  # fmt: skip
    parser.add_argument("--rotary", type=float, default=1.0, help="share of the rotary pairs that turn, the fastest")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--eval-batches", type=int, default=4)
    parser.add_argument(
        "--eval-at", type=numbers, default=[], metavar="N,N", help="other contexts to measure at the end"
    )
    parser.add_argument("--save-every", type=float, default=120.0, help="seconds between checkpoints, at evaluations")
    parser.add_argument(
        "--speed-at", type=numbers, default=[], metavar="N,N", help="contexts to time steps at, at the end"
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile around the attention")
    parser.add_argument("--graphs", action="store_true", help="forward and backward as one CUDA graph: small ones are "
                        "slow to launch")  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="sizes of a CPU test")
    parser.add_argument("--device")
    args = parser.parse_args(argv)
    for name, value in (TINY if args.tiny else FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name, count in (("heads", 3), ("cmp", 2)):
        if len(getattr(args, name)) != count:
            parser.error(f"--{name} must be {count} numbers with commas between, got {getattr(args, name)}")
    if args.heads[0] % args.heads[1]:
        parser.error(f"--heads must have a multiple of KV as Q, got {args.heads}")
    if args.from_context and args.from_context > args.context:
        parser.error(f"--from-context must be at most --context = {args.context}, got {args.from_context}")
    if not 0 <= args.warm_up <= 1:
        parser.error(f"--warm-up must be between 0 and 1, got {args.warm_up}")
    if args.text and not args.text.is_file():
        parser.error(f"--text: there is no file {args.text}; `python examples/nsa_data.py FILE` makes one")
    try:
        sizes_of(args)
    except ValueError as error:
        parser.error(str(error))
    return args


if __name__ == "__main__":
    run(arguments())
