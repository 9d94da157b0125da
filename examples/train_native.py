"""Train the same decoder with dense attention, a window, and Native Sparse Attention, on equal tokens and seed.

    python examples/native_data.py build/text.bin
    python examples/train_native.py --text build/text.bin --out build/native --minutes 6      # on a GPU, 30M parameters
    python examples/train_native.py --text build/text.bin --out build/tiny --tiny --steps 30  # on a CPU, a check
    python examples/train_native.py --data recall --context 1024 --out build/recall --steps 400

The variants take turns, a few steps each on the same batches, so that at any moment they have seen equal tokens; the
learning rate follows the share of steps done. A killed run goes on from its last checkpoint, whole or not there.
Written: results.json (held-out loss or accuracy by step, tokens per second, memory) and curves.png.
"""

import argparse
import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import torch
from native_data import Text, make_data
from native_decoder import VARIANTS, Decoder

from dynaxx.nn import NativeSizes, NativeSparseAttention

ROUND = 10  # steps that a variant trains before the next one does
HEADS = ("q_heads", "kv_heads", "head_dim")
TINY = {"hidden": 64, "layers": 2, "q_heads": 4, "kv_heads": 1, "head_dim": 16}
TINY_SIZES = NativeSizes(16, 8, 16, 6, 1, 2, window=32)


class Trainer:
    """One variant: model, optimizer, and what it has come to."""

    def __init__(self, variant, args, device):
        sizes = TINY_SIZES if args.tiny else NativeSizes(*args.cmp, slc_count=args.slc_count, window=args.window)
        shape = {"hidden": args.hidden, "layers": args.layers} | dict(zip(HEADS, args.heads, strict=True))
        self.model = Decoder(
            variant, sizes=sizes, compression=args.compression, seed=args.seed, **(TINY if args.tiny else shape)
        ).to(device)
        self.step_model = torch.compile(self.model) if args.compile else self.model
        decay = [p for p in self.model.parameters() if p.ndim > 1]
        other = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=device.type == "cuda")
        self.device, self.args, self.seconds, self.tokens, self.graphs = device, args, 0.0, 0, {}
        self.sizes = sizes
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.curve = []  # (step, held-out loss, accuracy)

    def autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def train(self, batches, shares):
        """One step per batch; `shares` are the parts of the whole run done before each."""
        self._wait()
        begin, self.model.training = time.perf_counter(), True
        for (tokens, targets), share in zip(batches, shares, strict=True):
            for group in self.optimizer.param_groups:
                group["lr"] = self.args.lr * min(1.0, share / 0.03 + 0.01) * (0.55 + 0.45 * math.cos(math.pi * share))
            if self.args.anneal:
                self.select(count_at(self.sizes, tokens.shape[1], share))
            self.gradients(tokens.to(self.device), targets.to(self.device))
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.tokens += tokens.numel()
        self.select(self.sizes.slc_count)
        self._wait()
        self.seconds += time.perf_counter() - begin

    def select(self, count):
        """So many blocks per query, in native layers."""
        for layer in self.model.layers:
            if isinstance(layer.attention, NativeSparseAttention):
                layer.attention.sizes = replace(self.sizes, slc_count=count)

    def gradients(self, tokens, targets):
        """Forward and backward of a batch; as one CUDA graph for each shape of batches, if so asked."""
        if not self.args.graphs:
            return self._gradients(tokens, targets)
        kind = (tokens.shape, getattr(self.model.layers[0].attention, "sizes", None))
        if kind not in self.graphs:
            self.graphs[kind] = self._capture(tokens.clone(), targets.clone())
        graph, inputs, grads = self.graphs[kind]
        for held, given in zip(inputs, (tokens, targets), strict=True):
            held.copy_(given)
        graph.replay()
        for parameter, grad in zip(self.model.parameters(), grads, strict=True):
            parameter.grad = grad

    def _gradients(self, tokens, targets):
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast():
            loss = self.step_model(tokens, targets)
        loss.backward()

    def _capture(self, *inputs):
        """The graph, what it reads, and the gradients that it writes; kernels are compiled and layouts made before."""
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._gradients(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            self._gradients(*inputs)
        return graph, inputs, [parameter.grad for parameter in self.model.parameters()]

    @torch.no_grad()
    def evaluate(self, batches, step):
        """Held-out loss, and the share of targets that are the likeliest token."""
        losses, hits, total = [], 0, 0
        for tokens, targets in batches:
            tokens, targets = tokens.to(self.device), targets.to(self.device)
            with self.autocast():
                logits = self.model(tokens)
            asked = targets != -100
            losses.append(float(torch.nn.functional.cross_entropy(logits[asked].float(), targets[asked])))
            hits += int((logits[asked].argmax(-1) == targets[asked]).sum())
            total += int(asked.sum())
        self.curve.append((step, sum(losses) / len(losses), hits / total))

    def speed(self, source, context):
        """Tokens per second and peak GiB of training steps at another context, of at least as many tokens."""
        rows = max(1, self.args.batch * self.args.context // context)
        batch = source.batch(rows, context, 0)
        tokens, targets = (x.to(self.device) for x in batch)
        self.graphs.clear()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for repeat in range(6):
            if repeat == 2:
                self._wait()
                begin = time.perf_counter()
            self.gradients(tokens, targets)
        self._wait()
        peak = torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else None
        return {"tokens_per_second": round(4 * rows * context / (time.perf_counter() - begin)), "peak_gib": peak}

    def state(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "seconds": self.seconds,
                "tokens": self.tokens, "curve": self.curve}  # fmt: skip

    def load(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.seconds, self.tokens, self.curve = state["seconds"], state["tokens"], state["curve"]

    def _wait(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def save(path, state):
    """Write a checkpoint that is whole or not there."""
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def context_at(args, share):
    """Tokens per sequence after a share of the run: twice as many at equal steps of its first half, if so asked."""
    begin = args.from_context or args.context
    doublings = (args.context // begin).bit_length() - 1
    return begin << min(doublings, int(2 * share * doublings))


def count_at(sizes, context, share):
    """Blocks to select: all over the first half of a run, then half as many at equal steps, the last fifth as told."""
    most = max(sizes.slc_count, -(-context // sizes.slc_block))
    halvings = (-(-most // sizes.slc_count) - 1).bit_length()
    done = 0 if share < 0.5 else min(halvings, 1 + int((share - 0.5) / 0.3 * halvings))
    return max(sizes.slc_count, most >> done)


def run(args):
    """Train every variant, write the results, return them."""
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    text = Text(args.text) if args.text else None
    if text is None and args.data in ("text", "needle"):
        raise SystemExit("--text is needed: make the file with `python examples/native_data.py FILE`")
    source, begin = make_data(args.data, text), time.perf_counter()
    trainers = {variant: Trainer(variant, args, device) for variant in args.variants}
    saved, last, step, steps, checkpoint = begin, begin, 0, args.steps, args.out / "checkpoint.pt"
    args.out.mkdir(parents=True, exist_ok=True)
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        step, steps = state["step"], state["steps"]
        for variant, trainer in trainers.items():
            trainer.load(state[variant])
        print(f"goes on from step {step} of {steps}")
    held_out = [source.batch(args.batch, args.context, 10**6 + i, "held_out") for i in range(args.eval_batches)]
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
        last = time.perf_counter()
        if step % args.eval_every < count or step == steps:
            for variant, trainer in trainers.items():
                trainer.evaluate(held_out, step)
                _, loss, accuracy = trainer.curve[-1]
                speed = trainer.tokens / max(1e-9, trainer.seconds)
                print(
                    f"{step}/{steps} {variant}: loss {loss:.4f}, accuracy {accuracy:.3f}, {speed:,.0f} tokens/s",
                    flush=True,
                )
            if steps and time.perf_counter() - saved > args.save_every:
                states = {variant: trainer.state() for variant, trainer in trainers.items()}
                save(checkpoint, {"step": step, "steps": steps, **states})
                saved = time.perf_counter()
            last = time.perf_counter()
    speeds = {
        variant: {context: trainer.speed(source, context) for context in args.speed_at}
        for variant, trainer in trainers.items()
    }
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
                "speed": speeds[variant],
            }
            for variant, trainer in trainers.items()
        },
    }
    (args.out / "results.json").write_text(json.dumps(results, indent=1))
    plot(results, args.out / "curves.png")
    for variant, values in results["variants"].items():
        _, loss, accuracy = values["curve"][-1]
        print(
            f"{variant}: {values['parameters']:,} parameters, loss {loss:.4f}, accuracy {accuracy:.3f}", values["speed"]
        )
    return results


def plot(results, path):
    """Held-out loss (or accuracy, for tasks) by tokens, and speed by context; nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return print("no curves.png: pip install matplotlib")
    timed = any(values["speed"] for values in results["variants"].values())
    figure = Figure(figsize=(11 if timed else 5.5, 4), layout="constrained")
    left, *right = figure.subplots(1, 1 + timed, squeeze=False)[0]
    which = 1 if results["data"] == "text" else 2
    for variant, values in results["variants"].items():
        tokens = [row[0] * results["batch"] * results["context"] for row in values["curve"]]
        left.plot(tokens, [row[which] for row in values["curve"]], label=variant)
        lengths = [int(context) for context in values["speed"]]
        for axes in right:
            speeds = [row["tokens_per_second"] for row in values["speed"].values()]
            axes.plot(lengths, speeds, marker="o", label=variant)
    left.set(
        xlabel="tokens", ylabel="held-out loss" if which == 1 else "accuracy", title=f"{results['data']}, equal tokens"
    )
    for axes in right:
        axes.set(xlabel="context", ylabel="training tokens per second", xscale="log", title=results["device"])
    left.legend()
    figure.savefig(path, dpi=120)


def arguments(argv=None):
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="bytes to learn from, as native_data.py packs them")
    parser.add_argument("--data", choices=["text", "recall", "copy", "needle"], default="text")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results and the checkpoint")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help="of each variant")
    length.add_argument("--minutes", type=float, default=6.0, help="as many steps as fit, measured by the second round")
    parser.add_argument("--context", type=int, help="tokens per sequence: 4096, with --tiny 256")
    parser.add_argument("--from-context", type=int, help="to start with: it doubles up to --context over the first "
                        "half of the run, in batches of as many tokens")  # fmt: skip
    parser.add_argument("--batch", type=int, help="sequences per step: 8, with --tiny 4")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=lambda text: [int(x) for x in text.split(",")], default=[8, 2, 64],
                        metavar="Q,KV,DIM", help="q heads, kv heads and head_dim: 8,2,64 unless named")  # fmt: skip
    parser.add_argument("--window", type=int, default=512, help="tokens, of the window variant and the native one")
    parser.add_argument("--cmp", type=lambda text: [int(x) for x in text.split(",")], default=[32, 16],
                        metavar="BLOCK,STRIDE", help="compressed tokens: how long, how far apart")  # fmt: skip
    parser.add_argument("--slc-count", type=int, default=16, help="blocks that a native query selects")
    parser.add_argument("--anneal", action="store_true", help="native queries select all blocks at first, then fewer")
    parser.add_argument("--compression", choices=["mlp", "weighted", "mean"], default="mlp",
                        help="of the native variant; weighted and mean add next to no parameters")  # fmt: skip
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--eval-batches", type=int, default=4)
    parser.add_argument("--save-every", type=float, default=120.0, help="seconds between checkpoints, at evaluations")
    parser.add_argument("--speed-at", type=lambda text: [int(x) for x in text.split(",") if x], default=[],
                        metavar="N,N", help="contexts at which to time training steps at the end")  # fmt: skip
    parser.add_argument("--compile", action="store_true", help="torch.compile around the attention")
    parser.add_argument("--graphs", action="store_true", help="forward and backward as one CUDA graph: small ones are "
                        "slow to launch")  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="a model of a CPU test")
    parser.add_argument("--device")
    args = parser.parse_args(argv)
    args.context = args.context or (256 if args.tiny else 4096)
    args.batch = args.batch or (4 if args.tiny else 8)
    return args


if __name__ == "__main__":
    run(arguments())
