# SPDX-License-Identifier: Apache-2.0
"""Page summaries that the last layer of a step updates for all layers."""

import random
from types import SimpleNamespace

import pytest
import torch

import dynaxx as dx
from dynaxx.integrations.runtime import summary_updates
from dynaxx.integrations.runtime.counts import Counts
from dynaxx.integrations.runtime.deployed import Deployed
from dynaxx.integrations.runtime.paged import FP8, Pages, Sequences, Softmax
from dynaxx.integrations.runtime.paged_decode import LivingSummaries, every_page
from dynaxx.integrations.runtime.paged_layer import PagedLayer, Step
from dynaxx.integrations.runtime.summary_updates import JointUpdates, WaitingLayer
from dynaxx.ops.decode import summarize_pages
from dynaxx.policy import ModelFacts
from interpreter import on_gpu

LAYERS, PAGES, PAGE = 4, 64, 16
FACTS = ModelFacts(model_type="llama", layers=LAYERS, q_heads=4, kv_heads=2, head_dim=32)
STEPS = (((500, 500),), ((500, 500), (1, 77), (80, 300)), ((1, 5), (250, 700)), ((1, 78), (1, 6)), ((17, 17), (30, 60)))


def pages_of(seed, device="cpu", kind="bf16"):
    draw = torch.Generator().manual_seed(seed)
    memory = torch.randn(PAGES + (kind == "odd"), 2, PAGE, 2 * 32, generator=draw)
    if kind == "fp8":
        return Pages(memory.to(device, FP8), torch.tensor([0.5, 2.0], device=device), torch.ones((), device=device))
    memory = memory.to(device, torch.bfloat16)
    return Pages(memory.transpose(1, 2).contiguous().transpose(1, 2)) if kind == "tokens first" else Pages(memory)


def step_of(lengths, device="cpu"):
    """Return sequences of these (queries, keys), whose pages lie in any order and belong to one sequence each."""
    free = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1)).tolist()
    table = torch.zeros(len(lengths), PAGES, dtype=torch.int32)
    for row, (_, keys) in enumerate(lengths):
        count = -(-keys // PAGE)
        table[row, :count] = torch.tensor([free.pop() for _ in range(count)])
    starts = [0, *torch.tensor([queries for queries, _ in lengths]).cumsum(0).tolist()]
    keys = [keys for _, keys in lengths]
    return Sequences(table.to(device), torch.tensor(keys, dtype=torch.int32, device=device), starts, keys)


def same(found, want):
    pairs = [(found.low, want.low), (found.high, want.high)]
    if want.scale is not None:
        pairs.append((found.scale, want.scale))
    return all(torch.equal(a, b) for a, b in pairs)


def updated_apart_and_together(lengths_of_steps, kinds, bound, device):
    """Yield both summaries of every layer after every step: each layer by itself, and all by the last."""
    layers = [pages_of(seed, device, kind) for seed, kind in enumerate(kinds)]
    apart, together = ([LivingSummaries() for _ in layers] for _ in range(2))
    joint = JointUpdates(LAYERS - 1)
    for own, other, pages in zip(apart, together, layers, strict=True):
        own.update(pages, step_of(((1, 1),), device), bound)
        assert other.update_later(pages, bound) is None
    draw = torch.Generator(device).manual_seed(0)
    for lengths in lengths_of_steps:
        sequences, waiting = step_of(lengths, device), []
        for own, other, pages in zip(apart, together, layers, strict=True):
            pages.memory.copy_(torch.randn(pages.memory.shape, generator=draw, device=device))
            known = other.update_later(pages, bound)
            waiting.append(WaitingLayer(pages, known))
            own.update(pages, sequences, bound)
        joint.run(waiting, sequences)
        for own, layer in zip(apart, waiting, strict=True):
            yield layer.summaries, own._summaries


@pytest.mark.parametrize("bound", [0.5, 0.0])
@pytest.mark.parametrize("kinds", [["bf16"] * 3, ["bf16", "odd", "bf16"], ["tokens first"] * 2, ["fp8"] * 3])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, on_gpu])])
def test_the_last_layer_updates_as_each_would(kinds, bound, device):
    steps = STEPS * (3 if device == "cuda" else 1)  # the third launch of a kind replays a recording
    for found, want in updated_apart_and_together(steps, kinds, bound, device):
        assert same(found, want)


@pytest.mark.gpu
@on_gpu
def test_one_launch_updates_layers_of_one_form(monkeypatch):
    from dynaxx.kernels.decode.triton import launch

    launches = []
    real = launch.summarize_layers
    monkeypatch.setattr(launch, "summarize_layers", lambda *given: launches.append(len(given[1])) or real(*given))
    assert all(same(*each) for each in updated_apart_and_together(STEPS[:1], ["bf16", "odd", "bf16"], 0.5, "cuda"))
    assert launches == [2, 1]


def layers_and_step(telemetry, decode_from, lengths, updates=True):
    rule = dx.Rule.of(dx.Sink(16) | dx.TopK(0.5), phase="decode")
    policy = dx.Policy(model=FACTS, block_size=16, rules=(rule,), dense_below=decode_from)
    counts, deployed = Counts(telemetry), Deployed(policy, telemetry, None)
    layers = [PagedLayer(index, Softmax(0.2), counts) for index in range(LAYERS)]

    def step():
        made = Step(step_of(lengths), deployed)
        made.updates = JointUpdates(LAYERS - 1) if updates else None
        return made

    return layers, step


@pytest.mark.parametrize("decode_from", [50, 10_000])
def test_layers_that_decode_do_not_wait(telemetry, decode_from):
    """A layer whose sequences read summaries updates its own; after the step, those of all are complete."""
    layers, next_step = layers_and_step(telemetry, decode_from, STEPS[1])
    caches = [pages_of(seed) for seed in range(LAYERS)]
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        step = next_step()
        for pages in caches:
            pages.memory.copy_(torch.randn(pages.memory.shape, generator=draw))
        for at, (layer, pages) in enumerate(zip(layers, caches, strict=True)):
            q = torch.randn(581, 4, 32, dtype=torch.bfloat16)
            assert layer.sparse(q, pages, step, torch.zeros_like(q))
            assert len(step.waiting) in (0, at + 1)
        assert not step.waiting
        for layer, pages in zip(layers, caches, strict=True):
            found = layer._summaries._summaries
            want = summarize_pages(every_page(pages), bound=found.bound).summaries
            for part, new in step.sequences.with_new_keys:
                for at, used in enumerate(part.seqused_k.tolist()):
                    whole = part.page_table[at, max(used - new, 0) // PAGE : used // PAGE].long()
                    assert torch.equal(found.low[whole], want.low[whole])


def test_a_layer_that_runs_after_the_last_updates_and_counts_for_itself(telemetry):
    layers, next_step = layers_and_step(telemetry, 10_000, ((500, 500),))
    step, pages, q = next_step(), pages_of(0), torch.randn(500, 4, 32, dtype=torch.bfloat16)
    layers[0].sparse(q, pages, next_step(), torch.zeros_like(q))  # makes the summaries
    pages.memory.normal_()
    layers[-1].sparse(q, pages_of(1), step, torch.zeros_like(q))
    layers[0].sparse(q, pages, step, torch.zeros_like(q))
    assert not step.waiting
    assert sum(layers[0].counts.to_dict()["dense_calls"].values()) == 2
    whole = step.sequences.page_table[0, : 500 // PAGE].long()
    found = layers[0]._summaries._summaries
    assert torch.equal(found.low[whole], summarize_pages(every_page(pages), bound=found.bound).summaries.low[whole])


@pytest.mark.parametrize("updates", [True, False])
def test_the_last_layer_counts_for_all(telemetry, updates):
    layers, next_step = layers_and_step(telemetry, 10_000, ((500, 500), (1, 77)), updates)
    for _ in range(2):
        step = next_step()
        for seed, layer in enumerate(layers):
            q = torch.randn(501, 4, 32, dtype=torch.bfloat16)
            layer.sparse(q, pages_of(seed), step, torch.zeros_like(q))
    dense = layers[0].counts.to_dict()["dense_calls"]
    assert sum(dense.values()) == 2 * LAYERS
    assert telemetry.value("dynaxx_layer_calls_total", backend="dense", phase="prefill") == 2 * LAYERS


def test_summaries_are_made_anew_after_steps_that_did_not_update_them(telemetry):
    """A policy without the decode rule leaves them behind; keys that were written meanwhile must count later."""
    layers, next_step = layers_and_step(telemetry, 50, ((1, 77),))
    without = Deployed(dx.Policy(model=FACTS, block_size=16, rules=(dx.Rule.of(dx.TopK(0.5)),)), telemetry, None)
    pages, q = pages_of(0), torch.randn(1, 4, 32, dtype=torch.bfloat16)
    layers[0].sparse(q, pages, next_step(), torch.zeros_like(q))
    pages.memory.normal_()
    layers[0].sparse(q, pages, Step(step_of(((1, 300),)), without), torch.zeros_like(q))
    layers[0].sparse(q, pages, next_step(), torch.zeros_like(q))
    found = layers[0]._summaries._summaries
    assert torch.equal(found.low, summarize_pages(every_page(pages), bound=found.bound).summaries.low)


def test_steps_of_padding_update_nothing():
    pages, padding = pages_of(0), Sequences(torch.zeros(2, PAGES).int(), torch.zeros(2).int(), [0, 0, 0], [0, 0])
    layer = WaitingLayer(pages, summarize_pages(every_page(pages), bound=0.5).summaries)
    before = layer.summaries.low.clone()
    JointUpdates(0).run([layer], padding)
    assert torch.equal(layer.summaries.low, before)


def test_few_sets_of_layers_are_kept():
    joint, sequences = JointUpdates(0), step_of(((20, 20),))
    for seed in range(3 * summary_updates.MAX_SETS):
        pages = pages_of(seed % 3)
        joint.run([WaitingLayer(pages, summarize_pages(every_page(pages), bound=0.5).summaries)], sequences)
    assert len(joint._joint) <= summary_updates.MAX_SETS


def test_random_steps_over_growing_sequences():
    """Sequences grow, end, and leave their pages to others; summaries are those of all keys at any time."""
    rng, pages = random.Random(0), Pages(torch.zeros(PAGES, 2, PAGE, 64))
    living, joint, free = LivingSummaries(), JointUpdates(0), list(range(PAGES))
    running: list[SimpleNamespace] = []
    for _ in range(60):
        if running and rng.random() < 0.2:
            free += running.pop(rng.randrange(len(running))).pages  # finished or cancelled
        if len(running) < 4 and len(free) > 20:
            running.append(SimpleNamespace(pages=[], keys=0))
        rows = []
        for row in running:
            new = 1 if row.keys and rng.random() < 0.6 else rng.randrange(1, 90)
            if -(-(row.keys + new) // PAGE) - len(row.pages) > len(free):
                continue
            while len(row.pages) < -(-(row.keys + new) // PAGE):
                row.pages.append(free.pop(rng.randrange(len(free))))
            for at in range(row.keys, row.keys + new):
                pages.memory[row.pages[at // PAGE], :, at % PAGE] = torch.randn(2, 64)
            row.keys += new
            rows.append((new, row))
        if not rows:
            continue
        table = torch.zeros(len(rows), PAGES, dtype=torch.int32)
        for at, (_, row) in enumerate(rows):
            table[at, : len(row.pages)] = torch.tensor(row.pages)
        keys, starts = [row.keys for _, row in rows], [0, *torch.tensor([new for new, _ in rows]).cumsum(0).tolist()]
        sequences = Sequences(table, torch.tensor(keys, dtype=torch.int32), starts, keys)
        known = living.update_later(pages, 0.5)
        if known is not None:
            joint.run([WaitingLayer(pages, known)], sequences)
        for row in running:
            used = torch.tensor([row.keys], dtype=torch.int32)
            cache = pages.cache(used, torch.tensor([row.pages], dtype=torch.int32))
            want, mine = summarize_pages(cache, bound=0.5).summaries, torch.tensor(row.pages)
            if known is not None:
                assert torch.equal(known.low[mine], want.low[mine])
                assert torch.equal(known.scale[mine], want.scale[mine])
