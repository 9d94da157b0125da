# SPDX-License-Identifier: Apache-2.0
"""Grouped-query heads over chosen tokens on Hopper against fp64, forward and gradients."""

import pytest
import torch

import dynaxx as dx
from interpreter import on_hopper

pytestmark = [pytest.mark.gpu, on_hopper]
SCALE = 0.09


def draw(queries, keys, heads, slots, dtype=torch.bfloat16):
    """Draw lists in any order with empty slots; some queries choose nothing, early ones see nothing."""
    torch.manual_seed(queries + slots)
    make = lambda rows, heads: torch.randn(1, rows, heads, 128, device="cuda").to(dtype).requires_grad_()
    chosen = torch.rand(queries, keys, device="cuda").argsort(1)[:, :slots].int()
    chosen[torch.rand_like(chosen, dtype=torch.float32) < 0.1] = -1
    chosen[queries // 2] = -1
    return (make(queries, heads[0]), make(keys, heads[1]), make(keys, heads[1])), chosen[None, :, None]


def run(inputs, chosen, dtype, backend, **more):
    out, lse = dx.trained.selected_attention(
        *(x.to(dtype) for x in inputs), chosen, block_size=1, scale=SCALE, return_lse=True, backend=backend, **more
    )
    loss = out.square().sum() + lse.masked_fill(lse == -torch.inf, 0.0).sin().sum()
    return out, lse, *torch.autograd.grad(loss, inputs)


def compare(got, want, most=1e-2):
    assert torch.equal(got[1].isfinite(), want[1].isfinite())
    for x, y in zip(got, want, strict=True):
        x, y = (each.double().masked_fill(each == -torch.inf, 0.0) for each in (x, y))
        assert not x.isnan().any()
        assert (x - y).norm() <= most * y.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(4, 1), (32, 8), (10, 2), (14, 2), (16, 1), (48, 1)])
@pytest.mark.parametrize(
    ("queries", "keys", "slots"), [(1, 1, 1), (31, 64, 64), (33, 65, 10), (70, 900, 300), (129, 60, 40)]
)
def test_against_fp64(queries, keys, slots, heads, dtype):
    inputs, chosen = draw(queries, keys, heads, slots, dtype)
    got = run(inputs, chosen, dtype, "hopper")
    compare(got, run(inputs, chosen, torch.float64, "reference"))
    assert all(torch.equal(x, y) for x, y in zip(got, run(inputs, chosen, dtype, "hopper"), strict=True))


@pytest.mark.parametrize("heads", [(4, 1), (32, 8), (10, 2), (32, 2), (48, 1), (64, 1)])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_halves_of_a_tile_that_choose_apart(heads, share):
    """Each warpgroup skips keys that only the other one's queries chose; halves choose from different keys."""
    (q, k, v), _ = draw(150, 3000, heads, 8)
    half = max(1, 64 // (heads[0] // heads[1]))
    turn = torch.arange(150, device="cuda")[:, None] // half % 2
    key = torch.arange(3000, device="cuda")[None]
    wanted = torch.rand(150, 3000, device="cuda") + ((key % 2 == turn) | (key < share * 600))
    chosen = wanted.argsort(1, descending=True)[:, : 700 if heads[0] < 10 else 400].int()
    chosen[60:100, 100:] = -1  # few keys of these
    chosen = chosen[None, :, None]
    got = run((q, k, v), chosen, torch.bfloat16, "hopper")
    compare(got, run((q, k, v), chosen, torch.float64, "reference"))
    assert all(torch.equal(x, y) for x, y in zip(got, run((q, k, v), chosen, torch.bfloat16, "hopper"), strict=True))


def test_a_choice_per_kv_head_and_neighbours_that_agree():
    (q, k, v), _ = draw(200, 700, (16, 4), 8)
    shared = torch.arange(3, 700, 7, device="cuda", dtype=torch.int32)
    chosen = torch.stack([shared, shared + 1, shared + 2, shared - 1])[None, None].expand(1, 200, 4, -1)
    got = run((q, k, v), chosen, torch.bfloat16, "hopper")
    compare(got, run((q, k, v), chosen, torch.float64, "reference"))


@pytest.mark.parametrize("select_heads", [1, 2, 4])
def test_gradients_in_pieces(select_heads, monkeypatch):
    """With a small workspace, few tiles of a kv head are processed at a time; two choices may share a kv head."""
    from dynaxx.trained.tokens.kernels.gpu import gradients

    inputs, chosen = draw(700, 900, (16, 2), 150)
    chosen = torch.stack([chosen[0, :, 0], *(chosen[0, torch.randperm(700), 0] for _ in range(select_heads - 1))], 1)
    chosen = torch.where(chosen <= torch.arange(200, 900, device="cuda")[:, None, None], chosen, -1)[None]
    whole = run(inputs, chosen, torch.bfloat16, "hopper")
    compare(whole, run(inputs, chosen, torch.float64, "reference"))
    for workspace in (1 << 22, 1 << 18):
        monkeypatch.setattr(gradients, "WORKSPACE", workspace)
        pieces = run(inputs, chosen, torch.bfloat16, "hopper")
        compare(pieces, whole, 2e-3)
        assert torch.equal(pieces[2], whole[2])
        again = run(inputs, chosen, torch.bfloat16, "hopper")
        assert all(torch.equal(x, y) for x, y in zip(pieces, again, strict=True))


def test_packed_sequences_sinks_strides_and_rows_that_nobody_chose():
    (q, k, v), chosen = draw(140, 200, (32, 4), 24)
    sinks, ends, ends_k = torch.randn(32, device="cuda"), (0, 65, 65, 140), (0, 80, 83, 200)
    chosen = torch.where(chosen < 30, chosen, -1)[0]
    q, k, v = (x.detach()[0] for x in (q, k, v))
    both = torch.stack([k, v], 2)
    for start, stop in ((30, 83), (113, 200)):
        both[start:stop] = torch.nan
    attend = lambda q, k, v, backend: dx.trained.selected_attention(
        q, k, v, chosen, block_size=1, scale=SCALE, cu_seqlens_q=ends, cu_seqlens_k=ends_k, sinks=sinks, backend=backend
    )
    got = attend(q, both[:, :, 0], both[:, :, 1], "hopper")
    want = attend(q.double(), *both.nan_to_num().double().unbind(2), "reference")
    assert (got.double() - want).norm() <= 1e-2 * want.norm()


def test_others_are_served_too():
    """Softcap and odd strides run on the portable kernels."""
    inputs, chosen = draw(40, 300, (8, 2), 64)
    compare(run(inputs, chosen, torch.bfloat16, "hopper", softcap=5.0),
            run(inputs, chosen, torch.float64, "reference", softcap=5.0))  # fmt: skip
    apart = [torch.nn.functional.pad(x.detach(), (0, 1))[..., :128] for x in inputs]
    got = dx.trained.selected_attention(*apart, chosen, block_size=1, scale=SCALE, backend="hopper")
    want = dx.trained.selected_attention(
        *(x.detach() for x in inputs), chosen, block_size=1, scale=SCALE, backend="triton"
    )
    assert (got - want).norm() <= 1e-2 * want.norm()


@pytest.mark.parametrize(("keys", "slots"), [(60, 30), (32768, 2048), (32769, 100), (70000, 5000)])
@pytest.mark.parametrize("heads", [1, 2])
def test_lists_are_those_of_the_portable_kernel(keys, slots, heads):
    from dynaxx.trained.tokens.kernels.gpu import plan
    from dynaxx.trained.tokens.kernels.gpu.config import TileRows
    from dynaxx.trained.tokens.kernels.hopper import grouped_plan
    from dynaxx.trained.tokens.spans import TokenSpans

    torch.manual_seed(keys)
    spans = TokenSpans((0, 100, 100, 163), (0, keys, keys + 3, keys + 93), 1)
    chosen = torch.randint(-1, keys + 5, (163, heads, slots), device="cuda", dtype=torch.int32)
    q, rows = torch.zeros(163, 8, 128, device="cuda"), TileRows(32, 4, 1)
    got = plan.prepare_rows(chosen, spans, q, q[:, :2], rows, grouped_plan._lists)
    want = plan.prepare_rows(chosen, spans, q, q[:, :2], rows)
    assert torch.equal(got.counts, want.counts)
    assert want.counts.max() > min(keys, slots) / 2
    for x, y in ((got.lists, want.lists), (got.marks, want.marks)):
        there = torch.arange(x.shape[2], device="cuda") < want.counts[..., None]
        assert torch.equal(x[there], y[there])


def test_long_lists():
    inputs, chosen = draw(300, 20000, (32, 8), 2048)
    got = [x for x in run(inputs, chosen, torch.bfloat16, "hopper")]
    compare(got, run(inputs, chosen, torch.bfloat16, "triton"))
