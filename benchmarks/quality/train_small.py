# SPDX-License-Identifier: Apache-2.0
"""Train a small decoder three times side by side: torch's dense attention, dynaxx at full density, dynaxx sparse.

    OMP_NUM_THREADS=1 python benchmarks/quality/train_small.py --json train_small.json --figure docs/train_small.svg

All three start from the same weights and see the same batches: bytes of Python's own documentation. Every step trains
each of them in turn, so times are medians of steps that took turns in one process. On one thread they are CPU time,
which other work on the machine disturbs least; on more, wall clock. Ctrl-C prints what there is so far.

The default model has 10.0 million parameters: 12 layers, 4 heads of 64, 2,048 tokens of context.
"""

import argparse
import copy
import json
import pydoc_data.topics
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import dynaxx as dx

SPARSE = dx.SlidingWindow(128) | dx.Sink(64)
BLOCK = 64
BYTES = 256
WARM_UP = 20  # steps over which the learning rate rises

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # (batch, seqlen, heads, head_dim) three times, and once


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm and around a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(attend(q, k, v).flatten(2))
        return x + self.down(gelu(self.up(self.before_mlp(x))))


class Decoder(nn.Module):
    """A causal language model of bytes with the attention that the caller chooses."""

    def __init__(self, layers: int, width: int, heads: int, seqlen: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(BYTES, width), nn.Embedding(seqlen, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)

    def loss(self, tokens: Tensor, attend: Attend) -> Tensor:
        """Return the mean negative log-likelihood of tokens[:, 1:], in nats per byte; tokens (batch, seqlen + 1)."""
        x = self.tokens(tokens[:, :-1]) + self.positions.weight
        for block in self.blocks:
            x = block(x, attend)
        return cross_entropy((self.norm(x) @ self.tokens.weight.T).flatten(0, 1), tokens[:, 1:].flatten())


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)


def sparse(layout: dx.BlockLayout) -> Attend:
    return lambda q, k, v: dx.sparse_attention(q, k, v, layout)


def without(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Measure a step's time outside attention."""
    return q + k + v


@dataclass
class Run:
    """One model in training."""

    name: str
    density: float
    model: Decoder
    attend: Attend
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def step(self, tokens: Tensor, clock: Callable[[], float]) -> None:
        self.optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, (len(self.losses) + 1) / WARM_UP)
        start = clock()
        loss = self.model.loss(tokens, self.attend)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(clock() - start)
        self.losses.append(float(loss.detach()))

    @property
    def ms(self) -> float:
        """Median of a step; the first warms up."""
        return 1e3 * statistics.median(self.seconds[1:] or self.seconds)


@dataclass(frozen=True)
class Shape:
    """The shape of the model and of a batch."""

    layers: int = 12
    width: int = 256
    heads: int = 4
    seqlen: int = 2048
    batch: int = 1


def make_runs(shape: Shape, seed: int = 0, *, control: bool = False) -> list[Run]:
    """Build the models from the same weights, the dense one first; a control starts one rounding away."""
    torch.manual_seed(seed)
    model = Decoder(shape.layers, shape.width, shape.heads, shape.seqlen)
    runs = [Run("torch SDPA, dense", 1.0, model, dense)]
    for name, pattern in (("dynaxx, full density", dx.Causal()), (f"dynaxx, {SPARSE}", SPARSE)):
        layout = pattern.layout(shape.seqlen, block_size=BLOCK)
        runs.append(Run(name, layout.density(), copy.deepcopy(model), sparse(layout)))
    if control:
        near = copy.deepcopy(model)
        for weight in near.parameters():
            weight.data *= 1 + 2**-23
        runs.append(Run("torch SDPA, weights one rounding apart", 1.0, near, dense))
    return runs


def batches(shape: Shape, seed: int = 0) -> Callable[[], Tensor]:
    """Draw (batch, seqlen + 1) bytes of documentation from random places."""
    text = torch.frombuffer(bytearray("\n".join(pydoc_data.topics.topics.values()).encode()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        starts = torch.randint(len(text) - shape.seqlen, (shape.batch,), generator=generator)
        return torch.stack([text[start : start + shape.seqlen + 1] for start in starts.tolist()])

    return draw


def train(runs: list[Run], draw: Callable[[], Tensor], steps: int, report: Callable[[str], None]) -> None:
    """Take `steps` steps, each of every run in turn; an interrupt ends it after what is done."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    try:
        for step in range(1, steps + 1):
            tokens = draw()
            for run in runs:
                run.step(tokens, clock)
            if step % 10 == 0 or step == steps:
                report(f"step {step}: " + ", ".join(f"{run.losses[-1]:.4f} ({run.ms:.0f} ms)" for run in runs))
    except KeyboardInterrupt:
        report("interrupted")
        done = min(len(run.losses) for run in runs)
        for run in runs:
            del run.losses[done:], run.seconds[done:]


def attention_share(runs: list[Run], draw: Callable[[], Tensor], steps: int = 3) -> float:
    """Return the share of a dense step's time that attention takes."""
    bare = Run("no attention", 0.0, copy.deepcopy(runs[0].model), without)
    train([bare], draw, steps, lambda line: None)
    return 1 - bare.ms / runs[0].ms


def farthest(one: Run, other: Run) -> float:
    """Return the largest difference of two loss curves, in nats."""
    return max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))


def table(runs: list[Run]) -> str:
    """Return a Markdown table: loss at some steps, time of a step, and speed relative to the first run."""
    done = len(runs[0].losses)
    shown = sorted({1, *(step for step in (10, 25, 50, 100, 150) if step < done), done})
    lines = ["| | density | " + " | ".join(f"step {step}" for step in shown) + " | ms a step | |"]
    lines.append("|---|--:|" + "--:|" * len(shown) + "--:|--:|")
    for run in runs:
        losses = " | ".join(f"{run.losses[step - 1]:.4f}" for step in shown)
        name = run.name.replace("|", "\\|")
        lines.append(f"| {name} | {run.density:.1%} | {losses} | {run.ms:.0f} | {runs[0].ms / run.ms:.2f}x |")
    return "\n".join(lines)


def results_of(runs: list[Run], shape: Shape, parameters: int, share: float) -> dict[str, Any]:
    """Return the document that `--json` writes."""
    of_run = lambda run: {name: getattr(run, name) for name in ("name", "density", "ms", "losses", "seconds")}
    return {
        "parameters": parameters,
        "shape": asdict(shape),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "attention_share": share,
        "runs": [of_run(run) for run in runs],
    }


def draw_figure(runs: list[Run], path: Path) -> None:
    """Draw loss by step; the file's name gives the format. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for run, style in zip(runs, ("-", "--", "-", ":"), strict=False):
        axes.plot(
            range(1, len(run.losses) + 1), run.losses, style, label=f"{run.name} ({run.density:.0%})", linewidth=1.2
        )
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    for name, value in asdict(Shape()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--control", action="store_true", help="a fourth run, dense from weights one rounding away")
    parser.add_argument("--json", type=Path, help="write losses and times of every step to this file")
    parser.add_argument("--figure", type=Path, help="draw the losses into this file (needs matplotlib)")
    options = parser.parse_args()
    if min(options.steps, options.threads, *(getattr(options, name) for name in asdict(Shape()))) < 1:
        parser.error("numbers must be at least 1")
    if options.width % options.heads:
        parser.error(f"--width must be a multiple of --heads, got {options.width} and {options.heads}")
    torch.set_num_threads(options.threads)
    shape = Shape(**{name: getattr(options, name) for name in asdict(Shape())})
    runs, draw = make_runs(shape, options.seed, control=options.control), batches(shape, options.seed)
    parameters = sum(x.numel() for x in runs[0].model.parameters())
    print(f"{parameters / 1e6:.1f} million parameters, {shape}, {options.threads} threads, torch {torch.__version__}")
    train(runs, draw, options.steps, lambda line: print(line, flush=True))
    if not runs[0].losses:
        raise SystemExit("not one step was done")
    share = attention_share(runs, draw)
    print(f"\n{table(runs)}\n")
    print(f"attention is {share:.0%} of a dense step")
    for run in (runs[1], *runs[3:]):
        print(f"{run.name}: at most {farthest(runs[0], run):.1e} nats from dense")
    if options.json:
        options.json.write_text(json.dumps(results_of(runs, shape, parameters, share), indent=1))
    if options.figure:
        draw_figure(runs, options.figure)


if __name__ == "__main__":
    main()
