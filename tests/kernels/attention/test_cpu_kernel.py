# SPDX-License-Identifier: Apache-2.0
"""The CPU core and the gathering kernels in torch agree with the oracle, edge cases included."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import dynaxx as dx
from dynaxx.core import build, library
from dynaxx.kernels.attention import cpu
from dynaxx.kernels.attention.cpu import backward, gather
from dynaxx.kernels.attention.cpu.plan import mask_tables
from dynaxx.testing import check_forward, check_gradients, make_qkv, random_case
from isas import ISAS

SHORT = {"lengths": (1, 15, 17, 63, 64, 65, 100, 129), "head_dims": (16, 24, 32, 64, 80, 96)}

needs_core = pytest.mark.skipif(library.active_library() is None, reason="no C++ core here")


def attend(q, k, v, layout):
    return cpu.attention_forward(q, k, v, layout, q.shape[-1] ** -0.5)


def attend_differentiably(q, k, v, layout):
    return dx.sparse_attention(q, k, v, layout, return_lse=True, backend="cpu")


def attend_by_gather(q, k, v, layout, softcap=None):
    return gather.attention_forward(q, k, v, layout, q.shape[-1] ** -0.5, softcap)


def assert_within_budget(reports, case):
    for report in reports:
        assert report.ok, f"{report}\n{case.label}"


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill new tensors with NaN and use one thread, so that anything a kernel fails to write shows."""
    threads, before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
    torch.set_num_threads(threads)


@pytest.fixture
def isa(monkeypatch, request):
    monkeypatch.setenv(library.ISA_VARIABLE, request.param)
    return request.param


def seeds_of(first, last, step, quick):
    """Return ranges of seeds as parameters: those from `quick` on are slow."""
    marks = lambda start: [pytest.mark.slow] * (start >= quick)
    return [pytest.param(range(at, at + step), id=f"{at} on", marks=marks(at)) for at in range(first, last, step)]


@needs_core
@pytest.mark.parametrize("seeds", seeds_of(0, 950, 50, quick=350))
def test_random_cases(seeds):
    for seed in seeds:
        case = random_case(seed, **SHORT)
        assert_within_budget(check_forward(attend, case.q, case.k, case.v, case.layout), case)


@needs_core
@pytest.mark.parametrize("seeds", seeds_of(5000, 5080, 20, quick=5020))
def test_random_cases_of_any_size_on_two_threads(seeds):
    torch.set_num_threads(2)
    for seed in seeds:
        case = random_case(seed)
        assert_within_budget(check_forward(attend, case.q, case.k, case.v, case.layout), case)


@needs_core
@pytest.mark.parametrize("seeds", seeds_of(2000, 2250, 10, quick=2100))
def test_gradients_of_random_cases(seeds):
    torch.set_num_threads(2 if seeds[0] == 2000 else 1)
    for seed in seeds:
        case = random_case(seed, **SHORT)
        assert_within_budget(check_gradients(attend_differentiably, case.q, case.k, case.v, case.layout), case)


@needs_core
def test_gradients_of_random_cases_of_any_size():
    for seed in range(6000, 6025):
        case = random_case(seed)
        assert_within_budget(check_gradients(attend_differentiably, case.q, case.k, case.v, case.layout), case)


@needs_core
def test_long_rows_do_not_gather_rounding():
    q, k, v = make_qkv(1, 1024, 1024, 4, 1, 64)
    layout = dx.Full().layout(1024, block_size=64)
    for check in (check_forward, check_gradients):
        for report in check(attend_differentiably, q, k, v, layout):
            assert report.ok, str(report)


@needs_core
@pytest.mark.parametrize("isa", ISAS, indirect=True)
@pytest.mark.parametrize("size", [10.0, 1e3, 1e5, 1e7, 1e10, 1e30])
def test_equal_scores_of_any_size_give_equal_weights(isa, size):
    """Each of 64 steps of a row has the same largest score, which must not rescale the sums of the steps before it."""
    q, k = torch.zeros(1, 64, 1, 8), torch.zeros(1, 8192, 1, 8)
    q[..., 0], k[..., 0] = torch.linspace(1, 1.01, 64)[:, None], size
    v = torch.linspace(-1, 1, 8192)[:, None, None].expand(1, 8192, 1, 8)  # their mean is 0
    layout = dx.Full().layout(64, 8192, causal=False, block_size=64)
    out, lse = dx.sparse_attention(q, k, v, layout, scale=1.0, return_lse=True, backend="cpu")
    assert out.abs().max() <= 1e-6
    wanted = q[0, :, 0, 0].double() * k[0, 0, 0, 0].double() + torch.tensor(8192.0).double().log()
    assert ((lse[0, 0] - wanted) / wanted).abs().max() <= 3e-7


@needs_core
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_bitwise_the_same_on_any_number_of_threads(dtype, monkeypatch):
    q, k, v = make_qkv(2, 257, 257, 6, 2, 64, 32, dtype=dtype)
    layout = (dx.SlidingWindow(70) | dx.RandomBlocks(2)).layout(257, block_size=32)
    out, lse = attend(q, k, v, layout)
    run = lambda: cpu.attention_backward(out * 2, None, q, k, v, out, lse, layout, 0.125)
    want = run()
    for threads in (1, 2, 2, 5):
        torch.set_num_threads(threads)
        assert all(torch.equal(a, b) for a, b in zip(run(), want, strict=True))
    monkeypatch.setattr(backward, "LOW_BYTES", 0)
    monkeypatch.setattr(backward, "LOW_SHARE", 0.0)
    assert backward.heads_at_a_time(q, v, 5) == ((1, 1) if dtype == torch.bfloat16 else (4, 3))
    assert all(torch.equal(a, b) for a, b in zip(run(), want, strict=True))


@needs_core
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_heads_in_parts(dtype, monkeypatch):
    monkeypatch.setattr(backward, "LOW_BYTES", 0)
    monkeypatch.setattr(backward, "LOW_SHARE", 0.0)
    torch.set_num_threads(2)
    for seed in range(8):
        case = random_case(seed, dtype=dtype, **SHORT)
        assert_within_budget(check_gradients(attend_differentiably, case.q, case.k, case.v, case.layout), case)


@needs_core
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [0.3, 2.0, 50.0])
def test_softcap(dtype, softcap):
    capped = partial(dx.sparse_attention, softcap=softcap, return_lse=True, backend="cpu")
    for seed in range(8):
        case = random_case(seed, dtype=dtype, **SHORT)
        for check in (check_forward, check_gradients):
            assert_within_budget(check(capped, case.q, case.k, case.v, case.layout, softcap=softcap), case)


@needs_core
@pytest.mark.parametrize("size", [1e-6, 1e-2, 1.0, 30.0, 3e4])
def test_softcap_of_scores_of_any_size(size):
    capped = partial(dx.sparse_attention, softcap=4.0, return_lse=True, backend="cpu")
    case = random_case(11, lengths=(129,), head_dims=(64,))
    q = case.q * size
    for report in check_forward(capped, q, case.k, case.v, case.layout, softcap=4.0):
        assert report.ok, report


@needs_core
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-30])
def test_softcap_of_any_scale(scale):
    case = random_case(11, lengths=(100,), head_dims=(32,))
    capped = partial(dx.sparse_attention, scale=scale, softcap=0.5, return_lse=True, backend="cpu")
    for check in (check_forward, check_gradients):
        assert_within_budget(check(capped, case.q, case.k, case.v, case.layout, scale, softcap=0.5), case)


MEMORY = """
import torch, dynaxx as dx

def kib(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

def megabytes(shape, dtype, seqlen, gradients):
    q_heads, kv_heads, head_dim = shape
    layout = (dx.SlidingWindow(128) | dx.Sink(64)).layout(seqlen, block_size=64)
    q, k, v = (
        torch.empty(1, seqlen, heads, head_dim, dtype=dtype).uniform_(-1, 1).requires_grad_(gradients)
        for heads in (q_heads, kv_heads, kv_heads)
    )
    out = dx.sparse_attention(q, k, v, layout, backend="cpu")
    tensors = [q, k, v, out]
    if gradients:
        do = torch.empty_like(out).uniform_(-1, 1)
        tensors += [do, *torch.autograd.grad(out, (q, k, v), do)]
    return sum(x.nbytes for x in tensors) / 2**20

torch.set_num_threads(2)
for dtype in (torch.float32, torch.bfloat16):
    for shape in ((6, 6, 64), (9, 3, 64), (4, 1, 128)):
        for gradients in (False, True):
            megabytes(shape, dtype, 128, gradients)  # what is allocated once: threads, their memory to work in
            before = kib("VmRSS")
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # the peak starts anew
            tensors = megabytes(shape, dtype, 16384, gradients)
            print(shape, dtype, gradients, tensors, (kib("VmHWM") - before) / 1024, sep="; ")
"""


@pytest.mark.slow
@needs_core
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="peak memory is read from Linux's /proc")
def test_peak_memory_is_that_of_inputs_outputs_and_gradients():
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}  # what is freed goes back, so that each case starts equal
    done = subprocess.run([sys.executable, "-c", MEMORY], env=env, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 12
    for line in lines:
        *_, tensors, peak = line.split("; ")
        assert 0.9 <= float(peak) / float(tensors) <= 1.2, line


@needs_core
def test_gradients_of_any_strides_and_no_gradient_of_lse():
    q, k, v = make_qkv(2, 100, 100, 6, 2, 32, 48)
    layout = (dx.SlidingWindow(40) | dx.Sink(3)).layout(100, block_size=(32, 16))
    out, lse = attend(q, k, v, layout)
    do = torch.randn_like(out)
    want = cpu.attention_backward(do, torch.zeros_like(lse), q, k, v, out, lse, layout, 0.2)
    other = [x.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0) for x in (do, q, k, v, out)]
    got = cpu.attention_backward(other[0], None, *other[1:], lse, layout, 0.2)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@needs_core
def test_gradients_of_rows_that_see_nothing():
    q, k, v = (x.requires_grad_() for x in make_qkv(1, 40, 20, 2, 1, 16))
    out, lse = dx.sparse_attention(q, k, v, dx.Full().layout(40, 20, block_size=16), return_lse=True, backend="cpu")
    (out.sum() + lse[lse.isfinite()].sum()).backward()
    assert (q.grad[:, :20] == 0).all()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


@needs_core
@pytest.mark.parametrize("isa", ISAS, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_instruction_set(isa, dtype):
    assert cpu.cpu_status().isa == isa
    for seed in range(7000, 7024):
        case = random_case(seed, dtype=dtype, **SHORT)
        assert_within_budget(check_forward(attend, case.q, case.k, case.v, case.layout), case)
        if seed % 2:
            assert_within_budget(check_gradients(attend_differentiably, case.q, case.k, case.v, case.layout), case)


@needs_core
@pytest.mark.parametrize("isa", ISAS, indirect=True)
@pytest.mark.parametrize("head_dim", [1, 7, 32])
@pytest.mark.parametrize("scale", [0.4, -0.4, 0.0])
def test_products_of_bf16_in_pairs_are_those_of_fp32(isa, head_dim, scale):
    """Mix zeros with numbers, use odd head_dims and values of any size, and let torch flush subnormals."""
    q, k, v = make_qkv(1, 70, 70, 2, 1, head_dim, dtype=torch.bfloat16)
    q[..., 1::2] = 0
    k[..., 3::4] *= 1e30
    k[..., 1::4] *= 1e-30
    v[:, 5] = -0.0
    layout = (dx.SlidingWindow(20) | dx.Sink(1)).layout(70, block_size=16)
    want = dx.sparse_attention(q.float(), k.float(), v.float(), layout, scale=scale, backend="cpu")
    for flush in (False, True):
        torch.set_flush_denormal(flush)
        try:
            got = dx.sparse_attention(q, k, v, layout, scale=scale, backend="cpu")
        finally:
            torch.set_flush_denormal(False)
        torch.testing.assert_close(got, want.bfloat16(), rtol=1e-2, atol=1e-6)
    k[:, 0] = torch.nan
    got = dx.sparse_attention(q, k, v, layout, scale=scale, backend="cpu")
    assert got[:, :20].isnan().all()


@pytest.mark.parametrize("seeds", [range(first, first + 20) for first in range(0, 100, 20)], ids=str)
def test_gathers_in_torch(seeds):
    for seed in seeds:
        case = random_case(seed, **SHORT)
        assert_within_budget(check_forward(attend_by_gather, case.q, case.k, case.v, case.layout), case)
        capped = partial(attend_by_gather, softcap=0.7)
        assert_within_budget(check_forward(capped, case.q, case.k, case.v, case.layout, softcap=0.7), case)
        if seed % 4 == 0:
            assert_within_budget(check_gradients(attend_by_gather, case.q, case.k, case.v, case.layout), case)


@pytest.mark.parametrize("isa", ["torch"], indirect=True)
def test_without_a_core_gathers_serve(isa):
    assert cpu.cpu_status().kind == "torch"
    case = random_case(3, **SHORT)
    assert_within_budget(check_forward(attend, case.q, case.k, case.v, case.layout), case)
    assert "gathers in torch" in str(cpu.cpu_status())


def test_an_instruction_set_that_is_none(monkeypatch):
    monkeypatch.setenv(library.ISA_VARIABLE, "z80")
    with pytest.raises(ValueError, match="`DYNAXX_CPU_ISA` must be one of"):
        cpu.cpu_status()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_fp32(dtype):
    for seed in range(20):
        case = random_case(seed, dtype=dtype, **SHORT)
        assert_within_budget(check_forward(attend, case.q, case.k, case.v, case.layout), case)
        if seed % 2:
            assert_within_budget(check_gradients(attend_differentiably, case.q, case.k, case.v, case.layout), case)


@needs_core
def test_every_half_is_widened_right():
    """With one key of value x, out is x for every bit pattern."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        v = bits.view(dtype).view(256, 1, 1, 256)
        q = k = torch.zeros(256, 1, 1, 16, dtype=dtype)
        out, _ = attend(q, k, v, dx.Full().layout(1, block_size=16))
        assert torch.equal(out.nan_to_num(7.0), v.nan_to_num(7.0))
        assert torch.equal(out.isnan(), v.isnan())


@needs_core
def test_every_half_is_rounded_right():
    """With two keys of neighbouring values, out is their mean, which is a rounding tie, for every bit pattern."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        for neighbour in (0, 1, 2, 3):
            v = torch.stack([bits, bits + neighbour]).view(dtype).view(2, 256, 1, 256).transpose(0, 1)
            q, k = torch.zeros(256, 1, 1, 16, dtype=dtype), torch.zeros(256, 2, 1, 16, dtype=dtype)
            out, _ = attend(q, k, v, dx.Full().layout(1, 2, block_size=16))
            want = (v.float().sum(1, keepdim=True) / 2).to(dtype)
            assert torch.equal(out.nan_to_num(7.0), want.nan_to_num(7.0))
            assert torch.equal(out.isnan(), want.isnan())


@pytest.mark.parametrize("attention", [attend, attend_by_gather])
def test_any_strides(attention):
    layout = (dx.SlidingWindow(40) | dx.Sink(3)).layout(100, block_size=(32, 16))
    q, k, v = make_qkv(2, 100, 100, 6, 2, 32, 48)
    want = attention(q, k, v, layout)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    spread = [torch.stack([x, x * torch.nan], -1)[..., 0] for x in (q, k, v)]
    wide = [torch.cat([x, x * torch.nan], -1)[..., : x.shape[-1]] for x in (q, k, v)]
    dims_outside = [x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0) for x in (q, k, v)]
    for inputs in (heads_first, spread, wide, dims_outside):
        assert not inputs[0].is_contiguous()
        torch.testing.assert_close(attention(*inputs, layout), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("attention", [attend, attend_by_gather])
def test_rows_that_see_nothing(attention):
    q, k, v = make_qkv(1, 40, 20, 2, 1, 16)
    out, lse = attention(q, k, v, dx.Full().layout(40, 20, block_size=16))
    assert (out[:, :20] == 0).all()
    assert (lse[..., :20] == -torch.inf).all()
    assert lse[..., 20:].isfinite().all()


@pytest.mark.parametrize("attention", [attend, attend_by_gather])
@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 64, 64), (1, 0, 64), (1, 64, 0), (2, 1, 1)])
def test_nothing_to_do(attention, batch, seqlen_q, seqlen_k):
    q, k, v = make_qkv(batch, seqlen_q, seqlen_k, 4, 2, 16)
    out, lse = attention(q, k, v, dx.Full().layout(seqlen_q, seqlen_k, causal=False, block_size=32))
    assert out.shape == (batch, seqlen_q, 4, 16)
    assert lse.shape == (batch, 4, seqlen_q)
    if seqlen_k == 0:
        assert (out == 0).all()
        assert (lse == -torch.inf).all()


@needs_core
@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 64, 64), (1, 0, 64), (1, 64, 0), (2, 1, 1)])
def test_gradients_of_nothing(batch, seqlen_q, seqlen_k):
    q, k, v = (x.requires_grad_() for x in make_qkv(batch, seqlen_q, seqlen_k, 4, 2, 16))
    layout = dx.Full().layout(seqlen_q, seqlen_k, causal=False, block_size=32)
    dx.sparse_attention(q, k, v, layout, backend="cpu").sum().backward()
    if batch == 1:
        assert all((x.grad == 0).all() for x in (q, k, v))


@needs_core
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-4])
def test_any_scale(scale):
    case = random_case(11, lengths=(100,), head_dims=(32,))
    scaled = lambda q, k, v, layout: dx.sparse_attention(q, k, v, layout, scale=scale, return_lse=True, backend="cpu")
    for check in (check_forward, check_gradients):
        assert_within_budget(check(scaled, case.q, case.k, case.v, case.layout, scale), case)


@needs_core
def test_one_and_two_threads_agree_bitwise():
    q, k, v = make_qkv(2, 257, 257, 6, 2, 64)
    layout = (dx.SlidingWindow(70) | dx.RandomBlocks(2)).layout(257, block_size=32)
    one = attend(q, k, v, layout)
    torch.set_num_threads(2)
    for _ in range(3):
        two = attend(q, k, v, layout)
        assert torch.equal(one[0], two[0])
        assert torch.equal(one[1], two[1])


@needs_core
def test_hidden_keys_do_not_leak_and_visible_nan_shows():
    q, k, v = make_qkv(1, 96, 96, 2, 1, 32)
    k[:, 80], v[:, 80] = torch.nan, torch.nan
    layout = dx.Full().layout(96, block_size=32)
    out, lse = attend(q, k, v, layout)
    assert out[:, :64].isfinite().all()
    assert out[:, 80:].isnan().all()
    assert lse[..., 80:].isnan().all()


@needs_core
@pytest.mark.parametrize("size", [1e-30, 1e-3, 30.0, 3e4])
def test_scores_of_any_size(size):
    case = random_case(11, lengths=(129,), head_dims=(64,))
    k = case.k * size
    for report in check_forward(attend, case.q, k, case.v, case.layout):
        assert report.ok, report


@needs_core
@pytest.mark.parametrize("rows_are_keys", [False, True])
def test_mask_tables_say_what_the_bits_say(rows_are_keys):
    layout = dx.BlockLayout.from_dense(torch.rand(200, 300, generator=torch.Generator().manual_seed(0)) < 0.05,
                                       block_size=(32, 64))  # fmt: skip
    words, runs = mask_tables(layout, library.active_library(), rows_are_keys)
    dense = layout.masks.to_dense().mT if rows_are_keys else layout.masks.to_dense()
    bits = ((words[:, :, None, :] >> torch.arange(16, dtype=torch.int16)[:, None]) & 1).bool().flatten(1, 2)
    assert torch.equal(bits, dense)
    inside = torch.zeros(*words.shape, dtype=torch.bool)
    key = torch.arange(words.shape[2])
    for run in range(runs.shape[2]):
        inside |= (key >= runs[:, :, run, 0, None]) & (key < runs[:, :, run, 1, None])
    assert (inside | (words == 0)).all()


def test_reasons():
    from dynaxx.kernels.attention.contract import AttentionProblem

    problem = AttentionProblem(torch.device("cuda"), torch.float64, 1, 64, 64, 2, 1, 64, 64, (64, 64), False)
    device, dtype = cpu.unsupported_reasons(problem)
    assert "cuda" in device
    assert "float64" in dtype


@needs_core
def test_auto_takes_the_cpu_and_gradients_flow():
    q, k, v = (x.requires_grad_() for x in make_qkv(1, 100, 100, 4, 2, 32))
    layout = dx.SlidingWindow(30).layout(100, block_size=16)
    assert dx.explain(q, k, v, layout).chosen == "cpu"
    case = random_case(12, lengths=(100,), head_dims=(32,))
    public = lambda q, k, v, layout: dx.sparse_attention(q, k, v, layout, return_lse=True)
    assert_within_budget(check_gradients(public, case.q, case.k, case.v, case.layout), case)


def test_without_a_home_folder_there_is_no_cache(monkeypatch):
    monkeypatch.delenv(library.CACHE_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home directory")))
    core = library._compiled_at_first_use("baseline", "test", [])
    assert core.library is None
    assert "no home directory" in core.status.why


def test_a_failing_compiler_leaves_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv(library.CACHE_VARIABLE, str(tmp_path))
    core = library._compiled_at_first_use("baseline", "test", [])
    assert core.library is None
    assert "failed" in core.status.why
    assert [path.name for path in tmp_path.glob("*/*")] == [".lock"]


def test_a_compiler_that_comes_to_no_end_is_a_failed_build(tmp_path, monkeypatch):
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(build, "TIMEOUT", 0.1)
    with pytest.raises(RuntimeError, match="took more than"):
        build.compile_library("baseline", tmp_path / "core.so", [str(slow)])
    assert list(tmp_path.iterdir()) == [slow]


@pytest.mark.parametrize("head_dims", [(192, 128), (512, 512), (576, 512)])
def test_wide_heads(head_dims):
    """DeepSeek's prefill, Gemma 4's global layers, and latent attention with its cache as keys and values."""
    q, k, v = make_qkv(1, 50, 70, 4, 1, *head_dims)
    layout = (dx.SlidingWindow(40) | dx.Sink(3)).layout(50, 70, block_size=32)
    attend = partial(dx.sparse_attention, return_lse=True, backend="cpu")
    for report in check_forward(attend, q, k, v, layout) + check_gradients(attend, q, k, v, layout):
        assert report.ok, str(report)
