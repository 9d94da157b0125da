# SPDX-License-Identifier: Apache-2.0
"""Selected attention's Hopper kernels against fp64, on a GPU."""

from itertools import pairwise

import pytest
import torch
from test_nsa_triton import check_selection, selection_case

import dynaxx as dx
from dynaxx.patterns.local import SlidingWindow
from dynaxx.patterns.packed import packed_layout
from dynaxx.testing import make_qkv
from dynaxx.testing.oracle import error_reports, oracle_attention
from dynaxx.testing.rounding import rounding_errors
from dynaxx.trained.testing.nsa import random_selected_case
from interpreter import on_hopper

pytestmark = [pytest.mark.gpu, on_hopper]


def case_of(seed, group, **options):
    """Draw a problem whose selection heads each select for `group` q heads."""
    case = random_selected_case(seed, device="cuda", groups=(group,), slots=(6,), **options)
    return case if case.q.shape[2] == group * case.block_indices.shape[1] else None


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group", "block"),
    [
        (torch.bfloat16, 128, 16, 64),
        (torch.float16, 64, 8, 64),
        (torch.bfloat16, 64, 32, 128),
        (torch.float16, 128, 64, 64),
        (torch.bfloat16, 128, 8, 128),
        (torch.bfloat16, 128, 4, 64),
        (torch.float16, 64, 4, 128),
        (torch.bfloat16, 128, 1, 64),
        (torch.float16, 64, 2, 64),
    ],
)
@pytest.mark.parametrize("agree", [0, 1])
def test_random_cases(dtype, head_dim, group, block, agree, monkeypatch):
    """`agree` forces groups of 4 to run by key, or by query; other groups have only one schedule."""
    if group != 4 and agree:
        pytest.skip("the same again")
    monkeypatch.setattr("dynaxx.trained.nsa.kernels.gpu.config.AGREE", agree)
    lengths = (0, 1, 130, 300, 517)
    for seed in range(12):
        case = case_of(seed, group, dtype=dtype, head_dims=(head_dim,), lengths=lengths, blocks=(block,))
        for report in case.check("hopper") if case else ():
            assert report.ok, f"{report}\n{case.label}"


@pytest.mark.parametrize("step", [-60, 10, 60, 600])
@pytest.mark.parametrize(("first", "dtype"), [(0, torch.bfloat16), (-900, torch.bfloat16), (0, torch.float16)])
@pytest.mark.parametrize(("group", "block"), [(16, 64), (8, 128)])
def test_scores_that_grow_from_block_to_block(group, block, first, dtype, step):
    """In bf16, weights are relative to the first block a row sees; scores grow by `step` per block, fall, or stay."""
    for seed in range(8):
        case = case_of(seed, group, dtype=dtype, head_dims=(128,), lengths=(0, 1, 300, 517), blocks=(block,))
        if case is None:
            continue
        q, k = case.q, case.k
        q[..., 0] = torch.tensor([1, 1, -1, 0], device="cuda").repeat(q.shape[1])[: q.shape[1], None]
        at = torch.cat([torch.arange(end - start) for start, end in pairwise(case.spans.ends_k)])
        k[..., 0] = (first + at.cuda() // block * step)[:, None]
        for report in case.check("hopper"):
            assert report.ok, f"{report}\n{case.label}"


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 128), (torch.float16, 64)])
@pytest.mark.parametrize("seed", range(6))
def test_selection(seed, dtype, head_dim, monkeypatch):
    """Run in chunks of a few tiles, over several parts of compressed tokens, and packed."""
    from dynaxx.trained.nsa.kernels.hopper import operators as hopper

    monkeypatch.setattr("dynaxx.trained.nsa.kernels.gpu.select.SCORE_BYTES", 1 << 16)
    q, k, spans, heads = selection_case(seed, dtype, lengths=(0, 1, 300, 2500), head_dim=head_dim)
    lse = torch.full((q.shape[1], q.shape[0]), 3.0, device="cuda")
    check_selection(q, k, lse, spans, heads, hopper)


def test_two_runs_agree_bit_for_bit():
    some = (
        case_of(seed, 16, dtype=torch.bfloat16, head_dims=(128,), lengths=(900,), blocks=(64,)) for seed in range(9)
    )
    case = next(case for case in some if case)
    leaves = [x.requires_grad_() for x in (case.q, case.k, case.v)]

    def run():
        out, lse = case.attend("hopper")(*leaves, case)
        return out, lse, *torch.autograd.grad(out.square().sum() + lse[lse.isfinite()].sum(), leaves)

    for once, again in zip(run(), run(), strict=True):
        assert torch.equal(once, again)


@pytest.mark.parametrize("group", [16, 4])
def test_a_cuda_graph_repeats_a_step(group):
    """Run everything, forward and backward; a capture fails if anything waits for the GPU.

    All bits repeat but dq's last ones: with 16 heads, one pass adds to its fp32 sums in any order.
    """
    sizes, tokens = dx.trained.NsaSizes(32, 16, 64, 4), 700
    draw = lambda *shape: torch.randn(2, tokens, *shape, dtype=torch.bfloat16, device="cuda").requires_grad_()
    leaves = [draw(group, 64), draw(1, 64), draw(1, 64), draw(group, 3)]

    def step():
        q, k, v, gates = leaves
        out = dx.trained.native_sparse_attention(
            q, k, v, (dx.trained.compress(k, sizes), dx.trained.compress(v, sizes)), gates, sizes
        )
        return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)

    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        held = step()
    for leaf in leaves:
        leaf.data.copy_(torch.randn_like(leaf))
    graph.replay()
    (out, dq, *others), (out_again, dq_again, *others_again) = held, step()
    torch.testing.assert_close(dq, dq_again)
    for once, again in zip((out, *others), (out_again, *others_again), strict=True):
        assert torch.equal(once, again)


@pytest.mark.parametrize(("q_heads", "words"), [(16, "12 neighbouring positions"), (4, "else by key"), (2, "by key")])
def test_explain_says_which_schedule(q_heads, words):
    q, k = (torch.zeros(1, 40, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (q_heads, 1))
    indices = torch.zeros(1, 40, 1, 2, dtype=torch.int32, device="cuda")
    indices[..., 1] = -1
    found = dx.trained.explain_selected(q, k, k, indices)
    assert found.chosen == "hopper"
    assert words in str(found)


@pytest.mark.parametrize(
    ("group", "dtype", "dim", "block"),
    [
        (16, torch.bfloat16, 128, 64),
        (8, torch.float16, 64, 128),
        (4, torch.bfloat16, 128, 64),
        (1, torch.float16, 64, 64),
    ],
)
def test_branches_together_have_the_gradients_that_they_have_apart(group, dtype, dim, block, monkeypatch):
    """Also without gradients. The budget of `out` is its own rounding, plus that of the selected branch."""
    from dynaxx.trained.nsa.kernels.hopper import operators as nsa
    from dynaxx.trained.nsa.kernels.hopper.operators import HopperSelectedPlan

    monkeypatch.setattr(HopperSelectedPlan, "attends_window", False)
    sizes, tokens = dx.trained.NsaSizes(slc_block=block, slc_count=5, window=100), 777
    draw = lambda *shape: torch.randn(1, tokens, *shape, dtype=dtype, device="cuda").requires_grad_()
    q, k, v, gates = leaves = [draw(2 * group, dim), draw(2, dim), draw(2, dim), draw(2 * group, 3)]
    do = torch.randn_like(q)
    run = lambda: dx.trained.native_sparse_attention(
        q, k, v, (dx.trained.compress(k, sizes), dx.trained.compress(v, sizes)), gates, sizes
    )

    def step():
        out = run()
        with torch.no_grad():
            assert torch.equal(out, run())
        return out.detach(), torch.autograd.grad(out, leaves, do)

    mixed, grads = step()
    monkeypatch.setattr(nsa, "fused", None)
    apart, grads_apart = step()
    rounding = torch.finfo(dtype).eps * (apart.abs().amax() + gates.abs().amax() * v.abs().amax())
    assert (mixed - apart).abs().amax() <= rounding
    for one, other in zip(grads, grads_apart, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("group", "dtype", "dim"), [(16, torch.bfloat16, 128), (8, torch.float16, 64)])
def test_sums_of_dq_in_one_pass_agree_with_two(group, dtype, dim, monkeypatch):
    """One pass for the compressed branch and the window, or for one of them; both orders of adding to dq."""
    from dynaxx.trained.nsa.kernels.hopper import backward as nsa_backward

    sizes, tokens = dx.trained.NsaSizes(slc_count=5, window=100), 4500
    draw = lambda *shape: torch.randn(2, tokens, *shape, dtype=dtype, device="cuda").requires_grad_()
    q, k, v, gates = leaves = [draw(2 * group, dim), draw(2, dim), draw(2, dim), draw(2 * group, 3)]
    do = torch.randn_like(q)
    out = dx.trained.native_sparse_attention(
        q, k, v, (dx.trained.compress(k, sizes), dx.trained.compress(v, sizes)), gates, sizes
    )

    def run(*keys):
        """Force one pass for branches with this many keys."""
        monkeypatch.setattr(nsa_backward, "in_one_pass", lambda q, k, layout: k.shape[1] in keys)
        return torch.autograd.grad(out, leaves, do, retain_graph=True)

    apart = run()
    compressed = sizes.compressed(tokens)
    for keys in ((compressed, tokens), (compressed,), (tokens,)):
        for one, other in zip(run(*keys), apart, strict=True):
            assert (one - other).abs().amax() <= 4 * torch.finfo(dtype).eps * other.abs().amax()


@pytest.mark.parametrize(
    ("group", "dtype", "dim", "block", "window", "growth"),
    [
        (16, torch.bfloat16, 128, 64, 512, 0),
        (16, torch.bfloat16, 128, 64, 400, 6),
        (16, torch.bfloat16, 128, 64, 400, -6),
        (8, torch.float16, 64, 64, 1, 0),
        (32, torch.bfloat16, 128, 64, 77, 0),
        (64, torch.bfloat16, 64, 128, 300, 0),
        (16, torch.float16, 128, 128, 5000, 0),
    ],
)
@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"), [((700,), (700,)), ((1, 0, 130, 517, 3, 64),) * 2, ((257,), (900,)), ((300,), (90,))]
)
def test_the_window_beside_selected_blocks(group, dtype, dim, block, window, growth, lengths_q, lengths_k):
    """Test the window alone, with zero gates for the other branches. Scores grow by `step` from key to key."""
    ends_q, ends_k = ([sum(some[:i]) for i in range(len(some) + 1)] for some in (lengths_q, lengths_k))
    sizes = dx.trained.NsaSizes(slc_block=block, slc_count=4, window=window)
    q, k, v = make_qkv(1, ends_q[-1], ends_k[-1], 2 * group, 2, dim, dim, dtype=dtype, device="cuda", seed=window)
    if growth:
        q[..., 0], k[..., 0] = dim**0.5, growth * torch.arange(k.shape[1], device="cuda")[:, None]
    mask = packed_layout(SlidingWindow(window), ends_q, ends_k, block_size=128, device="cuda").to_dense()
    gates = torch.zeros(ends_q[-1], 2 * group, 3, dtype=dtype, device="cuda")
    gates[..., 2] = 1
    do = torch.randn_like(q)

    def ours(q, k, v):
        pooled = tuple(dx.trained.compress(x[0], sizes, cu_seqlens=ends_k) for x in (k, v))
        return dx.trained.native_sparse_attention(
            q[0], k[0], v[0], pooled, gates, sizes, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, backend="hopper"
        )[None]

    def run(attend, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out = attend(*leaves)
        with torch.no_grad():
            assert torch.equal(out, attend(*leaves))
        return out.detach(), *torch.autograd.grad(out, leaves, do.to(dtype))

    formula = lambda q, k, v: oracle_attention(q, k, v, mask)[0]
    rounded = rounding_errors({"q": q, "k": k, "v": v}, mask, do)
    for report in error_reports(
        ("out", "dq", "dk", "dv"), run(ours, dtype), run(formula, dtype), run(formula, torch.float64), rounded
    ):
        assert report.ok, report
