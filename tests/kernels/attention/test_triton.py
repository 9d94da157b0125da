# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels agree with the oracle: under Triton's interpreter on a CPU, and on a GPU if there is one.

The interpreter must be chosen before Triton loads and then serves every CPU tensor, so it runs in a process of its
own: `test_under_the_interpreter` runs this file again.
"""

from functools import partial

import pytest
import torch

import dynaxx as dx
from cuda_graphs import check_replay
from dynaxx.kernels.attention.contract import AttentionProblem
from dynaxx.kernels.device import CARDS, described_as
from dynaxx.kernels.registry import ATTENTION
from dynaxx.kernels.sinks import add_sinks
from dynaxx.testing import check_forward, check_gradients, make_qkv, random_case
from interpreter import DEVICE, INTERPRETED, on_gpu, run_interpreted, runs_here, starts_interpreter

pytest.importorskip("triton")
from dynaxx.kernels.attention.triton import forward
from dynaxx.kernels.primitives.sinks import include_sinks
from dynaxx.kernels.schedule.split_sums import sum_pieces

gpu = pytest.mark.gpu


def attend(q, k, v, layout):
    return dx.sparse_attention(q, k, v, layout, return_lse=True, backend="triton")


def check(case, gradients):
    reports = check_forward(attend, case.q, case.k, case.v, case.layout)
    reports += check_gradients(attend, case.q, case.k, case.v, case.layout) if gradients else []
    for report in reports:
        assert report.ok, f"{report}\n{case.label}"


@starts_interpreter
def test_under_the_interpreter():
    run_interpreted(__file__)


@runs_here
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 40])
def test_sinks_included_by_a_kernel_are_those_added(dtype, head_dim):
    gen = torch.Generator(DEVICE).manual_seed(0)
    draw = partial(torch.randn, generator=gen, device=DEVICE)
    out, lse = draw(2, 70, 3, head_dim).to(dtype), draw(2, 3, 70)
    lse[0, 1, :7], out[0, :7, 1] = -torch.inf, 0
    lse[1, 2, 5], lse[1, 2, 6] = 200.0, -200.0
    layout = dx.SlidingWindow(8).layout(70, block_size=16, device=DEVICE)
    for sink in (-torch.inf, 0.0, 90.0):
        sinks = torch.tensor([sink, sink, 1.0], dtype=dtype, device=DEVICE)
        want_out, want_lse = add_sinks(out, lse, sinks)
        found_out, found_lse = include_sinks(out.clone(), lse.clone(), sinks, layout)
        step = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps  # the interpreter rounds towards zero
        torch.testing.assert_close(found_out, want_out, rtol=2e-6 + step, atol=1e-6)
        torch.testing.assert_close(found_lse, want_lse, rtol=2e-6, atol=1e-6)


@runs_here
@pytest.mark.parametrize("pieces", [2, 7])
def test_pieces_of_a_group_are_summed(pieces):
    gen = torch.Generator(DEVICE).manual_seed(0)
    layout = dx.Causal().layout(64, block_size=16, device=DEVICE)
    given = [torch.randn(2, 33, 2 * pieces, dim, generator=gen, device=DEVICE) for dim in (80, 40)]
    for found, x in zip(sum_pieces(*given, pieces, layout), given, strict=True):
        torch.testing.assert_close(found, x.unflatten(2, (2, pieces)).sum(3), rtol=1e-6, atol=1e-5)


@runs_here
def test_a_gathered_tile_may_have_empty_slots():
    """Five blocks of 16 keys fill a tile of 64 and a part of the next, where the sequence ends with a block."""
    q, k, v = make_qkv(1, 80, 80, 2, 2, 16, dtype=torch.float16, device=DEVICE)
    layout = dx.Full().layout(80, block_size=(32, 16), device=DEVICE)
    for report in check_forward(attend, q, k, v, layout) + check_gradients(attend, q, k, v, layout):
        assert report.ok, str(report)


@runs_here
@pytest.mark.parametrize("seed", range(40))
def test_random_cases(seed):
    """Use fp32 and fp16, because the interpreter does not multiply bf16; every fourth case checks gradients."""
    dtype = torch.float16 if seed % 2 else torch.float32
    lengths = (1, 15, 17, 40) if seed % 4 == 0 else (1, 63, 65, 100)
    case = random_case(seed, dtype=dtype, device=DEVICE, head_dims=(16, 24, 64, 80), lengths=lengths)
    check(case, gradients=seed % 4 == 0)


@runs_here
@pytest.mark.parametrize(
    ("block", "head_dim_v", "dtype"), [(64, 512, 16), (128, 512, 16), (128, 272, 16), (32, 512, 16), (64, 256, 32)]
)
def test_head_dim_512(block, head_dim_v, dtype):
    """Cover Gemma 4's global layers; dk and dv take one launch each, and a group may share one kv head."""
    dtype = torch.float16 if dtype == 16 else torch.float32
    q, k, v = make_qkv(1, 40, 70, 2, 1, 512, head_dim_v, dtype=dtype, device=DEVICE)
    layout = (dx.SlidingWindow(50) | dx.Sink(3)).layout(40, 70, block_size=block, device=DEVICE)
    reports = check_forward(attend, q, k, v, layout)
    if dtype == torch.float16 or DEVICE == "cuda":  # exact fp32 takes the interpreter half a minute
        reports += check_gradients(attend, q, k, v, layout)
    assert all(report.ok for report in reports), "\n".join(map(str, reports))


@runs_here
@pytest.mark.parametrize(
    ("card", "head_dim", "block"),
    [("A100", 64, 64), ("A100", 200, 32), ("RTX 5090", 128, 128), ("B200", 80, 128), ("MI300X", 64, 128)],
)
def test_tiles_of_gpus_on_which_none_were_measured(card, head_dim, block):
    q, k, v = make_qkv(1, 90, 130, 2, 1, head_dim, dtype=torch.float16, device=DEVICE)
    layout = (dx.SlidingWindow(70) | dx.Sink(3)).layout(90, 130, block_size=block, device=DEVICE)
    with described_as(CARDS[card]):
        reports = check_forward(attend, q, k, v, layout) + check_gradients(attend, q, k, v, layout)
    assert all(report.ok for report in reports), "\n".join(map(str, reports))


@gpu
@on_gpu
@pytest.mark.parametrize(("dtype", "block"), [(torch.bfloat16, 128), (torch.bfloat16, 32), (torch.float32, 64)])
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_head_dim_512_on_a_gpu(dtype, block, softcap):
    q, k, v = make_qkv(2, 700, 700, 16, 1, 512, dtype=dtype, device=DEVICE)
    layout = (dx.SlidingWindow(300) | dx.Sink(3)).layout(700, block_size=block, device=DEVICE)
    capped = lambda q, k, v, layout: dx.sparse_attention(
        q, k, v, layout, softcap=softcap, return_lse=True, backend="triton"
    )
    given = {} if softcap is None else {"softcap": softcap}
    for report in check_forward(capped, q, k, v, layout, **given) + check_gradients(capped, q, k, v, layout, **given):
        assert report.ok, str(report)


@gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("seed", range(20))
def test_random_cases_on_a_gpu(seed, dtype):
    check(random_case(1000 + seed, dtype=dtype, device=DEVICE, head_dims=(64, 128, 256, 40)), gradients=True)


@runs_here
def test_gradients_of_out_or_of_lse_alone():
    q, k, v = (x.requires_grad_() for x in make_qkv(1, 70, 70, 2, 1, 16, device=DEVICE))
    layout = (dx.SlidingWindow(40) | dx.Sink(3)).layout(70, block_size=64, device=DEVICE)
    out, lse = attend(q, k, v, layout)
    do, dlse = torch.randn_like(out), torch.randn_like(lse)
    gradients = lambda given, grads: torch.autograd.grad(given, (q, k, v), grads, retain_graph=True)
    for alone, both in (
        (gradients(out, do), gradients((out, lse), (do, torch.zeros_like(lse)))),
        (gradients(lse, dlse), gradients((out, lse), (torch.zeros_like(out), dlse))),
    ):
        assert all(torch.equal(x, y) for x, y in zip(alone, both, strict=True))


@runs_here
def test_a_query_that_sees_nothing():
    q, k, v = (x.requires_grad_() for x in make_qkv(1, 40, 20, 2, 1, 16, device=DEVICE))
    out, lse = attend(q, k, v, dx.Full().layout(40, 20, block_size=16, device=DEVICE))
    assert (out[:, :20] == 0).all()
    assert (lse[..., :20] == -torch.inf).all()
    out.sum().backward()  # this gradient has stride zero
    for grad in (q.grad, k.grad, v.grad):
        assert grad.isfinite().all()
    assert (q.grad[:, :20] == 0).all()


@runs_here
@pytest.mark.parametrize("scale", [0.3, -0.5, 0.0])
def test_any_scale(scale):
    q, k, v = make_qkv(1, 40, 40, 2, 1, 16, device=DEVICE)
    layout = (dx.SlidingWindow(9) | dx.Strided(4)).layout(40, block_size=16, device=DEVICE)
    run = lambda q, k, v, layout: dx.sparse_attention(q, k, v, layout, scale=scale, return_lse=True, backend="triton")
    for report in check_forward(run, q, k, v, layout, scale) + check_gradients(run, q, k, v, layout, scale):
        assert report.ok, report


@runs_here
@pytest.mark.parametrize("level", [-80, -25, 300])
def test_keys_past_the_end_weigh_nothing(level):
    """Keys past the end have scores of 0, even if all real keys score far lower or higher."""
    q, k, v = make_qkv(1, 40, 65, 2, 1, 16, dtype=torch.float16, device=DEVICE)
    q[..., 0], k[..., 0] = 16, level * 16**0.5 / 16
    for pattern in (dx.Full(), dx.SlidingWindow((30, 30))):
        layout = pattern.layout(40, 65, block_size=64, device=DEVICE)
        for report in check_forward(attend, q, k, v, layout) + check_gradients(attend, q, k, v, layout):
            assert report.ok, f"{pattern}: {report}"


@runs_here
@pytest.mark.parametrize("scale", [0.3, -0.5, 0.0])
def test_capped_scores(scale):
    q, k, v = make_qkv(1, 40, 40, 2, 1, 16, device=DEVICE)
    layout = (dx.SlidingWindow(9) | dx.Strided(4)).layout(40, block_size=16, device=DEVICE)
    for softcap in (0.1, 2.0, 50.0):
        run = lambda q, k, v, layout, softcap=softcap: dx.sparse_attention(
            q, k, v, layout, scale=scale, softcap=softcap, return_lse=True, backend="triton"
        )
        reports = check_forward(run, q, k, v, layout, scale, softcap=softcap)
        for report in reports + check_gradients(run, q, k, v, layout, scale, softcap=softcap):
            assert report.ok, report


@runs_here
def test_views_of_any_stride():
    wide = make_qkv(2, 35, 35, 2, 1, 40, device=DEVICE)
    views = [
        tuple(x[1:, ..., 3:35] for x in wide),
        tuple(x[:1].transpose(1, 2).contiguous().transpose(1, 2) for x in wide),
        tuple(x.transpose(1, 3).contiguous().transpose(1, 3)[:1] for x in wide),
        tuple(x.flip(0)[:1].expand(2, -1, -1, -1) for x in wide),
    ]
    layout = dx.SlidingWindow(20).layout(35, block_size=(32, 16), device=DEVICE)
    for q, k, v in views:
        for report in check_forward(attend, q, k, v, layout) + check_gradients(attend, q, k, v, layout):
            assert report.ok, report


@runs_here
def test_rows_of_nan_stay_alone():
    """A hidden key or another batch entry never leaks into a row, whatever it holds."""
    q, k, v = make_qkv(2, 40, 40, 2, 2, 16, device=DEVICE)
    k[1], v[1] = torch.nan, torch.nan
    layout = dx.SlidingWindow(12).layout(40, block_size=16, device=DEVICE)
    out, lse = attend(q, k, v, layout)
    assert out[0].isfinite().all()
    assert lse[0].isfinite().all()
    assert out[1].isnan().all()


@runs_here
def test_bad_layouts_read_nothing_outside():
    q, k, v = make_qkv(1, 64, 64, 2, 1, 16, device=DEVICE)
    good = (dx.SlidingWindow(20) | dx.Dilated(3, 5)).layout(64, block_size=(32, 16), device=DEVICE)
    tensors = {name: getattr(good, name) for name in ("kv_indptr", "kv_num_partial", "kv_indices", "kv_masks")}
    for name in tensors:
        for wrong in (-(1 << 20), 1 << 20, 2**31 - 1):
            bad = dx.BlockLayout(64, 64, (32, 16), **{**tensors, name: torch.full_like(tensors[name], wrong)},
                                 masks=good.masks)  # fmt: skip
            out, _ = ATTENTION.kernels("triton").attention_forward(q, k, v, bad, 0.25)
            assert out.shape == q.shape
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@runs_here
def test_more_tiles_of_a_head_than_start_together():
    q, k, v = make_qkv(1, 258, 258, 1, 1, 16, device=DEVICE)
    layout = (dx.SlidingWindow(8) | dx.GlobalTokens(2)).layout(258, block_size=16, device=DEVICE)
    for report in check_forward(attend, q, k, v, layout) + check_gradients(attend, q, k, v, layout):
        assert report.ok, report


@runs_here
def test_nothing_to_do():
    for batch, seqlen_q, seqlen_k in ((0, 5, 5), (1, 0, 5), (1, 5, 0)):
        q, k, v = (x.requires_grad_() for x in make_qkv(batch, seqlen_q, seqlen_k, 2, 1, 16, device=DEVICE))
        out, lse = attend(q, k, v, dx.Full().layout(seqlen_q, seqlen_k, block_size=16, device=DEVICE))
        assert (out == 0).all()
        assert (lse == -torch.inf).all()
        out.sum().backward()
        assert (q.grad == 0).all()


@gpu
@on_gpu
def test_two_runs_agree_bit_for_bit():
    q, k, v = (x.requires_grad_() for x in make_qkv(2, 500, 700, 6, 2, 64, dtype=torch.bfloat16, device=DEVICE))
    layout = (dx.SlidingWindow(100) | dx.GlobalTokens(9)).layout(500, 700, block_size=64, device=DEVICE)

    def run():
        out, lse = attend(q, k, v, layout)
        return out, lse, *torch.autograd.grad(out.square().sum() + lse[lse.isfinite()].sum(), (q, k, v))

    for once, again in zip(run(), run(), strict=True):
        assert torch.equal(once, again)


@gpu
@on_gpu
def test_lengths_do_not_recompile():
    from dynaxx.kernels.attention.triton.forward import _sparse_attention_fwd_kernel as kernel

    compiled = lambda: len(kernel.device_caches[torch.cuda.current_device()][0])
    counts = []
    for seqlen in (64, 100, 129, 1, 1000, 2048):
        q, k, v = make_qkv(1, seqlen, seqlen, 2, 1, 32, dtype=torch.float16, device=DEVICE)
        attend(q, k, v, dx.SlidingWindow(30).layout(seqlen, block_size=32, device=DEVICE))
        counts.append(compiled())
    assert counts[-1] == counts[0], counts


@gpu
@on_gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("step", [10, 60, 300, 1200])
@pytest.mark.parametrize("first", [0, -1000])
def test_scores_that_grow_from_block_to_block(first, step, head_dim, monkeypatch):
    """In bf16, weights are relative to the scores of earlier blocks; scores rise by `step` per block, or fall, or stay.

    Half of the queries see nothing of the only partial block, which comes first.
    """
    monkeypatch.setattr(forward, "MANY_TILES", 0)
    q, k, v = make_qkv(1, 512, 1024, 4, 2, head_dim, dtype=torch.bfloat16, device="cuda")
    q[..., 0] = torch.tensor([1, 1, -1, 0], device="cuda").repeat(128)[None, :, None]
    k[..., 0] = (first + torch.arange(1024, device="cuda") // 128 * step)[None, :, None]
    mask = torch.ones(512, 1024, dtype=torch.bool, device="cuda")
    mask[::2, 512:640] = False
    layout = dx.BlockLayout.from_dense(mask, block_size=128)
    for report in check_forward(attend, q, k, v, layout):
        assert report.ok, report


@gpu
@on_gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_forwards_with_one_score_far_above_those_before(head_dim, monkeypatch):
    """The second launch recomputes that tile and no other; rows that see nothing stay unchanged."""
    q, k, v = make_qkv(1, 4096, 4096, 4, 2, head_dim, dtype=torch.bfloat16, device="cuda")
    q[0, 3000, 1], k[0, 700, 0] = 30, 30
    q[0, 3001, 1, 0], v[0, 700, 0] = float("inf"), 1e30
    layout = (dx.patterns.SlidingWindow(512) | dx.patterns.Sink(1024)).layout(4096, block_size=128, device="cuda")
    monkeypatch.setattr(forward, "MANY_TILES", 1 << 30)
    out, lse = forward.attention_forward(q, k, v, layout, head_dim**-0.5)
    monkeypatch.setattr(forward, "MANY_TILES", 0)
    for _ in range(2):
        found, found_lse = forward.attention_forward(q, k, v, layout, head_dim**-0.5)
        torch.testing.assert_close(found, out, rtol=2**-6, atol=2**-7, equal_nan=True)
        torch.testing.assert_close(found_lse, lse, rtol=1e-5, atol=1e-5, equal_nan=True)
    rows = slice(3000 // 128 * 128, 3000 // 128 * 128 + 128)
    assert torch.equal(found[:, rows, 1].nan_to_num(), out[:, rows, 1].nan_to_num())


@gpu
@on_gpu
def test_cuda_graph():
    q, k, v = make_qkv(1, 300, 300, 4, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    layout = dx.SlidingWindow(77).layout(300, block_size=64, device=DEVICE)
    check_replay(attend, q, k, v, layout)


@pytest.mark.skipif(not INTERPRETED, reason="tiles of a GPU that is not here run under the interpreter")
@pytest.mark.parametrize("card", ["A100", "L40S", "B200", "MI300X"])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_tiles_of_other_gpus_give_the_same_result(head_dim, card):
    q, k, v = make_qkv(1, 150, 200, 4, 2, head_dim, dtype=torch.float16, device="cpu")
    layout = (dx.SlidingWindow(90) | dx.Sink(3)).layout(150, 200, block_size=64, device="cpu")
    with described_as(CARDS[card]):
        for report in check_forward(attend, q, k, v, layout) + check_gradients(attend, q, k, v, layout):
            assert report.ok, report


def problem(**changes):
    values = {
        "device": torch.device("cuda"), "dtype": torch.float16, "batch": 1, "seqlen_q": 64, "seqlen_k": 64,
        "q_heads": 2, "kv_heads": 1, "head_dim": 64, "head_dim_v": 64, "block_size": (64, 64), "needs_grad": False,
    }  # fmt: skip
    return AttentionProblem(**{**values, **changes})


def test_refusals_say_why():
    reasons = lambda **changes: "; ".join(ATTENTION.reasons("triton", problem(**changes)))
    assert reasons() == ""
    assert "fp16, bf16 and fp32" in reasons(dtype=torch.float64)
    assert "head_dim up to 512" in reasons(head_dim=576)
    if not INTERPRETED:
        assert "runs on a GPU" in reasons(device=torch.device("cpu"))
