# SPDX-License-Identifier: Apache-2.0
"""Long rows and columns are split into parts: the lists, the merged parts, and attention against the oracle.

On a CPU the kernels run under Triton's interpreter, in a process of its own, as in `test_triton`.
"""

from dataclasses import replace

import pytest
import torch

import dynaxx as dx
from dynaxx.layout.derived import PerLayout
from dynaxx.testing import check_forward, check_gradients, make_qkv, random_case
from interpreter import DEVICE, INTERPRETED, on_hopper, run_interpreted, runs_here, starts_interpreter

pytest.importorskip("triton")
import dynaxx.kernels.schedule.split as split_module
from dynaxx.kernels.schedule.split import Lines, longest_part, split_columns, split_rows
from dynaxx.kernels.schedule.split_sums import merge_parts, sum_parts

PATTERNS = {
    "full column": dx.SlidingWindow(100) | dx.Sink(5),
    "full row": dx.SlidingWindow(100) | dx.LastQueries(5),
    "both": dx.SlidingWindow(100) | dx.GlobalTokens(7, symmetric=True),
    "all": dx.Full(),
    "empty rows": dx.Documents((0, 300, 301, 900)) & dx.Strided(200),
}


@pytest.fixture(params=[2, 9])
def limit(request, monkeypatch):
    """Split every line of more than `limit` entries, however short it is."""
    monkeypatch.setattr(split_module, "longest_part", lambda *_: request.param)
    monkeypatch.setattr(split_module, "_kept", PerLayout(by_form=False))
    return request.param


def test_lists_follow_what_is_written_to_a_layout(limit, monkeypatch):
    """Lists of parts are made again after a write to the layout's tensors, like everything computed from them."""
    made = []
    monkeypatch.setattr(split_module, "_split", lambda layout, *_: made.append(layout.transposed.q_indptr) or made)
    layout = PATTERNS["full column"].layout(900, block_size=64)
    for _ in range(2):
        split_columns(layout, 1, 2, 2)
    layout.kv_num_partial.copy_(layout.kv_num_partial.clone())
    layout.ensure_valid()
    split_columns(layout, 1, 2, 2)
    assert len(made) == 2


def covered(split, num_lines):
    """Return the entries of each line that its parts cover, in order."""
    entries = {line: [] for line in range(num_lines)}
    for line, first, last in split.parts.tolist():
        entries[line] += range(first, last)
    return entries


@starts_interpreter
def test_under_the_interpreter():
    run_interpreted(__file__)


@runs_here
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", PATTERNS)
def test_parts_cover_long_columns_once(name, known, heads, limit, monkeypatch):
    layout = PATTERNS[name].layout(900, block_size=64)
    if heads > 1:
        layout = dx.BlockLayout.stack_heads([layout, dx.SlidingWindow(300).layout(900, block_size=64)] * 2)
    layout = layout.to(DEVICE)
    q_heads, kv_heads, batch = 4, 2, 3
    counts = layout.column_counts.expand(-1, q_heads, -1).unflatten(1, (kv_heads, 2)).sum(2)[0, : max(1, heads // 2)]
    if not known:
        monkeypatch.setattr(dx.BlockLayout, "host", None)
    split = split_columns(layout, batch, q_heads, kv_heads)
    if split is None:
        assert counts.max() <= limit
        return
    assert split.copies == (batch, kv_heads if heads == 1 else 1)
    found = covered(split, counts.numel())
    pieces = {}
    for line, first, number in split.lines.tolist():
        if number:
            pieces[line] = split.parts[first : first + number]
    for line, count in enumerate(counts.flatten().tolist()):
        assert found[line] == (list(range(count)) if count > limit else [])
        assert (line in pieces) == (count > limit)
        if line in pieces:
            assert (pieces[line][:, 0] == line).all()
            sizes = pieces[line][:, 2] - pieces[line][:, 1]
            assert sizes.max() <= limit
    assert known <= bool((split.parts[:, 2] > split.parts[:, 1]).all())


@runs_here
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("name", PATTERNS)
def test_parts_cover_long_rows_once(name, heads, limit):
    layout = PATTERNS[name].layout(900, block_size=64)
    if heads > 1:
        layout = dx.BlockLayout.stack_heads([layout, dx.SlidingWindow(300).layout(900, block_size=64)] * 2)
    layout = layout.to(DEVICE)
    counts = layout.kv_num_blocks.flatten().tolist()
    split = split_rows(layout, 3, 4, 16, 2 if heads == 1 else 1)
    if split is None:
        assert max(counts) <= limit
        return
    assert split.copies == (3, 2 if heads == 1 else 1)
    found = covered(split, len(counts))
    for line, count in enumerate(counts):
        assert found[line] == (list(range(count)) if count > limit else [])


def test_even_layouts_are_not_split():
    limits = {}
    for name, pattern in (("window", dx.SlidingWindow(1024)), ("sink", dx.SlidingWindow(1024) | dx.Sink(128))):
        layout = pattern.layout(65536)
        lines = Lines.columns(layout, 1, 8, 2)
        limits[name] = limit = lines.limit(layout.nnz, 2 * 132)
        assert lines.lists(layout.column_counts, limit)[1] == (name == "sink")
    assert limits["sink"] >= 16 == longest_part(1, 1, 1, 132)
    causal = dx.Full().layout(65536, causal=True)
    for lines, counts in (
        (Lines.columns(causal, 1, 8, 2), causal.column_counts),
        (Lines.rows(causal, 1, 8, 1), causal.kv_num_blocks),
    ):
        assert lines.lists(counts, lines.limit(causal.nnz, 16 * 132)) == (0, 0)


@runs_here
@pytest.mark.parametrize("heads", [1, 2])
def test_results_of_parts_are_combined(heads, limit):
    """Check summed split columns and merged split rows against torch; other blocks stay unchanged."""
    torch.manual_seed(0)
    seqlen, block_size = 165, 16
    layout = dx.longformer(20, 3).layout(seqlen, causal=False, block_size=block_size, device=DEVICE)
    split = split_columns(layout, 2, 4, 2)
    sums = torch.randn(split.parts.shape[0], 2, 2, 2, block_size, 24, device=DEVICE)  # part, batch, head, dk or dv
    out = torch.full((2, seqlen, 2, 24), 7.0, device=DEVICE)
    expected = out.clone()
    for line, first, number in split.lines.tolist():
        rows = slice(line * block_size, min(seqlen, (line + 1) * block_size))
        block = 0.5 * sums[first : first + number, :, :, 1].sum(0)
        expected[:, rows] = block.transpose(1, 2)[:, : rows.stop - rows.start]
    sum_parts(sums.flatten(0, 2)[:, 1], out, split, layout, block_size, 0.5)
    torch.testing.assert_close(out, expected)

    split = split_rows(layout, 2, 4, 16, heads)
    sums = torch.randn(split.parts.shape[0], 2, 4 // heads, heads * block_size, 24, device=DEVICE)
    sums_lse = torch.randn(sums.shape[:-1], device=DEVICE)
    sums_lse[..., 5] = -torch.inf
    sums[..., 5, :] = 0
    out = torch.full((2, seqlen, 4, 24), 7.0, device=DEVICE)
    lse = torch.full((2, 4, seqlen), 7.0, device=DEVICE)
    expected, expected_lse = out.clone(), lse.clone()
    for line, first, number in split.lines.tolist():
        rows = slice(line * block_size, min(seqlen, (line + 1) * block_size))
        here = sums_lse[first : first + number].unflatten(3, (heads, block_size)).flatten(2, 3)
        block = sums[first : first + number].unflatten(3, (heads, block_size)).flatten(2, 3)
        total = here.logsumexp(0)
        weights = torch.where(total == -torch.inf, 0.0, (here - total).exp())
        expected_lse[:, :, rows] = total[..., : rows.stop - rows.start]
        expected[:, rows] = (weights[..., None] * block).sum(0).transpose(1, 2)[:, : rows.stop - rows.start]
    merge_parts(sums.flatten(0, 2), sums_lse.flatten(0, 2), out, lse, split, layout, heads)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def through_triton(q, k, v, layout):
    return dx.sparse_attention(q, k, v, layout, return_lse=True, backend="triton")


@runs_here
@pytest.mark.parametrize("limit", [2], indirect=True)
@pytest.mark.parametrize(
    ("dtype", "block_size", "group_size"),
    [(torch.float16, (32, 16), 1), (torch.float32, (16, 32), 2), (torch.float16, 64, 2)],
)
def test_triton_layouts(dtype, block_size, group_size, limit):
    """64-blocks in half precision are loaded by TMA, smaller ones are gathered; layouts are shared or per head."""
    length = 140 if block_size == 64 else 80
    q, k, v = make_qkv(1, length, length, 2 * group_size, 2, 16, dtype=dtype, device=DEVICE)
    star = dx.SlidingWindow(20) | dx.GlobalTokens(3, symmetric=True)
    shared = star.layout(length, causal=False, block_size=block_size)
    other = dx.Full().layout(length, causal=True, block_size=block_size)
    shared = shared.to(DEVICE)
    for layout in (shared, dx.BlockLayout.stack_heads([shared, other.to(DEVICE)] * group_size)):
        reports = check_forward(through_triton, q, k, v, layout)
        if layout is shared or not INTERPRETED:
            reports += check_gradients(through_triton, q, k, v, layout)
        for report in reports:
            assert report.ok, str(report)


@pytest.fixture(params=[True, False], ids=["one pass", "two passes"])
def passes(request, monkeypatch):
    from dynaxx.kernels.attention.hopper import backward, backward_dkv

    monkeypatch.setattr(
        backward_dkv, "backward_pieces", lambda *sizes: 1
    )  # a group stays in one program, however few keys there are
    fits = lambda kv_block, head_dim, *_: kv_block == 128 and head_dim <= 128
    monkeypatch.setattr(backward, "backward_in_one_pass", lambda *sizes: request.param and fits(*sizes))
    return request.param


def attend(q, k, v, layout):
    return dx.sparse_attention(q, k, v, layout, return_lse=True, backend="hopper")


def check(q, k, v, layout, label=""):
    for report in check_forward(attend, q, k, v, layout) + check_gradients(attend, q, k, v, layout):
        assert report.ok, f"{report}\n{label}"


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("passes", "limit")
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize("block_size", [(64, 64), (64, 128), (128, 128)])
def test_hopper_layouts(block_size, group_size, known):
    q, k, v = make_qkv(2, 900, 900, 2 * group_size, 2, 128, dtype=torch.bfloat16, device="cuda")

    def make(name, device="cuda"):
        return PATTERNS[name].layout(900, block_size=block_size, causal=name != "both", device=device)

    for name in PATTERNS:
        layout = make(name)
        # a copy has no tensors on the host
        check(q, k, v, layout if known else replace(layout), name)
    names = list(PATTERNS)
    heads = [make(names[i % len(names)], "cpu" if known else "cuda") for i in range(2 * group_size)]
    check(q, k, v, dx.BlockLayout.stack_heads(heads).to("cuda"), "layout per head")


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("passes", "limit")
@pytest.mark.parametrize("seed", range(16))
def test_hopper_random_cases(seed):
    lengths = (1, 65, 129, 400, 513)
    case = random_case(
        seed, dtype=torch.bfloat16, device="cuda", head_dims=(64, 128, 256), block_sizes=(64, 128), lengths=lengths
    )
    if case.q.shape[-1] != case.v.shape[-1]:
        pytest.skip("refused: head_dim of v differs")
    check(case.q, case.k, case.v, case.layout, case.label)


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_hopper_parts_whose_weights_leave_their_range(head_dim, block_size):
    q, k, v = make_qkv(1, 1500, 1500, 6, 2, head_dim, dtype=torch.bfloat16, device="cuda")
    q[:, 700, 4, 0], k[:, 900, 1, 0] = 100, 100
    for name in ("all", "both"):
        layout = PATTERNS[name].layout(1500, block_size=block_size, causal=False, device="cuda")
        for report in check_forward(attend, q, k, v, layout) + check_forward(attend, q * 100, k, v, layout):
            assert report.ok, f"{report}\n{name}"


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("limit")
def test_hopper_parts_are_bitwise_the_same_in_every_run(passes):
    q, k, v = make_qkv(1, 1500, 1500, 4, 2, 128, dtype=torch.bfloat16, device="cuda")
    layout = PATTERNS["both"].layout(1500, device="cuda")
    for x in (q, k, v):
        x.requires_grad_()
    out = dx.sparse_attention(q, k, v, layout, backend="hopper")
    for _ in range(4):
        assert torch.equal(out, dx.sparse_attention(q, k, v, layout, backend="hopper"))
    runs = [torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True) for _ in range(5)]
    for other in runs[1:]:
        for x, y in list(zip(runs[0], other, strict=True))[1 if passes else 0 :]:
            assert torch.equal(x, y)
