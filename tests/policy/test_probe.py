# SPDX-License-Identifier: Apache-2.0
"""Probes report the attention calls that ran, and never disturb them."""

from itertools import pairwise

import pytest
import torch

import dynaxx as dx
from dynaxx.layout import BlockLayout
from dynaxx.telemetry import probe as probe_module
from dynaxx.telemetry.probe import MAX_PENDING, Probe

WHERE = {"backend": "cpu", "phase": "prefill"}


def attend(probe: Probe, layout: BlockLayout, *, layer: int = 0, batch: int = 1, device: str = "cpu", dtype=None):
    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    q = torch.randn(batch, layout.seqlen_q, 4, 32, device=device, dtype=dtype)
    k, v = (torch.randn(batch, layout.seqlen_k, 2, size, device=device, dtype=dtype) for size in (32, 16))
    call = probe.start(layer, q)
    call.selected(layout)
    dx.sparse_attention(q, k, v, layout)
    call.done(k, v)


def sums(recorder, name: str) -> float:
    return sum(series.sum for series in recorder.snapshot() if series.metric.name == name)


@pytest.fixture
def probe(telemetry):
    return Probe(sample_rate=1.0, spacing=0.0)


def neighbours(layout: BlockLayout) -> float:
    """Return the share of blocks that neighbouring rows have in common, by the definition."""
    shared = union = 0
    for head in range(layout.layout_heads):
        ends = layout.kv_indptr[0, head].tolist()
        rows = [set(layout.kv_indices[a:b].tolist()) for a, b in pairwise(ends)]
        shared += sum(len(a & b) for a, b in pairwise(rows))
        union += sum(len(a | b) for a, b in pairwise(rows))
    return shared / union


@pytest.mark.parametrize("lengths", [(512, 512), (100, 517), (1, 300), (16, 16)])
def test_density_flops_and_bytes_are_those_of_the_layout(telemetry, probe, lengths):
    layout = (dx.SlidingWindow(64) | dx.Sink(4)).layout(*lengths, block_size=16)
    attend(probe, layout, layer=3, batch=2)
    assert telemetry.value("dynaxx_layer_calls_total", **WHERE) == 1
    assert telemetry.value("dynaxx_layer_density_ratio", layer=3) == pytest.approx(layout.density())
    assert sums(telemetry, "dynaxx_density_ratio") == pytest.approx(layout.density())
    heads_and_batch = 4 * 2  # the layout is shared
    flops = layout.nnz * heads_and_batch * 2 * 16 * 16 * (32 + 16)
    assert telemetry.value("dynaxx_attention_flops_total", **WHERE) == flops
    traffic = layout.nnz * heads_and_batch * 16 * (32 + 16) * 4 + 2 * lengths[0] * 4 * (32 + 16) * 4
    assert telemetry.value("dynaxx_attention_bytes_total", **WHERE) == traffic
    assert telemetry.value("dynaxx_attention_seconds", **WHERE) == 1
    assert 0 < sums(telemetry, "dynaxx_attention_seconds") < 60
    assert telemetry.value("dynaxx_telemetry_errors_total") == 0


def test_a_layout_per_head_and_batch_counts_each_once(telemetry, probe):
    layout = BlockLayout.from_block_indices(
        torch.arange(8).view(1, 1, 8, 1).expand(2, 4, 8, 1), 128, block_size=16
    )  # the diagonal
    attend(probe, layout, batch=2)
    assert telemetry.value("dynaxx_attention_flops_total", **WHERE) == 2 * 4 * 8 * 2 * 16 * 16 * 48
    assert sums(telemetry, "dynaxx_density_ratio") == pytest.approx(8 / 36)


def test_packed_layouts_are_measured_too(telemetry, probe):
    layout = dx.packed_layout(dx.SlidingWindow(32), (0, 100, 100, 163), block_size=16)
    q = torch.randn(1, 163, 4, 32)
    call = probe.start(0, q)
    call.selected(layout)
    call.done(q, q)
    assert telemetry.value("dynaxx_layer_density_ratio", layer=0) == pytest.approx(layout.density())


@pytest.mark.parametrize("seqlen", [32, 200, 1000, 3000])
def test_overlap_of_neighbours(telemetry, monkeypatch, seqlen):
    monkeypatch.setattr(probe_module, "OVERLAP_EVERY", 1)
    monkeypatch.setattr("dynaxx.telemetry.samples.ROWS_COMPARED", 10_000)
    probe = Probe(sample_rate=1.0, spacing=0.0)
    layout = (dx.SlidingWindow(48) | dx.RandomBlocks(2)).layout(seqlen, block_size=16)
    attend(probe, layout)
    assert sums(telemetry, "dynaxx_overlap_ratio") == pytest.approx(neighbours(layout))


def test_a_part_of_the_rows_is_like_the_whole(telemetry, monkeypatch):
    monkeypatch.setattr(probe_module, "OVERLAP_EVERY", 1)
    probe = Probe(sample_rate=1.0, spacing=0.0)
    layout = dx.SlidingWindow(64).layout(4096, block_size=16)
    for _ in range(10):
        attend(probe, layout)
    assert sums(telemetry, "dynaxx_overlap_ratio") / 10 == pytest.approx(neighbours(layout), abs=0.03)


def test_every_call_is_counted_and_some_are_measured(telemetry):
    layout = dx.SlidingWindow(32).layout(64, block_size=16)
    probe = Probe(sample_rate=0.2, spacing=0.0)
    for _ in range(500):
        attend(probe, layout)
    assert telemetry.value("dynaxx_layer_calls_total") == 500
    assert 60 <= telemetry.value("dynaxx_attention_seconds") <= 140
    for quiet in (Probe(sample_rate=0.0), Probe(sample_rate=1.0, spacing=3600.0)):
        before = telemetry.value("dynaxx_attention_seconds")
        for _ in range(10):
            attend(quiet, layout)
        assert telemetry.value("dynaxx_attention_seconds") <= before + 1
    with pytest.raises(ValueError, match="between 0 and 1"):
        Probe(sample_rate=2)


def test_dense_calls_fallbacks_and_requests(telemetry, probe):
    probe.dense("below dense_below")
    probe.fallback("kernel failed")
    assert telemetry.value("dynaxx_layer_calls_total", backend="dense") == 2
    assert telemetry.value("dynaxx_dense_calls_total", reason="below dense_below") == 1
    assert telemetry.value("dynaxx_fallbacks_total") == 1
    request = probe.request("sparse", 300, torch.device("cpu"))
    request.done()
    probe.request("sparse", 20, torch.device("cpu")).done(route="dense")
    assert telemetry.value("dynaxx_requests_total", route="sparse") == 1
    assert telemetry.value("dynaxx_tokens_total", route="dense") == 20
    assert telemetry.value("dynaxx_request_seconds") == 2
    rare = Probe(spacing=3600.0)
    for _ in range(3):
        rare.request("sparse", 1, torch.device("cpu")).done()
    assert telemetry.value("dynaxx_requests_total", route="sparse") == 4
    assert telemetry.value("dynaxx_request_seconds") == 3


def test_a_call_that_fails_is_forgotten(telemetry, probe):
    q = torch.randn(1, 64, 4, 32)
    probe.start(0, q).selected(dx.SlidingWindow(32).layout(64, block_size=16))
    assert telemetry.value("dynaxx_layer_calls_total") == 0


def test_a_call_without_a_layout_is_counted_and_timed(telemetry, probe):
    q = torch.randn(1, 1, 4, 32)
    probe.start(0, q, phase="decode").done(q, q, backend="triton")
    assert telemetry.value("dynaxx_attention_seconds", backend="triton", phase="decode") == 1
    assert telemetry.value("dynaxx_density_ratio") == 0


def test_nothing_of_it_is_raised(telemetry, probe, monkeypatch):
    def broken(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(probe_module, "count_blocks", broken)
    monkeypatch.setattr(probe_module, "check_inputs", broken)
    attend(probe, dx.SlidingWindow(32).layout(64, block_size=16))
    assert telemetry.value("dynaxx_layer_calls_total", backend="unknown") == 1
    assert telemetry.value("dynaxx_telemetry_errors_total", what="probe") == 2


@pytest.mark.parametrize(
    "layout", [dx.SlidingWindow(16).layout(0, block_size=16), dx.Causal().layout(7, block_size=16)]
)
def test_tiny_layouts(telemetry, probe, layout):
    for _ in range(probe_module.OVERLAP_EVERY):
        attend(probe, layout)
    assert telemetry.value("dynaxx_telemetry_errors_total") == 0


class LateClock:
    """A device that is not ready until the test says so."""

    arrived = False

    def mark(self):
        return 0.0

    def ready(self, mark):
        return LateClock.arrived

    def seconds(self, start, end):
        return 0.5

    def release(self, *marks):
        pass


def test_unfinished_work_of_the_device_is_read_later(telemetry, monkeypatch):
    monkeypatch.setattr(probe_module, "clock_of", lambda device: LateClock())
    monkeypatch.setattr(LateClock, "arrived", False)
    probe = Probe(sample_rate=1.0, spacing=0.0)
    layout = dx.SlidingWindow(32).layout(64, block_size=16)
    for _ in range(MAX_PENDING + 3):
        attend(probe, layout)
    assert telemetry.value("dynaxx_attention_seconds") == 0
    assert telemetry.value("dynaxx_telemetry_errors_total", what="probe") == 3
    LateClock.arrived = True
    assert telemetry.value("dynaxx_attention_seconds") == MAX_PENDING  # reading asks the probe
    assert sums(telemetry, "dynaxx_attention_seconds") == MAX_PENDING * 0.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_nothing_waits(telemetry, monkeypatch, never_waits):
    monkeypatch.setattr(probe_module, "OVERLAP_EVERY", 1)
    probe = Probe(sample_rate=1.0, spacing=0.0)
    layout = (dx.SlidingWindow(256) | dx.Sink(16)).layout(4096, block_size=64, device="cuda")
    attend(probe, layout, device="cuda")  # compiles
    torch.cuda.synchronize()
    with never_waits():
        for _ in range(8):
            attend(probe, layout, device="cuda")
    torch.cuda.synchronize()
    assert telemetry.value("dynaxx_attention_seconds") == 9
    assert telemetry.value("dynaxx_layer_density_ratio", layer=0) == pytest.approx(layout.density())
    assert telemetry.value("dynaxx_telemetry_errors_total") == 0
    graph = torch.cuda.CUDAGraph()
    q = torch.randn(1, 4096, 4, 64, device="cuda", dtype=torch.bfloat16)
    with torch.cuda.graph(graph):  # a capture is counted, not measured
        call = probe.start(0, q)
        call.selected(layout)
        dx.sparse_attention(q, q, q, layout)
        call.done(q, q)
    assert telemetry.value("dynaxx_attention_seconds") == 9
