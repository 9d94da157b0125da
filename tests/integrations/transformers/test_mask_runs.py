# SPDX-License-Identifier: Apache-2.0
"""Masks of transformers are read back as the sequences that they show."""

import random

import pytest
import torch
from small_models import left_padded, llama, logits, policy_for

import dynaxx as dx
from dynaxx.integrations.transformers.masks.runs import MaskRun, causal_runs, read_mask


def random_runs(rng, seqlen_k):
    """Draw rows of a mask and their runs: padding, documents, a chunk of a longer sequence, a prefix."""
    rows, runs, key = [], [], rng.choice((0, 0, 5))
    seen = lambda start, stop: (torch.arange(seqlen_k) >= start) & (torch.arange(seqlen_k) < stop)
    for _ in range(rng.randint(0, 5)):  # left padding sees nothing
        rows.append(seen(0, 0))
    while key < seqlen_k and len(runs) < 6:
        past = rng.choice((0, 0, 3, 7)) if not runs else 0
        length = min(rng.choice((1, 9, 15, 30)), seqlen_k - key - past)
        if length < 1:
            break
        runs.append(length)
        rows += [seen(key, key + past + i + 1) for i in range(length)]
        key += past + length
    rows = rows or [seen(0, 1)]
    rows += [rows[-1]] * rng.randint(0, 4)  # right padding sees what the last token saw
    return torch.stack(rows)


@pytest.mark.parametrize("seed", range(200))
def test_masks_are_read_back_exactly(seed):
    rng = random.Random(seed)
    mask = random_runs(rng, rng.choice((1, 2, 40, 90)))
    (found,) = read_mask(mask[None])
    assert [run.q_start for run in found[1:]] == [run.q_stop for run in found[:-1]]
    assert (found[0].q_start, found[-1].q_stop) == (0, mask.shape[0])
    again = torch.zeros_like(mask)
    keys = torch.arange(mask.shape[1])
    for run in found:
        for row in range(run.q_start, run.q_stop):
            stop = run.k_stop - (run.q_stop - 1 - row if run.causal else 0)
            again[row] = (keys >= run.k_start) & (keys < stop)
    assert torch.equal(again, mask)
    assert len(found) <= 14


def test_masks_that_are_no_sequences():
    n = 200
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    window = causal & ~causal.tril(-20)
    hole = causal.clone()
    hole[150, 70] = False
    hole_at_start = causal.clone()
    hole_at_start[150:, 1] = False
    for mask in (window, hole, hole_at_start, torch.rand(n, n) > 0.5, causal[:, :0]):
        assert read_mask(mask[None]) is None
    assert read_mask(causal.expand(3, n, n)) == [[MaskRun(0, n, 0, n, True)]] * 3
    assert read_mask(~torch.zeros(1, 4, 6, dtype=torch.bool)) == [[MaskRun(0, 4, 0, 6, False)]]


def test_a_mask_is_read_once_per_pass(monkeypatch):
    from dynaxx.integrations.transformers import forward_context as module

    model, reads = llama(), []
    monkeypatch.setattr(module, "causal_runs", lambda *args: reads.append(1) or causal_runs(*args))
    arguments, _ = left_padded(model)
    with dx.apply(model, policy_for(model)):
        logits(model, **arguments)
        assert len(reads) == 1
        logits(model, **arguments)
        assert len(reads) == 2
