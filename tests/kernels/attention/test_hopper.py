# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels agree with the oracle and refuse what they do not compute."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import dynaxx as dx
from cuda_graphs import check_replay
from dynaxx.kernels.attention.contract import AttentionProblem
from dynaxx.kernels.attention.hopper.pieces import Columns, backward_pieces
from dynaxx.kernels.registry import ATTENTION
from dynaxx.testing import check_forward, check_gradients, make_qkv, random_case
from interpreter import on_hopper

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 257, 400, 513)


def attend(q, k, v, layout, softcap=None):
    return dx.sparse_attention(q, k, v, layout, softcap=softcap, return_lse=True, backend="hopper")


def check(q, k, v, layout, label=""):
    for report in check_forward(attend, q, k, v, layout) + check_gradients(attend, q, k, v, layout):
        assert report.ok, f"{report}\n{label}"


@pytest.fixture(params=[True, False], ids=["one pass", "two passes"])
def passes(request, monkeypatch):
    """Compute gradients in one pass if possible, with a whole group per program as for many keys, or in two passes."""
    from dynaxx.kernels.attention.hopper import backward, backward_dkv

    if request.param:
        monkeypatch.setattr(backward_dkv, "backward_pieces", lambda *sizes: 1)
    fits = lambda kv_block, head_dim, *_: kv_block == 128 and head_dim <= 128
    monkeypatch.setattr(backward, "backward_in_one_pass", lambda *sizes: request.param and fits(*sizes))


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(60))
def test_random_cases(seed, dtype):
    dims, blocks = (64, 128, 256), (64, 128)
    case = random_case(seed, dtype=dtype, device="cuda", head_dims=dims, block_sizes=blocks, lengths=LENGTHS)
    if not 0.5 <= case.v.shape[-1] / case.q.shape[-1] <= 1:
        pytest.skip("refused: head_dim of v")
    check(case.q, case.k, case.v, case.layout, case.label)


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize("block_size", [(64, 64), (64, 128), (128, 64), (128, 128)])
@pytest.mark.parametrize("group_size", [1, 2, 3, 8])
def test_groups_share_or_do_not(block_size, group_size):
    """With q blocks of 64, two heads share a program if the group is even and its heads share a layout."""
    q, k, v = make_qkv(2, 300, 420, 2 * group_size, 2, 128, dtype=torch.bfloat16, device="cuda")
    shared = (dx.SlidingWindow(150) | dx.Sink(3) | dx.Strided(37)).layout(
        300, 420, block_size=block_size, device="cuda"
    )
    check(q, k, v, shared)
    other = dx.Full().layout(300, 420, block_size=block_size, device="cuda")
    check(q, k, v, dx.BlockLayout.stack_heads([shared, other] * group_size))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("block_size", [(64, 64), (64, 128), (128, 64), (128, 128)])
@pytest.mark.parametrize(("group_size", "together"), [(1, True), (2, True), (2, False), (3, True)])
def test_head_dim_256(block_size, group_size, together, monkeypatch):
    """Rows and columns have more tiles than the pipeline holds; groups share a program as for many keys."""
    import dynaxx.kernels.attention.hopper.backward_dkv as backward_dkv

    if together:
        monkeypatch.setattr(backward_dkv, "backward_pieces", lambda *sizes: 1)
    layouts = [
        pattern.layout(700, 1000, block_size=block_size, device="cuda")
        for pattern in (dx.SlidingWindow(500) | dx.Sink(3) | dx.Strided(37), dx.Full())
    ]
    q, k, v = make_qkv(2, 700, 1000, 2 * group_size, 2, 256, dtype=torch.bfloat16, device="cuda")
    check(q, k, v, layouts[0])
    check(q, k, v, dx.BlockLayout.stack_heads(layouts * group_size))


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize("block_size", [(64, 64), (128, 128)])
@pytest.mark.parametrize("head_dims", [(80, 80), (96, 64), (112, 112), (160, 160), (192, 128), (136, 192)])
def test_head_dims_between_tiles(head_dims, block_size):
    """TMA fills the columns beyond head_dim with zeros and stores none of them; long rows and columns are split."""
    q, k, v = make_qkv(1, 1900, 2100, 4, 2, *head_dims, dtype=torch.bfloat16, device="cuda")
    pattern = dx.SlidingWindow(150) | dx.Sink(3) | dx.GlobalTokens(70)
    check(q, k, v, pattern.layout(1900, 2100, block_size=block_size, device="cuda"))
    q, k, v = make_qkv(2, 300, 420, 6, 2, *head_dims, dtype=torch.float16, device="cuda")
    layout = (dx.SlidingWindow(150) | dx.Strided(37)).layout(300, 420, block_size=block_size, device="cuda")
    check(q, k, v, layout)
    run = partial(attend, softcap=5.0)
    for report in check_forward(run, q, k, v, layout, softcap=5.0) + check_gradients(run, q, k, v, layout, softcap=5.0):
        assert report.ok, str(report)


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize("softcap", [0.5, 50.0])
@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype"),
    [
        (64, (128, 128), torch.float16),
        (64, (128, 128), torch.bfloat16),
        (64, (64, 64), torch.bfloat16),
        (128, (64, 128), torch.bfloat16),
        (128, (128, 128), torch.float16),
        (256, (128, 128), torch.bfloat16),
        (256, (64, 64), torch.float16),
    ],
)
def test_softcap(head_dim, block_size, dtype, softcap):
    """Scores lie far below the cap, near it and far above it; bands, bits, full blocks, partial ends and groups."""
    q, k, v = make_qkv(2, 300, 420, 6, 2, head_dim, dtype=dtype, device="cuda")
    shared = (dx.SlidingWindow(200) | dx.Sink(3) | dx.Strided(37)).layout(
        300, 420, block_size=block_size, device="cuda"
    )
    full = dx.Full().layout(300, 420, block_size=block_size, device="cuda")
    run = partial(attend, softcap=softcap)
    for layout in (shared, dx.BlockLayout.stack_heads([shared, full] * 3)):
        for factor in (0.1, 1, 30):
            given = (q * factor, k, v, layout)
            for report in check_forward(run, *given, softcap=softcap) + check_gradients(run, *given, softcap=softcap):
                assert report.ok, f"{report}, scores times {factor}"


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_softcap_of_scores_beyond_all_numbers(head_dim):
    """A score of inf counts as the cap; a score of NaN gives NaN in its own query only."""
    q, k, v = make_qkv(1, 200, 200, 2, 2, head_dim, dtype=torch.bfloat16, device="cuda")
    q[0, 70, :, 0], k[0, 30, :, 0] = torch.inf, 1.0
    q[0, 150] = torch.nan
    layout = dx.Full().layout(200, block_size=128, device="cuda")
    expected = dx.sparse_attention(q, k, v, layout, softcap=3.0, return_lse=True, backend="reference")
    for got, want in zip(attend(q, k, v, layout, softcap=3.0), expected, strict=True):
        assert torch.equal(got.isnan(), want.isnan())
        torch.testing.assert_close(got, want, equal_nan=True, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("passes")
def test_views_of_any_stride():
    wide = make_qkv(2, 200, 200, 4, 2, 80, dtype=torch.bfloat16, device="cuda")
    layout = dx.SlidingWindow(90).layout(200, block_size=128, device="cuda")
    for q, k, v in (
        tuple(x[..., :64] for x in wide),
        tuple(x[..., 3:67] for x in wide),
        tuple(x[..., :64].transpose(1, 2).contiguous().transpose(1, 2) for x in wide),
        tuple(x[:1, ..., :64].expand(2, -1, -1, -1) for x in wide),
    ):
        check(q, k, v, layout)


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("dtype", "low"), [(torch.float16, 25), (torch.bfloat16, 200)])
def test_keys_past_the_end_weigh_nothing(head_dim, dtype, low):
    """Keys past the end have scores of 0, even if all real keys score far lower."""
    q, k, v = make_qkv(1, 200, 200, 4, 2, head_dim, dtype=dtype, device="cuda")
    q[..., 0], k[..., 0] = 16, -low * head_dim**0.5 / 16
    for pattern in (dx.Full(), dx.SlidingWindow((90, 90)), dx.Strided(3)):
        for block_size in ((64, 64), (64, 128), (128, 128)):
            layout = pattern.layout(200, block_size=block_size, causal=False, device="cuda")
            check(q, k, v, layout, f"{pattern} {block_size}")


KERNELS = [(64, 4), (64, 6), (128, 4), (128, 6), (256, 4), (256, 6)]  # head_dim, q heads of two groups (even or odd)


def growing(head_dim, q_heads, dtype, block_size, first, step):
    """Return q, k, v and a layout; scores rise by `step` * head_dim ** -0.5 nats per block, or fall, or stay.

    Half of the queries see nothing of the only partial block, which comes first.
    """
    q, k, v = make_qkv(1, 512, 1024, q_heads, 2, head_dim, dtype=dtype, device="cuda")
    q[..., 0] = torch.tensor([1, 1, -1, 0], device="cuda").repeat(128)[None, :, None]
    k[..., 0] = (first + torch.arange(1024, device="cuda") // block_size * step)[None, :, None]
    mask = torch.ones(512, 1024, dtype=torch.bool, device="cuda")
    mask[::2, 512 : 512 + block_size] = False
    return q, k, v, dx.BlockLayout.from_dense(mask, block_size=block_size)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("step", [10, 60, 300, 1200])
@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("first", [0, -1000])
@pytest.mark.parametrize(
    ("head_dim", "q_heads", "dtype"), [(64, 4, torch.float16), *((*sizes, torch.bfloat16) for sizes in KERNELS)]
)
def test_scores_that_grow_from_block_to_block(head_dim, q_heads, dtype, first, block_size, step):
    """Weights are relative to the scores of earlier blocks, and later scores are far above those."""
    for report in check_forward(attend, *growing(head_dim, q_heads, dtype, block_size, first, step)):
        assert report.ok, report


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize(("head_dim", "q_heads"), KERNELS)
def test_large_values_beside_scores_that_grow(head_dim, q_heads, block_size):
    """Values reach 2 ** 63 while weights would reach e ** 60 = 2 ** 86."""
    step = 60 * head_dim**0.5 / (1024 // block_size - 1)
    q, k, v, layout = growing(head_dim, q_heads, torch.bfloat16, block_size, 0, step)
    for report in check_forward(attend, q, k, v * 2.0**60, layout):
        assert report.ok, report


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("softcap", [5.0, 50.0])
@pytest.mark.parametrize(("head_dim", "q_heads"), KERNELS)
def test_capped_scores_that_grow(head_dim, q_heads, softcap):
    """Scores rise from -cap to +cap: by 100 nats for a cap of 50."""
    given = growing(head_dim, q_heads, torch.bfloat16, 128, -4000, 1000)
    for report in check_forward(partial(attend, softcap=softcap), *given, softcap=softcap):
        assert report.ok, report


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.float16), *((d, torch.bfloat16) for d in (64, 128, 256))])
@pytest.mark.parametrize("block_size", [64, 128])
def test_one_row_of_scores_far_above_those_before(block_size, head_dim, dtype):
    """In programs with several rows, one query has a key so far above its others that weights overflow."""
    q, k, v = make_qkv(1, 2048, 2048, 24, 8, head_dim, dtype=dtype, device="cuda")
    q[:, 1500, 5, 0], k[:, 100, 1, 0] = 100, 100
    for report in check_forward(attend, q, k, v, dx.Causal().layout(2048, block_size=block_size, device="cuda")):
        assert report.ok, report


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("block_size", [64, 128])
def test_a_row_of_large_scores_changes_no_other(block_size, head_dim):
    """Other rows stay equal bit by bit, even in the same program; then all rows get such scores."""
    q, k, v = make_qkv(1, 2048, 2048, 24, 8, head_dim, dtype=torch.bfloat16, device="cuda")
    layout = dx.Causal().layout(2048, block_size=block_size, device="cuda")
    large = q.clone()
    large[:, 1500, 5] *= 1000
    for one, other in zip(attend(q, k, v, layout), attend(large, k, v, layout), strict=True):
        heads_first = one.ndim == 3
        unlike = (one != other) if heads_first else (one != other).any(-1).transpose(1, 2)
        block = slice(1500 // block_size * block_size, (1500 // block_size + 1) * block_size)
        assert unlike[:, 5, 1500].all()
        unlike[:, 5, block] = False
        assert not unlike.any()
    for report in check_forward(attend, q * 1000, k, v, layout):
        assert report.ok, report


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("low", [0, 200])
def test_queries_that_see_nothing_of_several_masked_blocks(low, head_dim):
    """Some queries see nothing, some only a later block whose scores may be too low for weights relative to 0."""
    q, k, v = make_qkv(1, 256, 640, 4, 2, head_dim, dtype=torch.bfloat16, device="cuda")
    q[..., 0], k[..., 0] = 16, -low * head_dim**0.5 / 16
    mask = torch.rand(256, 640, device="cuda") < 0.5
    mask[::3, :128], mask[::4, 512:], mask[::5] = False, False, False
    layout = dx.BlockLayout.from_dense(mask, block_size=128)
    for report in check_forward(attend, q, k, v, layout):
        assert report.ok, report


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_queries_that_see_one_key(head_dim, dtype):
    """In any step of a row, the weight is exactly 1; otherwise out, and gradients with it, are off along all of v."""
    q, k, v = make_qkv(1, 257, 257, 2, 1, head_dim, dtype=dtype, device="cuda")
    for block_size in ((128, 128), (128, 64)):
        for pattern in (dx.SlidingWindow(1), dx.Strided(150) & dx.SlidingWindow(151) & dx.LastQueries(140)):
            check(q, k, v, pattern.layout(257, block_size=block_size, device="cuda"), f"{pattern} {block_size}")


@pytest.mark.gpu
@on_hopper
def test_rows_of_nan_stay_alone():
    q, k, v = make_qkv(2, 200, 200, 2, 2, 64, dtype=torch.bfloat16, device="cuda")
    k[1], v[1] = torch.nan, torch.nan
    out, lse = attend(q, k, v, dx.SlidingWindow(90).layout(200, block_size=128, device="cuda"))
    assert out[0].isfinite().all()
    assert lse[0].isfinite().all()


@pytest.mark.gpu
@on_hopper
def test_bad_layouts_read_nothing_outside():
    q, k, v = make_qkv(1, 256, 256, 2, 1, 64, dtype=torch.bfloat16, device="cuda")
    good = (dx.SlidingWindow(100) | dx.Dilated(3, 5)).layout(256, block_size=(128, 64), device="cuda")
    tensors = {name: getattr(good, name) for name in ("kv_indptr", "kv_num_partial", "kv_indices", "kv_masks")}
    for name in tensors:
        for wrong in (-(1 << 20), 1 << 20, 2**31 - 1):
            bad = dx.BlockLayout(256, 256, (128, 64), **{**tensors, name: torch.full_like(tensors[name], wrong)},
                                 masks=good.masks)  # fmt: skip
            ATTENTION.kernels("hopper").attention_forward(q, k, v, bad, 0.25)
    torch.cuda.synchronize()


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("scale", [0.3, -0.5, 0.0])
def test_any_scale(scale):
    q, k, v = make_qkv(1, 200, 200, 2, 1, 64, dtype=torch.float16, device="cuda")
    layout = (dx.SlidingWindow(90) | dx.Strided(4)).layout(200, block_size=64, device="cuda")
    run = lambda q, k, v, layout: dx.sparse_attention(q, k, v, layout, scale=scale, return_lse=True, backend="hopper")
    for report in check_forward(run, q, k, v, layout, scale):
        assert report.ok, report


@pytest.mark.gpu
@on_hopper
def test_gradients_of_out_or_of_lse_alone():
    q, k, v = (x.requires_grad_() for x in make_qkv(1, 150, 150, 4, 2, 64, dtype=torch.bfloat16, device="cuda"))
    layout = (dx.SlidingWindow(40) | dx.Sink(3)).layout(150, block_size=64, device="cuda")
    out, lse = attend(q, k, v, layout)
    do, dlse = torch.randn_like(out), torch.randn_like(lse)
    gradients = lambda given, grads: torch.autograd.grad(given, (q, k, v), grads, retain_graph=True)
    for alone, both in (
        (gradients(out, do), gradients((out, lse), (do, torch.zeros_like(lse)))),
        (gradients(lse, dlse), gradients((out, lse), (torch.zeros_like(out), dlse))),
    ):
        assert all(torch.equal(x, y) for x, y in zip(alone, both, strict=True))


@pytest.mark.gpu
@on_hopper
def test_cuda_graph():
    q, k, v = make_qkv(1, 700, 700, 4, 2, 128, dtype=torch.bfloat16, device="cuda")
    layout = dx.SlidingWindow(300).layout(700, block_size=128, device="cuda")
    check_replay(attend, q, k, v, layout)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("block_size", [(64, 64), (64, 128), (128, 128)])
def test_deterministic_gradients_are_bitwise_the_same_in_every_run(block_size, head_dim):
    q, k, v = make_qkv(2, 700, 650, 6, 2, head_dim, dtype=torch.bfloat16, device="cuda")
    layout = (dx.SlidingWindow(300) | dx.Strided(37)).layout(700, 650, block_size=block_size, device="cuda")
    kernels = ATTENTION.kernels("hopper")
    out, lse = kernels.attention_forward(q, k, v, layout, 0.1)
    do, dlse = torch.randn_like(out), torch.randn_like(lse)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (kernels.attention_backward(do, dlse, q, k, v, out, lse, layout, 0.1) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(8, 8), (32, 8), (32, 1)])
def test_one_pass_agrees_with_two(heads, head_dim):
    """With enough keys for one pass, dk and dv agree bit by bit; dq sums in fp32 in another order and rounds once.

    Groups of q heads may be divided into other pieces, whose sums are then rounded in another order.
    """
    q, k, v = make_qkv(2, 6500, 6600, *heads, head_dim, dtype=torch.bfloat16, device="cuda")
    layout = (dx.SlidingWindow(300) | dx.Strided(37) | dx.Sink(5)).layout(6500, 6600, block_size=128, device="cuda")
    kernels = ATTENTION.kernels("hopper")
    out, lse = kernels.attention_forward(q, k, v, layout, 0.1)
    do, dlse = torch.randn_like(out), torch.randn_like(lse)
    one = kernels.attention_backward(do, dlse, q, k, v, out, lse, layout, 0.1)
    torch.use_deterministic_algorithms(True)
    try:
        two, again = (kernels.attention_backward(do, dlse, q, k, v, out, lse, layout, 0.1) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(two[0], again[0])
    assert (one[0].float() - two[0].float()).norm() <= 1e-3 * two[0].float().norm()
    for a, b in zip(one[1:], two[1:], strict=True):
        assert torch.equal(a, b) if heads[0] == heads[1] else (a.float() - b.float()).norm() <= 4e-3 * b.float().norm()


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    ("head_dim", "block_size", "fused"), [(128, 128, True), (64, 128, True), (128, 64, False), (256, 128, False)]
)
def test_gradients_do_not_depend_on_the_order_of_programs(head_dim, block_size, fused, monkeypatch):
    """Vary how many heads alternate and how many of their last blocks run at the very end."""
    from dynaxx.kernels.attention.hopper import backward, backward_columns, backward_dkv

    monkeypatch.setattr(backward, "backward_in_one_pass", lambda *sizes: fused)
    monkeypatch.setattr(backward_dkv, "backward_pieces", lambda *sizes: 1)
    q, k, v = make_qkv(2, 900, 1000, 6, 3, head_dim, dtype=torch.bfloat16, device="cuda")
    do, kernels, found = torch.randn_like(q), ATTENTION.kernels("hopper"), []
    for together, ending in ((1, 0), (2, 0), (2, 3), (1, 7), (3, 4)):
        monkeypatch.setattr(backward_columns, "backward_heads_together", lambda *sizes: together)  # noqa: B023
        monkeypatch.setattr(backward_columns, "backward_ending", lambda *sizes: ending)  # noqa: B023
        pattern = dx.SlidingWindow(300) | dx.Strided(37)
        layout = replace(pattern.layout(900, 1000, block_size=block_size, device="cuda"))  # with launches of its own
        out, lse = kernels.attention_forward(q, k, v, layout, 0.1)
        found.append(kernels.attention_backward(do, None, q, k, v, out, lse, layout, 0.1))
    for dq, dk, dv in found[1:]:
        assert (dq.float() - found[0][0].float()).norm() <= 1e-3 * dq.float().norm()
        assert torch.equal(dk, found[0][1])
        assert torch.equal(dv, found[0][2])


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("q_heads", "pieces"), [(16, 4), (16, 2), (14, 7), (14, 4), (14, 2)])
@pytest.mark.parametrize("fused", [True, False])
def test_groups_in_pieces(q_heads, pieces, fused, monkeypatch):
    """Split groups into pieces of one size or two; long columns are also split if pieces have one size."""
    from dynaxx.kernels.attention.hopper import backward, backward_dkv

    monkeypatch.setattr(backward, "backward_in_one_pass", lambda *sizes: fused)
    monkeypatch.setattr(backward_dkv, "backward_pieces", lambda *sizes: pieces)
    q, k, v = make_qkv(1, 1900, 2100, q_heads, 2, 128, dtype=torch.bfloat16, device="cuda")
    for pattern in (dx.SlidingWindow(150) | dx.Strided(37), dx.SlidingWindow(150) | dx.GlobalTokens(70)):
        check(q, k, v, pattern.layout(1900, 2100, block_size=128, device="cuda"))


def test_groups_are_divided_as_measured():
    """The pieces chosen take at most 6 % more time than the fastest of an H200: ms by pieces, of one pass or of two."""
    for heads, tokens, share, block, times in (
        ((32, 8), 6144, 0, 128, {1: 1.80, 2: 1.551, 4: 1.42}),
        ((28, 4), 24576, 3, 128, {1: 4.56, 2: 3.43, 4: 3.32, 7: 3.57}),
        ((32, 4), 32768, 3, 128, {1: 7.13, 2: 5.31, 4: 4.76, 8: 5.12}),
        ((64, 4), 5120, 0, 64, {1: 1.24, 2: 1.24, 3: 1.0, 4: 1.05, 6: 1.02, 8: 1.05, 16: 1.02}),
        ((32, 2), 10240, 2, 64, {1: 1.27, 2: 1.13, 3: 1.0, 4: 1.01, 6: 1.02, 8: 1.02, 16: 1.03}),
        ((32, 8), 16384, 2, 64, {1: 1.0, 2: 1.01, 4: 1.09}),
    ):
        chosen = backward_pieces(pieces_problem(heads, tokens, share, block))
        assert times[chosen] <= 1.06 * min(times.values()), (heads, tokens, chosen)


def test_pieces_of_any_problem():
    """Any group, also a prime one, and any share of the blocks; a single kv head with few keys is divided."""
    for group_size in (1, 2, 3, 7, 13, 16, 128):
        for tokens in (1, 100, 5000, 500_000):
            for share in (-1, 0, 5):
                assert 1 <= backward_pieces(pieces_problem((group_size, 1), tokens, share)) <= group_size
    assert backward_pieces(pieces_problem((16, 1), 2048, 0)) > 1
    assert backward_pieces(pieces_problem((32, 8), 32768, 0)._replace(reach=8)) == 1


def pieces_problem(heads, tokens, share, block=128):
    places = 132 if block == 128 else 264
    return Columns(
        -(-tokens // block), 1, heads[1], heads[0] // heads[1], tokens, 128, share, None, places, block == 128
    )


def test_larger_blocks_of_the_same_pairs():
    """Windows run in blocks of 128 if that is about as much work; a layout that was written to is not replaced."""
    from dynaxx.ops.dispatch import in_larger_blocks

    def small(window):
        layout = replace(dx.SlidingWindow(window).layout(2048, block_size=64))
        layout.derived.larger = partial(dx.SlidingWindow(window).layout, 2048)  # as on a GPU
        return layout

    wide, narrow, written = small(1200), small(200), small(1200)
    assert in_larger_blocks(wide).block_size == (128, 128)
    assert torch.equal(in_larger_blocks(wide).to_dense(), wide.to_dense())
    assert in_larger_blocks(narrow) is narrow
    written.derived.clear()
    assert in_larger_blocks(written) is written


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("pattern", [dx.Causal(), dx.SlidingWindow(700)], ids=str)
def test_auto_in_larger_blocks(pattern):
    """The results are those of the pattern, also in a CUDA graph that is captured before the larger layout exists."""
    q, k, v = make_qkv(2, 1500, 1500, 6, 2, 96, dtype=torch.bfloat16, device="cuda")
    layout = pattern.layout(1500, block_size=64, device="cuda")
    assert callable(layout.derived.larger)
    auto = lambda q, k, v, layout: dx.sparse_attention(q, k, v, layout, return_lse=True)
    small = auto(q, k, v, replace(layout))  # a copy knows no larger blocks; this compiles its kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = auto(q, k, v, layout)
    graph.replay()
    assert torch.equal(out, small.out)
    check_replay(auto, q, k, v, layout)
    for report in check_forward(auto, q, k, v, layout) + check_gradients(auto, q, k, v, layout):
        assert report.ok, str(report)


def test_reach_of_narrow_layouts():
    """Windows reach a known distance; layouts that reach far, and selections, which the host has not, do not."""
    from dynaxx.kernels.attention.hopper.backward_dkv import known_reach

    of = lambda pattern, *lengths: known_reach(pattern.layout(*lengths, block_size=128))
    assert of(dx.SlidingWindow(4096), 16384) == 32
    assert of(dx.SlidingWindow(1024), 4096, 16384) == 8  # queries are aligned with the last keys
    assert of(dx.Causal(), 4096) == 31
    assert of(dx.SlidingWindow(8192), 16384) is None
    assert of(dx.SlidingWindow(1024) | dx.Sink(64), 16384) is None
    assert of(dx.Causal(), 16384) is None
    assert dx.SlidingWindow(300).layout(1024, block_size=128).reach == 3
    by_head = dx.BlockLayout.stack_heads([dx.SlidingWindow(w).layout(16384, block_size=128) for w in (128, 6000)])
    assert by_head.reach == 47


def test_refusals_say_why():
    values = {
        "device": torch.device("cuda"), "dtype": torch.float32, "batch": 1, "seqlen_q": 64, "seqlen_k": 64,
        "q_heads": 2, "kv_heads": 1, "head_dim": 40, "head_dim_v": 64, "block_size": (64, 32), "needs_grad": False,
    }  # fmt: skip
    text = "; ".join(ATTENTION.reasons("hopper", AttentionProblem(**values)))
    for reason in ("fp16 and bf16", "head_dim from 64 to 256", "blocks of (64, 128)"):
        assert reason in text
    on_cpu = AttentionProblem(**{**values, "device": torch.device("cpu")})
    assert "runs on a Hopper GPU" in ATTENTION.reasons("hopper", on_cpu)[0]
