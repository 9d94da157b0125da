# SPDX-License-Identifier: Apache-2.0
"""Steps of a serving engine over paged caches. These tests need no engine."""

import pytest
import torch
from paged_steps import CLOSE, DECODE, SOFTMAX, SPARSE, STEPS, Batch, deployed, layer_of, policy_of

import dynaxx as dx
from dynaxx.integrations.runtime import paged_layer, paged_warmup
from dynaxx.integrations.runtime.counts import Counts
from dynaxx.integrations.runtime.paged import (
    Pages,
    Sequences,
    Softmax,
    dense_attention,
    write,
)
from dynaxx.integrations.runtime.paged_decode import LayerLimits
from dynaxx.integrations.runtime.paged_layer import PagedLayer, Step
from dynaxx.policy import resolve
from dynaxx.policy.guard import FAILURES_IN_A_ROW
from dynaxx.policy.resolve import DecodePlan
from dynaxx.testing import oracle_attention


def run(batch, step, layer):
    out = torch.full_like(batch.q, torch.nan)
    worked = layer.sparse(batch.q, batch.pages, step, out)
    split = step.split(0)
    dense_attention(batch.q, batch.pages, batch.sequences, split.dense, SOFTMAX, out)
    return out, worked


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("fp8", [True, False])
def test_sequences_come_out_of_their_pages_in_order(page_size, contiguous, fp8):
    batch = Batch(page_size=page_size, contiguous=contiguous, fp8=fp8)
    for row in batch.sequences.rows:
        k, v = batch.pages.sequence(batch.sequences.page_table[row.index], row.seqlen_k, torch.float32)
        assert torch.equal(k[0], batch.keys[row.index])
        assert torch.equal(v[0], batch.values[row.index])


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("fp8", [True, False])
def test_a_mixed_step_is_each_sequence_alone(telemetry, contiguous, fp8):
    """Sparse sequences against the oracle under their own layout, dense ones against causal attention."""
    batch, layouts = Batch(contiguous=contiguous, fp8=fp8), []
    step = Step(batch.sequences, deployed(policy_of(dense_below=50), telemetry))
    layer = layer_of(telemetry, [lambda index, layout: layouts.append(layout)])
    out, worked = run(batch, step, layer)
    split = step.split(0)
    assert worked
    assert split.reasons == {"decode": 2, "fewer queries than one block": 1, "below dense_below": 1}
    assert [(row.seqlen_q, row.seqlen_k) for row in split.sparse] == [(17, 65), (128, 300), (63, 63)]
    plan = resolve(policy_of())[0]
    for row, layout in zip(split.sparse, layouts, strict=True):
        q, k, v = batch.part(row)
        shown = layout.to_dense()
        assert torch.equal(shown, plan.layout(q, k, scale=0.2).to_dense())
        torch.testing.assert_close(out[None, row.tokens], oracle_attention(q, k, v, shown, 0.2)[0].float(), **CLOSE)
    for row in split.dense:
        q, k, v = batch.part(row)
        shown = torch.ones(row.seqlen_q, row.seqlen_k, dtype=torch.bool).tril(row.seqlen_k - row.seqlen_q)
        want = oracle_attention(q, k, v, shown[None, None], 0.2)[0].float()
        torch.testing.assert_close(out[None, row.tokens], want, **CLOSE)
    assert out[batch.sequences.rows[-1].tokens.stop :].isnan().all()
    assert layer.counts.to_dict() == {
        "sparse_calls": 1,
        "own_pattern_calls": 0,
        "dense_calls": {},
        "dense_sequences": split.reasons,
    }


def test_a_static_rule_serves_a_prompt_however_it_is_cut(telemetry):
    """The engine says whose queries are a prompt's: a cached prefix leaves any number of them, also one."""
    batch = Batch([(300, 300)])
    for rule in (dx.SlidingWindow(24) | dx.Sink(4), dx.LocalBlocks(2) | dx.RandomBlocks(1, seed=3)):
        ready = deployed(policy_of(dx.Rule.of(rule, layers=[0]), DECODE), telemetry)
        whole, _ = run(batch, Step(batch.sequences, ready), layer_of(telemetry))
        for queries in (1, 2, 5, 15, 16, 17, 100, 299):
            table, used = batch.sequences.page_table, batch.sequences.seqused_k
            step = Step(Sequences(table, used, [0, queries], [300], [True]), ready)
            assert len(step.split(0).sparse) == 1
            out = torch.full_like(batch.q[:queries], torch.nan)
            assert layer_of(telemetry).sparse(batch.q[300 - queries : 300], batch.pages, step, out)
            torch.testing.assert_close(out, whole[300 - queries : 300], **CLOSE)
    step = Step(Sequences(table, used, [0, 1], [300], [False]), ready)
    assert len(step.split(0).decode) == 1


def contiguous(batch, row, drop=0):
    k, v = (x[row.index][None, : row.seqlen_k - drop] for x in (batch.keys, batch.values))
    return dx.summarize_pages(dx.PagedCache.contiguous(k, v, page_size=16))


PAGES = [  # of an engine; the rules' have 16 tokens
    {},
    {"page_size": 64},
    {"page_size": 32, "tokens_first": True},
    {"page_size": 48},  # a size that caches lack, as those of hybrid models
    {"page_size": 512},
]


@pytest.mark.parametrize("pages", PAGES, ids=repr)
@pytest.mark.parametrize("fp8", [True, False])
def test_decoding_reads_the_pages_that_the_rule_chooses(telemetry, fp8, pages):
    """Each sequence as alone over a plain cache; what a rule without prefill leaves dense is causal."""
    lengths = ((1, 300), (40, 40), (1, 129), (4, 200), (1, 1), (4, 90), (130, 130), (20, 300))
    batch = Batch(lengths, fp8=fp8, **pages)
    ready = deployed(policy_of(SPARSE, DECODE, dense_below=80), telemetry)
    step, layer = Step(batch.sequences, ready), layer_of(telemetry)
    out, worked = run(batch, step, layer)
    split = step.split(0)
    assert worked
    assert [row.index for row in split.decode] == [0, 2, 3, 5]
    assert [row.index for row in split.sparse] == [6, 7]
    assert split.reasons == {"below dense_below": 2}
    budget = ready.decode[0].budget
    for row in split.decode:
        want = dx.sparse_decode(batch.q[None, row.tokens], contiguous(batch, row), budget, scale=0.2)
        torch.testing.assert_close(out[None, row.tokens], want, **CLOSE)
    dense = torch.full_like(batch.q, torch.nan)
    dense_attention(batch.q, batch.pages, batch.sequences, batch.sequences.rows, SOFTMAX, dense)
    first = split.decode[0].tokens
    assert (out[first] - dense[first]).abs().max() > 1e-3
    assert telemetry.value("dynaxx_layer_calls_total", backend="cpu", phase="decode") == 1
    killed = Step(batch.sequences, ready, killed=True).split(0)
    assert not killed.runs_sparse
    assert Step(batch.sequences, ready).split(1).reasons == {"no rule": 8}


@pytest.mark.parametrize("pages", PAGES, ids=repr)
@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize(
    ("case", "fields"),
    [
        ("all lengths", {}),
        ("borders", {"dense_below": 80}),
        ("own borders", {"dense_below": 10_000, "decode_dense_below": 129}),
        ("rollout", {"rollout": {"min_tokens": 50, "max_tokens": 200}}),
        ("killed", {}),
        ("whole", {}),
    ],
)
def test_a_step_that_graphs_may_capture_is_the_same_step(case, fields, fp8, pages, telemetry):
    """Every sequence alike, whether the host decides or the device."""
    batch = Batch(STEPS, fp8=fp8, **pages)
    batch.q = batch.q[:8]  # padded to the batch of a graph
    rule = dx.Rule.of(dx.TopK(1.0), phase="decode", layers=[0]) if case == "whole" else DECODE
    ready = deployed(policy_of(rule, **fields), telemetry)
    step = Step(batch.sequences, ready, killed=case == "killed")
    want, _ = run(batch, step, layer_of(telemetry))
    layer, again = layer_of(telemetry), Step(batch.sequences, ready, killed=case == "killed")
    limits = LayerLimits([0], "cpu")
    assert again.capturable(limits)
    assert layer.does_all(again)
    for _ in range(2):  # the summaries are made by the first step, and brought up to date by the second
        out = torch.full_like(batch.q, torch.nan)
        assert layer.sparse(batch.q, batch.pages, again, out)
        torch.testing.assert_close(out[:6], want[:6], **CLOSE)
        assert (out[6:] == 0).all()
    layer.count_step(again, "cpu")
    counted = layer.counts.to_dict()
    split = step.split(0)
    assert counted["sparse_calls"] == bool(split.decode)
    assert counted["dense_sequences" if split.decode else "dense_calls"].keys() == split.reasons.keys()


def test_limits_change_between_replays(telemetry):
    """A graph keeps its tensors: the kill switch and other borders reach it through their memory alone."""
    batch = Batch(STEPS)
    limits, memory = LayerLimits([0], "cpu"), None
    for policy, killed in (
        (policy_of(DECODE), False),
        (policy_of(DECODE), True),
        (policy_of(DECODE, dense_below=200), False),
    ):
        ready = deployed(policy, telemetry)
        step = Step(batch.sequences, ready, killed=killed)
        assert step.capturable(limits)
        assert memory in (None, limits.memory.data_ptr())
        memory = limits.memory.data_ptr()
        sparse, dense = step.lengths.of_layer(0)
        chosen = {row.index for row in step.split(0).decode}
        for row in range(8):
            used = int(batch.sequences.seqused_k[row])
            assert (int(sparse[row]), int(dense[row])) == ((used, 0) if row in chosen else (0, used))


@pytest.mark.parametrize(
    "lengths",
    [((1, 30), (2, 40)), ((40, 40), (1, 30)), ((0, 0), (1, 30)), ((0, 0), (0, 0))],
)
def test_other_steps_are_not_captured(lengths, telemetry):
    batch = Batch(lengths)
    step = Step(batch.sequences, deployed(policy_of(DECODE), telemetry))
    assert not step.capturable(LayerLimits([0], "cpu"))
    assert not Step(Batch(STEPS).sequences, step.deployed).capturable(LayerLimits([], "cpu"))
    assert not Step(Batch(STEPS).sequences, step.deployed).capturable(LayerLimits([0, 1], "cpu"))


def test_a_captured_step_that_fails_is_dense(telemetry, monkeypatch):
    batch, layer = Batch(STEPS), layer_of(telemetry)
    ready = deployed(policy_of(DECODE), telemetry)
    monkeypatch.setattr("dynaxx.integrations.runtime.paged_decode.sparse_decode", lambda *args, **kwargs: 1 / 0)
    for _ in range(FAILURES_IN_A_ROW):
        step = Step(batch.sequences, ready)
        assert step.capturable(LayerLimits([0], "cpu"))
        assert not layer.sparse(batch.q, batch.pages, step, torch.empty_like(batch.q))
    assert layer.counts.to_dict()["dense_calls"] == {"kernel failed": FAILURES_IN_A_ROW}
    limits, step = LayerLimits([0], "cpu"), Step(batch.sequences, ready)
    assert step.capturable(limits)
    assert int(step.lengths.of_layer(0)[0].max()) == 0, "a layer that rests reads all pages"


def test_kernels_are_run_for_every_kind_of_step():
    shapes = paged_warmup.prefill_shapes(16, 50, 128, 1000)
    assert {(128, 1000), (127, 999), (16, 50), (17, 50)} - set(shapes) == {(17, 50)}
    assert all(16 <= q <= 128 and 50 <= k <= 1000 and q <= k for q, k in shapes)
    assert paged_warmup.prefill_shapes(16, 2000, 128, 1000) == []
    assert paged_warmup.padded_batches(1) == [1]
    assert paged_warmup.padded_batches(5) == [1, 2, 4, 8]
    assert {(1, 1), (4, 1), (1, 15), (2, 2)} <= set(paged_warmup.decode_shapes(3))
    shape = paged_warmup.LayerShape(6, 2, 16, torch.float32, torch.device("cpu"), SOFTMAX)
    plan = resolve(policy_of())[0]
    paged_warmup.run_prefill(plan, shape, paged_warmup.prefill_shapes(16, 16, 32, 70))
    for fp8 in (True, False):
        decoding = paged_warmup.Decoding(16, 35, 5, 3, fp8)
        paged_warmup.run_decode(DecodePlan(dx.PageBudget(2, sinks=4), 16), shape, decoding)
        paged_warmup.run_decode(DecodePlan(dx.PageBudget(1.0), 16), shape, decoding)
        smaller = DecodePlan(dx.PageBudget(2, sinks=4), 8)
        paged_warmup.run_decode(smaller, shape, decoding)
    with paged_warmup.compiled_kernels() as names:
        pass
    assert names == []


@pytest.mark.parametrize("fp8", [False, True])
def test_chunks_of_the_warm_up_run_as_requests_do_and_count_nothing(fp8, telemetry, monkeypatch, caplog):
    rule = dx.Rule.of(dx.Sink(16) | dx.TopK(0.3))
    ready, ran = deployed(policy_of(rule, DECODE, dense_below=50), telemetry), []
    real = paged_layer.attend_in_place
    seen = lambda q, keys, *rest, **options: ran.append((q.shape[1], keys.seqlen_k)) or real(q, keys, *rest, **options)
    monkeypatch.setattr(paged_layer, "attend_in_place", seen)
    shape = paged_warmup.LayerShape(6, 2, 16, torch.float32, torch.device("cpu"), SOFTMAX)
    pages = paged_warmup.zero_pages(shape, 16, 4, fp8=fp8)
    paged_warmup.run_chunks(0, ready, shape, pages, paged_warmup.prefill_shapes(16, 50, 64, 300))
    paged_warmup.run_chunks(0, ready, shape, pages, [])
    assert ran == [(64, 64), (64, 300)]
    assert not caplog.records
    assert not telemetry.snapshot()
    assert ready.interruption(0) is None


@pytest.mark.parametrize("pages", PAGES, ids=repr)
def test_summaries_follow_the_tokens(telemetry, pages):
    """Steps over growing sequences choose as over caches that are summarized anew: chunks, then single tokens."""
    ready, layer = deployed(policy_of(DECODE), telemetry), layer_of(telemetry)
    whole = Batch(((0, 200), (0, 150)), **pages)
    done, table, size = [0, 0], whole.sequences.page_table, whole.pages.page_size
    pages = Pages(torch.zeros_like(whole.pages.memory))
    for new in ((120, 70), (30, 1), (1, 1), (1, 30), (1, 1), (3, 3)):
        starts = [0, new[0], sum(new)]
        done = [a + b for a, b in zip(done, new, strict=True)]
        q = torch.randn(sum(new), 6, 16)
        for row, count in enumerate(new):
            at = torch.arange(done[row] - count, done[row])
            slots = table[row, at // size].long() * size + at % size
            write(pages, whole.keys[row][at], whole.values[row][at], slots)
        step = Step(Sequences(table, torch.tensor(done, dtype=torch.int32), starts, done), ready)
        out = torch.full_like(q, torch.nan)
        assert layer.sparse(q, pages, step, out)
        for row in step.split(0).decode:
            cache = contiguous(whole, row)
            want = dx.sparse_decode(q[None, row.tokens], cache, ready.decode[0].budget, scale=0.2)
            torch.testing.assert_close(out[None, row.tokens], want, **CLOSE)


def test_pages_that_cannot_be_divided_are_dense(telemetry):
    """Pages of an odd distance: the layer says so and the step is dense."""
    batch, layer = Batch(STEPS, page_size=64), layer_of(telemetry)
    apart = torch.zeros(len(batch.pages.memory), 2 * 64 * 32 + 32)
    memory = apart[:, : 2 * 64 * 32].unflatten(1, (2, 64, 32))
    step = Step(batch.sequences, deployed(policy_of(DECODE), telemetry))
    assert not layer.sparse(batch.q, Pages(memory), step, torch.empty_like(batch.q))
    assert layer.counts.to_dict()["dense_calls"] == {"kernel failed": 1}


def test_graphs_compute_the_page_table_of_smaller_pages(telemetry):
    """A graph reads the engine's page table at every replay: the first layer that chooses looks it up again."""
    every = dx.Rule.of(dx.TopK(1.0), phase="decode", layers=[0])
    some = dx.Rule.of(dx.TopK(2, dx.MinMax()), phase="decode", layers=[1])
    for rules, layers in (((DECODE,), [0]), ((every, some), [0, 1])):
        batch = Batch(((1, 200), (1, 200)), page_size=64)
        run_layers = [PagedLayer(index, SOFTMAX, Counts(telemetry)) for index in layers]
        step = Step(batch.sequences, deployed(policy_of(*rules), telemetry))
        assert step.capturable(LayerLimits(layers, "cpu"))
        first, again = torch.empty_like(batch.q), torch.empty_like(batch.q)
        for out in (first, again):
            for layer in run_layers:
                assert layer.sparse(batch.q, batch.pages, step, out)
            batch.sequences.page_table[[0, 1]] = batch.sequences.page_table[[1, 0]]
        assert (first[0] - again[0]).abs().max() > 1e-3, layers


def test_neighbours_change_nothing(telemetry):
    batch = Batch()
    together, _ = run(batch, Step(batch.sequences, deployed(policy_of(), telemetry)), layer_of(telemetry))
    for row in batch.sequences.rows:
        alone = Batch()
        alone.sequences.rows = (row,)
        out, _ = run(alone, Step(alone.sequences, deployed(policy_of(), telemetry)), layer_of(telemetry))
        assert torch.equal(out[row.tokens], together[row.tokens])


def test_a_step_can_be_dense_as_a_whole(telemetry):
    batch = Batch()
    ready = deployed(policy_of(), telemetry)
    assert Step(batch.sequences, ready, killed=True).split(0).reasons["kill switch"] == 4
    assert not Step(batch.sequences, ready, killed=True).split(0).sparse
    assert Step(batch.sequences, ready).split(1).reasons["no rule"] == 7
    rollout = policy_of(rollout={"layers": [1]})
    assert Step(batch.sequences, deployed(rollout, telemetry)).split(0).reasons["layer not in the rollout"] == 4
    rollout = policy_of(rollout={"max_tokens": 100})
    assert Step(batch.sequences, deployed(rollout, telemetry)).split(0).reasons["length not in the rollout"] == 1
    layer = layer_of(telemetry)
    out, worked = run(batch, Step(batch.sequences, ready, killed=True), layer)
    assert worked
    assert layer.counts.to_dict()["dense_calls"] == {"kill switch": 1}
    assert telemetry.value("dynaxx_dense_calls_total", reason="kill switch") == 1
    assert not out[:200].isnan().any()


def test_a_kernel_that_fails_makes_the_step_dense_and_the_layer_rest(telemetry, monkeypatch):
    batch, ready, layer = Batch(), deployed(policy_of(), telemetry), layer_of(telemetry)

    def broken(*args, **kwargs):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr("dynaxx.integrations.runtime.paged_layer.attend_in_place", broken)
    for _ in range(FAILURES_IN_A_ROW):
        assert not run(batch, Step(batch.sequences, ready), layer)[1]
    step = Step(batch.sequences, ready)
    assert run(batch, step, layer)[1]
    assert step.split(0).reasons["resting after failures"] == 4
    assert telemetry.value("dynaxx_fallbacks_total", reason="kernel failed") == FAILURES_IN_A_ROW


def test_shares_of_a_plan_are_its_heads():
    """Tensor parallelism: what each rank lays out is what the whole layer has for its heads, each with its own choice:
    heads that choose together do so within a rank."""
    alone = dx.Sink(16) | dx.SlidingWindow(24) | dx.TopK((0.1, 0.3, 1.0), per="head")
    rules = (
        dx.Rule.of(alone, heads=(0, 4, 5), layers=[0]),
        dx.Rule.of(dx.SlidingWindow(20), heads=[3], layers=[0]),
        dx.Rule.of(dx.Strided(4) | dx.Sink(2), heads=[1], layers=[0]),
    )
    plan = resolve(policy_of(*rules))[0]
    torch.manual_seed(0)
    q, k = torch.randn(1, 100, 6, 16), torch.randn(1, 150, 2, 16)
    whole = plan.layout(q, k).to_dense()
    for ranks in (1, 2, 3, 6):
        if ranks == 3:
            with pytest.raises(ValueError, match="must divide among 3 ranks"):
                plan.shard(0, ranks)
            continue
        for rank in range(ranks):
            own = plan.shard(rank, ranks)
            heads = slice(rank * 6 // ranks, (rank + 1) * 6 // ranks)
            kv = slice(heads.start // 3, (heads.stop - 1) // 3 + 1)
            got = own.layout(q[:, :, heads], k[:, :, kv]).to_dense()
            assert torch.equal(got.expand(-1, 6 // ranks, -1, -1), whole[:, heads])


def test_shares_of_a_decode_plan_are_its_kv_heads():
    plan = DecodePlan(dx.PageBudget((1, 2, 3, 4), sinks=4), 16)
    cut = lambda ranks: [plan.shard(rank, ranks).budget.budget for rank in range(ranks)]
    assert cut(1) == [(1, 2, 3, 4)]
    assert cut(2) == [(1, 2), (3, 4)]
    assert cut(8) == [(1,), (1,), (2,), (2,), (3,), (3,), (4,), (4,)]
    assert plan.shard(1, 2).budget.sinks == 4
    same = DecodePlan(dx.PageBudget(0.1), 16)
    assert same.shard(1, 2) is same


@pytest.mark.parametrize("captured", [True, False])
def test_sinks_and_softcap_reach_every_kernel(captured, telemetry):
    """Sparse at full density, decoding and dense, each like the oracle."""
    softmax = Softmax(0.4, 5.0, torch.linspace(-1, 2, 6))
    lengths = ((1, 90), (1, 40)) if captured else ((40, 40), (1, 129), (17, 65), (3, 70))
    batch = Batch(lengths)
    everything = dx.Rule.of(dx.TopK(1.0), layers=[0])
    some = dx.Rule.of(dx.TopK(50, dx.MinMax()), phase="decode", layers=[0])  # more pages than there are
    ready = deployed(policy_of(everything, some, dense_below=50), telemetry)
    step, layer = Step(batch.sequences, ready), PagedLayer(0, softmax, Counts(telemetry))
    assert step.capturable(LayerLimits([0], "cpu")) is captured
    out = torch.full_like(batch.q, torch.nan)
    assert layer.sparse(batch.q, batch.pages, step, out)
    if not captured:
        dense_attention(batch.q, batch.pages, batch.sequences, step.split(0).dense, softmax, out)
    for row in batch.sequences.rows:
        q, k, v = batch.part(row)
        shown = torch.ones(row.seqlen_q, row.seqlen_k, dtype=torch.bool).tril(row.seqlen_k - row.seqlen_q)
        scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double().repeat_interleave(3, 2)) * 0.4
        scores = (5 * (scores / 5).tanh()).masked_fill(~shown, -torch.inf)
        sinks = softmax.sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        want = torch.einsum("bhqk,bkhd->bqhd", weights, v.double().repeat_interleave(3, 2)).float()
        torch.testing.assert_close(out[None, row.tokens], want, **CLOSE)


def test_numbers_of_a_chunk_lie_at_multiples_of_16_bytes():
    """Triton compiles other kernels for other addresses, and must not do so in a request."""
    used = torch.full((7,), 900, dtype=torch.int32)
    sequences = Sequences(torch.zeros(7, 11, dtype=torch.int32), used, range(0, 7000, 900), [900] * 7)
    for part, _ in sequences.with_new_keys:
        assert part.seqused_k.tolist() == [900]
        assert part.seqused_k.data_ptr() % 16 == part.page_table.data_ptr() % 16 == 0
