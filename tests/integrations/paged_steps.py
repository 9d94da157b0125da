# SPDX-License-Identifier: Apache-2.0
"""Batches over paged caches, and policies and layers for them."""

import random
from types import SimpleNamespace

import torch

import dynaxx as dx
from dynaxx.integrations.runtime.counts import Counts
from dynaxx.integrations.runtime.deployed import Deployed
from dynaxx.integrations.runtime.paged import (
    FP8,
    Pages,
    Sequences,
    Softmax,
    stored,
    write,
)
from dynaxx.integrations.runtime.paged_layer import PagedLayer
from dynaxx.policy import ModelFacts


class Namespace(SimpleNamespace):
    """A namespace that weak references can refer to."""


FACTS = ModelFacts(model_type="llama", layers=2, q_heads=6, kv_heads=2, head_dim=16)
SPARSE = dx.Rule.of(dx.Sink(16) | dx.SlidingWindow(24) | dx.TopK((0.1, 0.3, 1.0)), heads=(0, 4, 5), layers=[0])
LENGTHS = ((1, 1), (40, 40), (1, 129), (17, 65), (3, 70), (0, 0), (128, 300), (63, 63))  # queries, keys
STEPS = ((1, 300), (1, 40), (1, 129), (1, 200), (1, 1), (1, 80), (0, 0), (0, 0))  # the last two are padding
CLOSE = {"atol": 2e-5, "rtol": 2e-5}
DECODE = dx.Rule.of(dx.Sink(16) | dx.SlidingWindow(20) | dx.TopK(2, dx.MinMax()), phase="decode", layers=[0])


def policy_of(*rules, **fields):
    return dx.Policy(model=FACTS, block_size=16, rules=rules or (SPARSE,), **fields)


SOFTMAX = Softmax(0.2)


class Batch:
    """Sequences of random content whose pages lie in any order, with their caches filled through slots."""

    def __init__(self, lengths=LENGTHS, page_size=16, seed=0, contiguous=True, fp8=False, tokens_first=False):
        draw = torch.Generator().manual_seed(seed)
        self.keys = [torch.randn(n, 2, 16, generator=draw) for _, n in lengths]
        self.values = [torch.randn(n, 2, 16, generator=draw) for _, n in lengths]
        starts = torch.tensor([0, *(n for n, _ in lengths)]).cumsum(0).tolist()
        self.q = torch.randn(starts[-1] + 5, 6, 16, generator=draw)  # engines pad
        used = [-(-n // page_size) for _, n in lengths]
        order = list(range(1, sum(used) + 1))
        random.Random(seed).shuffle(order)
        table = torch.full((len(lengths), max(used) + 2), 0, dtype=torch.int32)
        wide = 1 if contiguous else 2
        memory = torch.full((len(order) + 1, 2, page_size, wide * 32), torch.nan)
        if tokens_first:
            memory = memory.transpose(1, 2).contiguous().transpose(1, 2)
        scales = torch.tensor([0.02, 0.03]), torch.tensor(0.015)  # one per head, and one
        self.pages = Pages(memory.to(FP8)[..., :32], *scales) if fp8 else Pages(memory[..., :32])
        for row, count in enumerate(used):
            table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
        for row, (_, n) in enumerate(lengths):
            at = torch.arange(n)
            slots = table[row, at // page_size].long() * page_size + at % page_size
            slots = torch.cat([slots, torch.tensor([-1])])
            pad = torch.full((3, 2, 16), torch.nan)
            write(self.pages, torch.cat([self.keys[row], pad]), torch.cat([self.values[row], pad]), slots)
        if fp8:  # as they are stored
            for tokens, scale in zip((self.keys, self.values), scales, strict=True):
                tokens[:] = [stored(x, scale).float() * scale[..., None] for x in tokens]
        seqlens = [n for _, n in lengths]
        self.sequences = Sequences(table, torch.tensor(seqlens, dtype=torch.int32), starts, seqlens)

    def part(self, row):
        return self.q[None, row.tokens], self.keys[row.index][None], self.values[row.index][None]


def deployed(policy, telemetry):
    return Deployed(policy, telemetry, None)


def layer_of(telemetry, watchers=()):
    return PagedLayer(0, SOFTMAX, Counts(telemetry), watchers)
