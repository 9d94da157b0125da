# SPDX-License-Identifier: Apache-2.0
"""The GPU suite's table and targets, without a GPU: targets are met, missed, or not measured."""

import pytest
import torch
from benchmarks.kernels.gpu_beside import draw_growth
from benchmarks.suites import gpu as bench_gpu
from benchmarks.suites.gpu_workloads import MAIN, WORKLOADS, Workload, sampled_workloads
from benchmarks.targets import Target, gpu_targets


def row(workload, implementation, forward, backward, **more):
    times = {"forward_ms": 1e3 / forward, "backward_ms": 1e3 / backward}
    return {"workload": workload, "implementation": implementation, "forward_tflops": forward,
            "backward_tflops": backward, **times, **more}  # fmt: skip


def ratio(**peers):
    return {"ratio": {peer: {"forward": forward, "backward": backward} for peer, (forward, backward) in peers.items()}}


def test_targets_hold_our_best_backend_to_the_peers_that_ran():
    rows = [
        row("random 10 %", "hopper", 560, 420, **ratio(fa4=(1.06, 0.9), flex=(1.5, 1.4))),
        row("random 10 %", "triton", 400, 300, **ratio(fa4=(0.7, 0.6), flex=(1.16, 0.9))),
        row("random 10 %", "flex", 380, 330),
        row("group 7", "hopper", 450, 330, ratio={}),
        {"workload": "head_dim 256", "implementation": "hopper", "skipped": "serves head_dim (64, 128)"},
        row("head_dim 256", "triton", 200, 60, ratio={}),
        {"workload": "head_dim 256", "implementation": "flex", "skipped": "out of shared memory"},
    ]
    targets = {(target.workload, target.name): target.ok for target in gpu_targets({"rows": rows})}
    assert targets["random 10 %", "forward, times FA4"] is True
    assert targets["random 10 %", "backward, times FA4"] is False
    assert targets["random 10 %", "forward, times FlexAttention"] is True
    assert targets["random 10 %", "backward, times FlexAttention"] is False
    assert targets["random 10 %", "forward, the portable kernels, times FlexAttention"] is True
    assert targets["group 7", "forward, share of the main shape's TF/s"] is True
    assert targets["group 7", "backward, share of the main shape's TF/s"] is False
    assert targets["head_dim 256", "forward, share of the main shape's TF/s"] is False
    assert targets["head_dim 256", "backward, the portable kernels, times FlexAttention"] is None
    assert not any("FlexAttention" in name for workload, name in targets if workload == "group 7")


def test_peers_by_name():
    assert bench_gpu.peers_named(["flex", "sdpa"]) == ["flex", "sdpa cudnn, dense", "sdpa flash, dense"]
    assert "fa4" in bench_gpu.peers_named(None)
    with pytest.raises(ValueError, match=r"`peers` must name some of .*, got 'fa3'"):
        bench_gpu.peers_named(["fa3"])


def test_a_bar_whose_peer_is_absent_is_neither_met_nor_missed():
    targets = gpu_targets({"rows": [row("random 10 %", "hopper", 560, 420, ratio={})]})
    assert targets
    assert all(target.ok is None for target in targets)
    assert "not measured" in str(targets[0])
    assert str(Target("time", 1.0, 2.0, "x", at_most=True)).startswith("MISS")


def test_workloads_have_layouts_of_their_shape():
    assert MAIN in WORKLOADS
    assert len({workload.name for workload in WORKLOADS}) == len(WORKLOADS)
    device = torch.device("cpu")
    sparse = Workload("a", 1024, density=0.3, block_size=64)
    layout = sparse.layout(device, 0)
    assert sparse.flops(layout) == 4 * 128 * 32 * int(layout.visible_pairs().sum())
    dense = Workload("b", 300)
    assert dense.flops(dense.layout(device, 0)) == dense.dense_flops
    packed = Workload("c", 200, window=64, lengths=(100, 200))
    q, k, _ = packed.inputs(device, 0)
    assert packed.layout(device, 0).seqlen_q == len(q) == len(k) == 300


def test_a_sample_is_drawn_by_its_seed_and_has_every_kind():
    drawn = sampled_workloads(60, 3)
    assert drawn == sampled_workloads(60, 3) != sampled_workloads(60, 4)
    assert {(each.causal, each.block_size) for each in drawn} == {(True, 64), (True, 128), (False, 64), (False, 128)}
    assert all(each.heads[0] % each.heads[1] == 0 for each in drawn)
    assert {(each.density is None, each.window is None) for each in drawn} == {
        (False, True),
        (True, False),
        (True, True),
    }
    assert {each.batch for each in drawn} == {1, 2, 4, 8}
    free = Workload("d", 700, density=0.4, heads=(2, 2), batch=2, causal=False)
    layout = free.layout(torch.device("cpu"), 0)
    assert free.flops(layout) == 4 * 128 * 2 * 2 * int(layout.visible_pairs().sum())
    assert (layout.visible_pairs() >= 128).all()
    assert free.dense_flops == 4 * 128 * 2 * 2 * 700**2


def test_the_headline_is_the_worst_ratio_of_the_backend_that_serves():
    rows = [
        row("a", "hopper", 2, 2, **ratio(fa4=(1.1, 0.9))),
        row("a", "triton", 1, 1, **ratio(fa4=(0.5, 0.5))),
        {"workload": "b", "implementation": "hopper", "skipped": "head_dim", "ratio": {}},
        row("b", "triton", 1, 1, **ratio(fa4=(1.3, 1.0))),
    ]
    found = bench_gpu.ratios_to_peers(rows)
    assert found["fa4, forward"] == {"worst": 1.1, "at": "a", "median": pytest.approx(1.2), "of": 2}
    assert found["fa4, backward"]["worst"] == 0.9


def test_without_a_gpu_there_is_no_figure(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs a CUDA GPU"):
        bench_gpu.run_gpu_suite()


def test_growth_is_drawn():
    rows = [{"seqlen": 4096 << i, "ms": 0.1 * 2**i, "mib": 8.0 * 2**i, "blocks": 100 << i} for i in range(9)]
    chart = draw_growth(rows)
    assert chart.startswith("<svg")
    assert "1M" in chart
