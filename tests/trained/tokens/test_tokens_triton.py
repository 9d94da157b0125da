# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels over chosen tokens against fp64: under Triton's interpreter on a CPU, and on a GPU."""

import pytest
import torch

import dynaxx as dx
from dynaxx.kernels.device import CARDS, described_as
from dynaxx.trained.testing.tokens import latent_errors, random_token_case
from interpreter import DEVICE, INTERPRETED, on_gpu, run_interpreted, runs_here, starts_interpreter

pytest.importorskip("triton")


@pytest.mark.slow  # fingerprints show that kernels are those that passed
@starts_interpreter
def test_under_the_interpreter():
    run_interpreted(__file__)


def check(case):
    for report in case.check("triton"):
        assert report.ok, f"{report}\n{case.label}"


@runs_here
@pytest.mark.parametrize("seed", range(5))
def test_random_cases(seed):
    """Use fp32 and fp16, because the interpreter does not multiply bf16."""
    sizes = {"head_dims": ((8, 8), (24, 16)), "lengths": (0, 1, 7), "groups": (1, 2, 3, 5, 17), "slots": (1, 5, 20)}
    check(random_token_case(seed, dtype=torch.float16 if seed % 2 else torch.float32, device=DEVICE, **sizes))


@on_gpu
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("head_dim", [(64, 64), (128, 128), (192, 128), (256, 256), (576, 512)])
def test_random_cases_in_bf16(seed, head_dim):
    lengths, groups = (0, 1, 65, 190), (1, 3, 4, 8, 12, 16, 70)
    check(random_token_case(seed, dtype=torch.bfloat16, device=DEVICE, head_dims=(head_dim,), lengths=lengths,
                            groups=groups))  # fmt: skip


@runs_here
def test_latent_widths():
    """Rows of 576 are read in two parts, 512 and 64."""
    sizes = {"head_dims": ((576, 512),), "lengths": (3,), "groups": (3,), "slots": (3,), "block_sizes": (1,)}
    check(random_token_case(3, device=DEVICE, **sizes))


@runs_here
def test_sinks_odd_strides_and_the_same_bits():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 12, heads, 40, device=DEVICE)[..., ::2].requires_grad_() for heads in (4, 2, 2))
    sinks = torch.randn(4, device=DEVICE)
    chosen = torch.stack([torch.randperm(12, device=DEVICE)[:6] for _ in range(12)])[None, :, None]
    run = lambda backend, *inputs: dx.trained.selected_attention(
        *inputs, chosen, block_size=1, sinks=sinks, backend=backend
    )
    out = run("triton", q, k, v)
    torch.testing.assert_close(out.double(), run("reference", q.double(), k.double(), v.double()), atol=1e-6, rtol=1e-5)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    for one, other in zip(grads, torch.autograd.grad(run("triton", q, k, v).sum(), (q, k, v)), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(grads, torch.autograd.grad(run("reference", q, k, v).sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@runs_here
def test_numbers_out_of_range_are_not_read():
    q, k, v = (torch.randn(1, 12, 2, 8, device=DEVICE) for _ in range(3))
    from dynaxx.trained.tokens.kernels.gpu import operators, plan
    from dynaxx.trained.tokens.spans import TokenSpans

    spans = TokenSpans((0, 12), (0, 12))
    chosen = torch.tensor([[[1 << 30, -7, 3, 12]]], dtype=torch.int32, device=DEVICE).expand(12, 1, 4).contiguous()
    out, lse = operators.forward(q[0], k[0], v[0], plan.prepare(chosen, spans, q[0], k[0], v[0]), 0.3)
    torch.testing.assert_close(out[4:], v[0, 3].expand(8, 2, 8))
    assert (lse[:, :3] == -torch.inf).all()
    assert not out[:3].any()


def in_steps(monkeypatch, wide):
    """Use the wide backward for small widths."""
    from dynaxx.trained.tokens.kernels.gpu import gradients, operators

    for module in (gradients, operators) if wide else ():
        monkeypatch.setattr(module, "WIDE", 0)


@runs_here
@pytest.mark.parametrize(
    ("heads", "select_heads", "wide"), [((8, 2), 1, False), ((8, 2), 4, False), ((4, 2), 4, True), ((40, 1), 1, True)]
)
def test_rows_of_gradients_in_pieces(heads, select_heads, wide, monkeypatch):
    """With a small workspace, kv heads are processed one by one and tiles a few at a time; 40 heads fill parts of a
    tile.
    """
    from dynaxx.trained.tokens.kernels.gpu import gradients

    in_steps(monkeypatch, wide)
    torch.manual_seed(1)
    q, k, v = (
        torch.randn(1, 6, count, width, device=DEVICE, requires_grad=True)
        for count, width in ((heads[0], 24), (heads[1], 24), (heads[1], 16))
    )
    chosen = torch.stack([torch.randperm(3, device=DEVICE) for _ in range(6 * select_heads)])
    chosen = chosen.view(1, 6, select_heads, 3)
    chosen[0, 5] = -1

    def gradients_of(backend, dtype):
        out, lse = dx.trained.selected_attention(
            *(x.to(dtype) for x in (q, k, v)), chosen, block_size=2, return_lse=True, backend=backend
        )
        return torch.autograd.grad((out * out).sum() + lse[lse.isfinite()].sin().sum(), (q, k, v))

    want, whole = gradients_of("reference", torch.float64), gradients_of("triton", torch.float32)
    monkeypatch.setattr(gradients, "WORKSPACE", 1 << 13)
    for pieces, at_once, reference in zip(gradients_of("triton", torch.float32), whole, want, strict=True):
        torch.testing.assert_close(pieces, at_once, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(at_once.double(), reference.double(), atol=1e-4, rtol=1e-4)


@runs_here
@pytest.mark.parametrize("select_heads", [1, 2])
@pytest.mark.parametrize(("widths", "by_thread"), [((24, 16), False), ((64, 128), False), ((64, 64), True)])
def test_rows_in_16_bits_are_added_by_products(select_heads, widths, by_thread, monkeypatch):
    """Keys share their entries, 32 at a time; a sequence may begin within these. Columns may come as threads have them:
    thread t of four has columns 8 j + 2 t and 8 j + 2 t + 1.
    """
    from dynaxx.trained.tokens.kernels.gpu import gradients

    order = [8 * j + 2 * t + e for first in range(0, 16, 4) for t in range(4) for j in range(first, first + 4)
             for e in range(2)]  # fmt: skip
    narrow_rows = gradients.narrow_rows

    def as_threads_have_them(*given):
        found = narrow_rows(*given)
        return found._replace(rows=found.rows[:, order].contiguous(), by_thread=True)

    if by_thread:
        monkeypatch.setattr(gradients, "narrow_rows", as_threads_have_them)
    torch.manual_seed(2)
    q, k, v = (
        torch.randn(70, count, width, device=DEVICE).half().requires_grad_()
        for count, width in ((4, widths[0]), (2, widths[0]), (2, widths[1]))
    )
    ends = (0, 21, 21, 70)
    chosen = torch.stack([torch.randperm(45, device=DEVICE)[:20] for _ in range(70 * select_heads)])
    chosen = chosen.view(70, select_heads, 20).int()
    chosen[:21] = torch.where(chosen[:21] < 21, chosen[:21], -1)

    def gradients_of(backend, dtype):
        out = dx.trained.selected_attention(
            *(x.to(dtype) for x in (q, k, v)), chosen, block_size=1, cu_seqlens_q=ends, backend=backend
        )
        return torch.autograd.grad(out.square().sum(), (q, k, v))

    want = gradients_of("reference", torch.float64)
    for workspace in (gradients.WORKSPACE, 1 << 15):
        monkeypatch.setattr(gradients, "WORKSPACE", workspace)
        got = gradients_of("triton", torch.float16)
        for x, y in zip(got, want, strict=True):
            assert (x.double() - y).norm() <= 2e-3 * y.double().norm()
        assert all(torch.equal(x, y) for x, y in zip(got, gradients_of("triton", torch.float16), strict=True))


@runs_here
@pytest.mark.parametrize(("dtype", "wide"), [(torch.float32, False), (torch.float16, True)])
def test_latent_rows_are_read_once(dtype, wide, monkeypatch):
    """If values are a view of the keys, the latent vectors get the sum of both gradients."""
    compare_latent((144, 128), dtype, wide, monkeypatch)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latent_rows_of_mla(dtype, monkeypatch):
    compare_latent((576, 512), dtype, False, monkeypatch)


@pytest.mark.skipif(not INTERPRETED, reason="tiles of a GPU that is not here run under the interpreter")
@pytest.mark.parametrize("card", ["L40S", "B200", "MI300X"])
def test_latent_attention_with_tiles_of_other_gpus(card):
    with described_as(CARDS[card]):
        for report in latent_errors(20, 70, 24, heads=128, dtype=torch.float16, device="cpu", backend="triton"):
            assert report.ok, report


def compare_latent(widths, dtype, wide, monkeypatch):
    in_steps(monkeypatch, wide)
    torch.manual_seed(2)
    latent = torch.randn(1, 5, 1, widths[0], device=DEVICE).to(dtype).requires_grad_()
    q = torch.randn(1, 5, 80, widths[0], device=DEVICE).to(dtype).requires_grad_()
    chosen = torch.stack([torch.randperm(5, device=DEVICE)[:3] for _ in range(5)])[None, :, None]

    def run(backend, kind):
        x, y = q.to(kind), latent.to(kind)
        out = dx.trained.selected_attention(x, y, y[..., : widths[1]], chosen, block_size=1, scale=0.1, backend=backend)
        return out, *torch.autograd.grad(out.square().sum(), (q, latent))

    limit = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]
    for got, want in zip(run("triton", dtype), run("reference", torch.float64), strict=True):
        assert (got.double() - want.double()).norm() < limit * want.double().norm()
