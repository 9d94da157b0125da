# SPDX-License-Identifier: Apache-2.0
"""One variant of the decoder while it trains: steps, held-out loss, speed, and its share of a checkpoint."""

import math
import pickle
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial

import torch
from nsa_decoder import Decoder

from dynaxx.lab.files import write_file
from dynaxx.trained.nn import IndexedSparseAttention, NativeSparseAttention, NsaSizes

FIND = 0.6  # of a run: how long --find-first lasts


class Trainer:
    """A model, its optimizer, and its progress."""

    def __init__(self, variant, args, device):
        self.sizes, (q_heads, kv_heads, head_dim) = sizes_of(args), args.heads
        self.model = Decoder(variant, hidden=args.hidden, layers=args.layers, q_heads=q_heads, kv_heads=kv_heads,
                             head_dim=head_dim, sizes=self.sizes, compression=args.compression, rotary=args.rotary,
                             seed=args.seed).to(device)  # fmt: skip
        self.step_model = torch.compile(self.model) if args.compile else self.model
        decay = [p for p in self.model.parameters() if p.ndim > 1]
        other = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=device.type == "cuda")
        self.device, self.args, self.seconds, self.tokens, self.graph = device, args, 0.0, 0, None
        self.variant = variant
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.curve = []  # (step, held-out loss, accuracy)

    def autocast(self):
        """Return the context in which the model computes in bf16 on a GPU."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def train(self, batches, shares):
        """Train one step per batch; `shares` are the parts of the whole run done before each.

        Raises:
            SystemExit: gradients that are not finite. After them no weight is.
        """
        self._wait()
        begin, self.model.training = time.perf_counter(), True
        for (tokens, targets), share in zip(batches, shares, strict=True):
            for group in self.optimizer.param_groups:
                group["lr"] = self.args.lr * min(1.0, share / 0.03 + 0.01) * (0.55 + 0.45 * math.cos(math.pi * share))
            self.resize(sizes_at(self.sizes, share) if self.args.find_first else self.sizes)
            self.warm_up(share < self.args.warm_up)
            self.gradients(tokens.to(self.device), targets.to(self.device))
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.tokens += tokens.numel()
        self.resize(self.sizes)
        self.warm_up(False)
        self._wait()
        self.seconds += time.perf_counter() - begin
        check_finite(norm, f"gradients of {self.variant}")

    def resize(self, sizes):
        """Let layers with native sparse attention see through branches of these sizes."""
        for layer in self.model.layers:
            if isinstance(layer.attention, NativeSparseAttention):
                layer.attention.sizes = sizes

    def warm_up(self, dense):
        """Let indexers learn beside dense attention, or choose what attention sees."""
        for layer in self.model.layers:
            if isinstance(layer.attention, IndexedSparseAttention):
                layer.attention.dense = dense

    def gradients(self, tokens, targets):
        """Run forward and backward of a batch, as one CUDA graph while batches keep their shape, if asked to."""
        if not self.args.graphs:
            return self._gradients(tokens, targets)
        attention = self.model.layers[0].attention
        kind = (tokens.shape, getattr(attention, "sizes", None), attention.dense)
        if self.graph is None or self.graph[0] != kind:
            self.graph = None
            self.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()  # the memory of the graph before
            self.graph = (kind, *self._capture(tokens.clone(), targets.clone()))
        _, graph, inputs, grads = self.graph
        for held, given in zip(inputs, (tokens, targets), strict=True):
            held.copy_(given)
        graph.replay()
        for parameter, grad in zip(self.model.parameters(), grads, strict=True):
            parameter.grad = grad

    def _gradients(self, tokens, targets):
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast():
            loss = self.step_model(tokens, targets)
            if self.variant == "indexed":
                loss = loss + sum(layer.attention.index_loss.loss for layer in self.model.layers)
        loss.backward()

    def _capture(self, *inputs):
        """Capture a graph after kernels are compiled; return it, its inputs, and the gradients that it writes."""
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
    def evaluate(self, batches):
        """Return (loss, share of targets that are the likeliest token) on held-out batches."""
        losses, hits, total = [], 0, 0
        for tokens, targets in batches:
            tokens, targets = tokens.to(self.device), targets.to(self.device)
            with self.autocast():
                logits = self.model(tokens)
            asked = targets != -100
            losses.append(float(torch.nn.functional.cross_entropy(logits[asked].float(), targets[asked])))
            hits += int((logits[asked].argmax(-1) == targets[asked]).sum())
            total += int(asked.sum())
        return sum(losses) / len(losses), hits / total

    def speed(self, source, context):
        """Return tokens per second and peak GiB of training steps at another context, of at least as many tokens."""
        rows = max(1, self.args.batch * self.args.context // context)
        batch = source.batch(rows, context, 0)
        tokens, targets = (x.to(self.device) for x in batch)
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
        """Return what a checkpoint holds."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "seconds": self.seconds,
                "tokens": self.tokens, "curve": self.curve}  # fmt: skip

    def load(self, state):
        """Continue from the result of `state`."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.seconds, self.tokens, self.curve = state["seconds"], state["tokens"], state["curve"]

    def _wait(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def sizes_of(args):
    """Return the sizes that a command line asks for. Raise ValueError if they do not fit together."""
    return NsaSizes(*args.cmp, args.slc_block, args.slc_count, window=args.window)


def sizes_at(sizes, share):
    """Return the sizes after a share of the run: in its first part a query sees little besides compressed tokens.

    Of single tokens it sees only its own block, of the smallest size, and a window of the same size. Compressed tokens
    select the blocks, so they must learn to find things. Beside branches that see everything they hardly do.
    """
    if share >= FIND:
        return sizes
    block = max(16, 1 << (sizes.cmp_block - 1).bit_length())
    return replace(sizes, slc_block=block, slc_count=1, first_blocks=0, local_blocks=1, window=block)


def make_folder(path):
    """Make the folder of a run's results. SystemExit where nothing can be written there: better now than at the end."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise SystemExit(f"--out {path}: {error.strerror}") from None


def check_finite(value, what):
    """Raise SystemExit if a number is not finite; a run then goes on from the checkpoint before."""
    if not math.isfinite(value):
        raise SystemExit(f"{what}: {float(value)}. A last checkpoint is of before; try a lower --lr with another --out")


def cannot_write(error):
    """Return the SystemExit of a run that has ended but could not write its files."""
    return SystemExit(f"{error}; run this again when there is room: it is done, and goes on from its last checkpoint, "
                      "if that could be written")  # fmt: skip


def save(path, state):
    """Write a checkpoint that is whole or not there. Where it cannot be, the last one stays, and training goes on."""
    try:
        write_file(path, partial(torch.save, state))
    except (OSError, RuntimeError) as error:
        if isinstance(error.__context__, OSError):  # torch hides what the disk said
            error = error.__context__
        print(f"warning: no checkpoint at step {state['step']}: {path}: {error}", file=sys.stderr)


def load(path, settings):
    """Load the checkpoint of a run with the same settings; None without one. Raise SystemExit with what is wrong."""
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        known = state["settings"]
    except (OSError, RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
        raise SystemExit(f"{path} is no whole checkpoint of such a run ({type(error).__name__}): remove it "
                         "to begin again") from None  # fmt: skip
    other = [f"--{name.replace('_', '-')} {known.get(name)} instead of {value}"
             for name, value in settings.items() if known.get(name) != value]  # fmt: skip
    if other:
        raise SystemExit(f"{path} is of a run with {', '.join(other)}: give this one another --out, or remove the file")
    return state
