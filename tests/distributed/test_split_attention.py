# SPDX-License-Identifier: Apache-2.0
"""Attention with a sequence split over ranks equals attention on one device."""

import pickle
from dataclasses import replace

import pytest
import torch
from ranks import cases_of, run_cases

import dynaxx as dx
from dynaxx import distributed as dxd
from dynaxx.distributed.exchange import copy_rows
from dynaxx.distributed.plan import stages_of

slow = lambda count: pytest.param((count, "cpu"), marks=pytest.mark.slow, id=f"{count} ranks")
quick = lambda count: pytest.param((count, "cpu"), id=f"{count} ranks")
GPUS = pytest.param((2, "cuda"), marks=[pytest.mark.gpu, pytest.mark.slow], id="2 GPUs")


@pytest.fixture(scope="module", params=[quick(3), slow(2), slow(4), slow(8), GPUS])
def results(request):
    count, device = request.param
    if device == "cuda" and torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    return run_cases("attention_cases", count, device)


@pytest.mark.parametrize("case", cases_of("attention_cases"))
def test_against_one_device(results, case):
    assert not results[case], "\n".join(results[case])


def test_splits_cover_every_token_once():
    for make in (dxd.SequenceSplit.contiguous, dxd.SequenceSplit.zigzag):
        for seqlen, ranks, chunk in ((1000, 3, 64), (10, 4, 16), (0, 2, 16), (129, 2, 128)):
            split = make(seqlen, ranks, chunk)
            everything = torch.cat([split.positions(rank) for rank in range(ranks)]).sort().values
            assert torch.equal(everything, torch.arange(seqlen))
            assert max(split.lengths) - min(split.lengths) <= 2 * chunk
            x = torch.randn(2, seqlen, 3)
            assert torch.equal(split.join([split.shard(x, rank) for rank in range(ranks)]), x)


def test_contiguous_runs_may_have_even_work():
    assert dxd.SequenceSplit.even(320, 2, [1, 1, 2, 4, 4], 64).owners == (0, 0, 0, 1, 1)
    assert dxd.SequenceSplit.even(256, 2, [0, 0, 0, 0], 64).owners == (0, 0, 1, 1)
    assert dxd.SequenceSplit.even(0, 2, [], 64).owners == ()
    assert dxd.SequenceSplit.even(128, 3, [1, 1], 64).owners == (0, 2)
    layout = dx.SlidingWindow(1024).layout(65536, block_size=64)
    split = dxd.sequence_split(layout, 2)
    assert [len(split.runs(rank)) for rank in range(2)] == [1, 1]
    assert 0 < split.length(0) - split.length(1) <= 0.1 * 32768
    assert dxd.split_cost(layout, split).imbalance < 1.002


def test_dealing_by_work_evens_it_out():
    layout = dx.Causal().layout(4096, block_size=64)
    for ranks in (2, 3, 8):
        costs = {
            make.__name__: dxd.split_cost(layout, make(4096, ranks, 64))
            for make in (dxd.SequenceSplit.contiguous, dxd.SequenceSplit.zigzag)
        }
        assert costs["contiguous"].imbalance > 1.3
        assert costs["zigzag"].imbalance < 1.07
        chosen = dxd.split_cost(layout, dxd.sequence_split(layout, ranks))
        assert chosen.total <= min(cost.total for cost in costs.values())


def test_a_window_is_split_into_runs_and_exchanges_its_halo():
    layout = dx.SlidingWindow(256).layout(8192, block_size=64)
    split = dxd.sequence_split(layout, 4)
    assert [len(split.runs(rank)) for rank in range(4)] == [1, 1, 1, 1]
    assert dxd.split_cost(layout, split).received == (0, 4, 4, 4)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: dxd.SequenceSplit(100, 32, (0, 1), 2), "`owners`"),
        (lambda: dxd.SequenceSplit(64, 32, (0, 2), 2), "`owners`"),
        (lambda: dxd.SequenceSplit.contiguous(64, 0), "`ranks`"),
        (lambda: dxd.SequenceSplit.dealt(64, 2, [1.0], 32), "`work`"),
        (lambda: dxd.SequenceSplit.contiguous(64, 2, 32).shard(torch.zeros(1, 63), 0), "64 tokens"),
        (lambda: dxd.sequence_split(dx.Causal().layout(64, 128, block_size=32), 2), "as many queries"),
        (lambda: dxd.sequence_split(dx.Causal().layout(64, block_size=32), 2, chunk=16), "multiple"),
        (lambda: dxd.ShardedLayout.of(dx.Causal().layout(64), dxd.SequenceSplit.contiguous(99, 2), 0), "of the split"),
        (lambda: dxd.sparse_attention(*[torch.zeros(1, 8, 1, 8)] * 3, dx.Causal().layout(8), "mesh"), "`mesh`"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(make, says):
    with pytest.raises((ValueError, TypeError), match=says):
        make()


def test_the_others_learn_of_a_rank_that_died():
    ranks = 3
    failures = run_cases("lost_cases", ranks)["case_a_rank_is_killed_between_two_steps"]
    assert [failure[:6] for failure in failures] == [f"rank {ranks - 1}"], failures  # the lost rank could not report


def test_stages_keep_messages_large():
    assert [stages_of(8, size << 20) for size in (1, 2, 4, 8, 16, 64)] == [1, 1, 2, 4, 8, 8]
    assert stages_of(6, 100 << 20) == 6
    assert stages_of(11, 100 << 20) == 1
    assert stages_of(12, 100 << 20) == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("dim", "first"), [(128, 0), (24, 3), (5, 0), (16, 1)])
def test_rows_are_copied_whatever_their_alignment(dtype, dim, first):
    k = torch.randn(1, 30, 8 * dim + 8, dtype=dtype)[:, :, first : first + 8 * dim].unflatten(2, (8, dim))[:, :, 2:4]
    out = torch.zeros(30, 1, 2, 2 * dim + 8, dtype=dtype)
    copy_rows(out[..., dim : 2 * dim], k.transpose(0, 1))
    assert torch.equal(out[..., dim : 2 * dim], k.transpose(0, 1))
    assert not out[..., :dim].any()
    assert not out[..., 2 * dim :].any()


def test_equal_splits_are_one_key():
    splits = [dxd.SequenceSplit.zigzag(1000, 4, 64) for _ in range(2)]
    splits.append(pickle.loads(pickle.dumps(splits[0])))
    assert len(set(splits)) == 1
    assert replace(splits[0], ranks=5) not in splits
