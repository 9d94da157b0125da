# SPDX-License-Identifier: Apache-2.0
"""The reference backend agrees with the oracle, edge cases included."""

import pytest
import torch

import dynaxx as dx
from dynaxx.kernels.attention.reference import attention_backward, attention_forward
from dynaxx.testing import check_forward, check_gradients, make_qkv, oracle_attention, random_case


def reference(q, k, v, layout):
    return dx.sparse_attention(q, k, v, layout, return_lse=True, backend="reference")


@pytest.mark.parametrize("seed", range(60))
def test_reference_is_the_oracle(seed):
    case = random_case(seed, dtype=torch.float64 if seed % 2 else torch.float32)
    for check in (check_forward, check_gradients):
        for report in check(reference, case.q, case.k, case.v, case.layout):
            assert report.ok, f"{report}\n{case.label}"


def test_gradcheck_through_out_and_lse():
    q, k, v = (x.requires_grad_() for x in make_qkv(1, 20, 24, 4, 2, 8, 5, dtype=torch.float64))
    layout = (dx.SlidingWindow(6) | dx.Sink(2)).layout(20, 24, block_size=16)
    assert torch.autograd.gradcheck(lambda *x: tuple(reference(*x, layout)), (q, k, v))


def test_a_row_that_sees_nothing():
    q, k, v = (x.requires_grad_() for x in make_qkv(1, 40, 20, 2, 1, 16))
    out, lse = reference(q, k, v, dx.Full().layout(40, 20, block_size=16))
    assert (out[:, :20] == 0).all()
    assert (lse[..., :20] == -torch.inf).all()
    out.sum().backward()
    assert q.grad.isfinite().all()
    assert (q.grad[:, :20] == 0).all()


@pytest.mark.parametrize(
    "dtypes", [(torch.int32, torch.float32), (torch.complex64, torch.float32), (torch.float32, torch.int64)]
)
def test_states_of_integers_are_refused(dtypes):
    out, lse = torch.ones(2, 3, 4, 8, dtype=dtypes[0]), torch.zeros(2, 4, 3, dtype=dtypes[1])
    with pytest.raises(TypeError, match="`states` must hold floats"):
        dx.merge_states([(out, lse), (out, lse)])


def test_merge_states_is_attention_over_all_keys():
    q, k, v = make_qkv(2, 64, 64, 4, 2, 16, dtype=torch.float64)
    near, far = dx.SlidingWindow(10), dx.Full()
    whole = reference(q, k, v, far.layout(64, block_size=16))
    mask = near.layout(64, block_size=16).to_dense()
    rest = dx.BlockLayout.from_dense(far.layout(64, block_size=16).to_dense() & ~mask, block_size=16)
    merged = dx.merge_states([reference(q, k, v, near.layout(64, block_size=16)), reference(q, k, v, rest)])
    torch.testing.assert_close(merged.out, whole.out)
    torch.testing.assert_close(merged.lse, whole.lse)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda q, k, v: (q[0], k, v), ValueError, r"`q` must be \(batch, seqlen, heads, head_dim\)"),
        (lambda q, k, v: (q.int(), k, v), TypeError, "`q` must be one of"),
        (lambda q, k, v: (q, k.half(), v), TypeError, "`k` must have q's dtype"),
        (lambda q, k, v: (q, k[:, :50], v), ValueError, "`v` must agree with k"),
        (lambda q, k, v: (q, k[..., :8], v), ValueError, "`k` must be"),
        (lambda q, k, v: (q[:, :, :3], k, v), ValueError, "q_heads must be a multiple"),
        (lambda q, k, v: (q[:, :9], k, v), ValueError, "`layout` must be for 9 x 64 tokens"),
    ],
)
def test_bad_inputs_name_the_contract(change, error, message):
    q, k, v = change(*make_qkv(1, 64, 64, 4, 2, 16))
    with pytest.raises(error, match=message):
        dx.sparse_attention(q, k, v, dx.Full().layout(64, block_size=16))


@pytest.mark.parametrize("wrong", [None, dx.SlidingWindow(16)])
def test_a_rule_is_no_layout(wrong):
    q, k, v = make_qkv(1, 64, 64, 4, 2, 16)
    for call in (dx.sparse_attention, dx.explain):
        with pytest.raises(TypeError, match=r"`layout` must be a BlockLayout.*pattern\.layout"):
            call(q, k, v, wrong)
    with pytest.raises(TypeError, match="`rule` must be a pattern"):
        dx.select_blocks(q, k, "top_k")


def test_unknown_and_unable_backends_say_why():
    q, k, v = make_qkv(1, 64, 64, 4, 2, 16)
    layout = dx.Full().layout(64, block_size=16)
    with pytest.raises(ValueError, match="`backend` must be 'auto' or one of"):
        dx.sparse_attention(q, k, v, layout, backend="cuda")
    with pytest.raises(dx.UnsupportedInputError, match="hopper"):
        dx.sparse_attention(q, k, v, layout, backend="hopper")
    assert "would run" in str(dx.explain(q, k, v, layout))


def test_indices_out_of_range_are_refused_before_launch():
    q, k, v = make_qkv(1, 64, 64, 4, 2, 16)
    layout = dx.SlidingWindow(20).layout(64, block_size=16)
    bad = dx.BlockLayout(64, 64, layout.block_size, layout.kv_indptr, layout.kv_num_partial, layout.kv_indices + 9,
                         layout.kv_masks, layout.masks)  # fmt: skip
    with pytest.raises(ValueError, match=r"`kv_indices` must be in \[0"):
        dx.sparse_attention(q, k, v, bad)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("softcap", [0.5, 20.0])
def test_softcap_is_the_oracles(seed, softcap):
    def attend(q, k, v, layout):
        return dx.sparse_attention(q, k, v, layout, softcap=softcap, return_lse=True, backend="reference")

    case = random_case(seed, dtype=torch.float64 if seed % 2 else torch.float32)
    for check in (check_forward, check_gradients):
        for report in check(attend, case.q, case.k, case.v, case.layout, softcap=softcap):
            assert report.ok, f"{report}\n{case.label}"


@pytest.mark.slow
def test_gradcheck_through_softcap_and_sinks():
    inputs = [x.requires_grad_() for x in make_qkv(1, 40, 20, 4, 2, 8, 5, dtype=torch.float64)]
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    layout = (dx.SlidingWindow(6) | dx.Sink(2)).layout(40, 20, block_size=16)  # 20 queries see nothing

    def attend(q, k, v, sinks):
        results = dx.sparse_attention(q, k, v, layout, softcap=0.7, sinks=sinks, return_lse=True, backend="reference")
        return tuple(results)

    assert torch.autograd.gradcheck(attend, (*inputs, sinks))


def test_the_backward_of_the_reference_is_its_autograd():
    q, k, v = (x.requires_grad_() for x in make_qkv(1, 40, 20, 4, 2, 8, 5, dtype=torch.float64))
    layout = (dx.SlidingWindow(6) | dx.Sink(2)).layout(40, 20, block_size=16)
    for softcap in (None, 0.7):
        out, lse = attention_forward(q, k, v, layout, 0.3, softcap)
        do, dlse = torch.randn_like(out), torch.randn_like(lse)
        want = torch.autograd.grad([out, lse[..., 20:]], (q, k, v), [do, dlse[..., 20:]])
        got = attention_backward(do, dlse, q, k, v, out, lse, layout, 0.3, softcap)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_sink_is_a_key_of_value_zero(dtype):
    q, k, v = make_qkv(2, 40, 20, 4, 2, 16, dtype=dtype)
    sinks = torch.tensor([-3.0, 0.0, 2.0, 40.0])
    layout = dx.SlidingWindow(6).layout(40, 20, block_size=16)
    out, lse = dx.sparse_attention(q, k, v, layout, sinks=sinks, return_lse=True)
    want = oracle_attention(q.double(), k.double(), v.double(), layout.to_dense(), sinks=sinks.double())
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), want[0], rtol=4 * eps, atol=4 * eps)
    torch.testing.assert_close(lse.double(), want[1], rtol=1e-6, atol=1e-6)
    assert out.dtype == dtype
    assert (out[:, :20] == 0).all()
    assert torch.equal(lse[..., :20].float(), sinks[:, None].expand(2, 4, 20))


def test_a_sink_is_a_state_to_merge():
    q, k, v = make_qkv(1, 64, 64, 4, 2, 16, dtype=torch.float64)
    sinks = torch.randn(4, dtype=torch.float64)
    layout = dx.SlidingWindow(10).layout(64, block_size=16)
    state = reference(q, k, v, layout)
    sink = (torch.zeros_like(state.out), sinks[:, None].expand_as(state.lse))
    got = dx.sparse_attention(q, k, v, layout, sinks=sinks, return_lse=True, backend="reference")
    torch.testing.assert_close(tuple(got), tuple(dx.merge_states([state, sink])))


def test_no_sink_is_one_of_minus_infinity():
    q, k, v = (x.requires_grad_() for x in make_qkv(1, 40, 20, 2, 1, 16))
    layout = dx.Full().layout(40, 20, block_size=16)
    sinks = torch.full((2,), -torch.inf, requires_grad=True)
    got = dx.sparse_attention(q, k, v, layout, sinks=sinks, return_lse=True)
    torch.testing.assert_close(tuple(got), tuple(dx.sparse_attention(q, k, v, layout, return_lse=True)))
    (got.out.sum() + got.lse[..., 20:].sum()).backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v, sinks))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"softcap": 0.0}, ValueError, "`softcap` must be 1e-30 to 1e.30, or None"),
        ({"softcap": 2e38}, ValueError, "`softcap` must be 1e-30 to 1e.30"),  # below fp32's largest
        ({"softcap": 1e-50}, ValueError, "`softcap` must be 1e-30 to 1e.30"),
        ({"scale": 1e39}, ValueError, "`scale` must be 0 or 1e-30 to 1e.30 in magnitude"),
        ({"scale": -1e-50}, ValueError, "`scale` must be 0 or 1e-30"),
        ({"scale": float("nan")}, ValueError, "`scale` must be 0 or 1e-30"),
        ({"scale": float("inf")}, ValueError, "`scale` must be 0 or 1e-30"),
        ({"softcap": -5}, ValueError, "`softcap` must be 1e-30"),
        ({"softcap": float("nan")}, ValueError, "`softcap` must be 1e-30"),
        ({"softcap": float("inf")}, ValueError, "`softcap` must be 1e-30"),
        ({"sinks": torch.zeros(2)}, ValueError, r"`sinks` must be \(q_heads = 4,\)"),
        ({"sinks": torch.zeros(4, 1)}, ValueError, r"`sinks` must be \(q_heads = 4,\)"),
        ({"sinks": torch.zeros(4, dtype=torch.int32)}, TypeError, "`sinks` must be one of"),
        ({"sinks": torch.zeros(4, device="meta")}, ValueError, "`sinks` must be on q's device"),
    ],
)
def test_a_bad_softcap_or_sink_names_the_contract(options, error, message):
    q, k, v = make_qkv(1, 64, 64, 4, 2, 16)
    with pytest.raises(error, match=message):
        dx.sparse_attention(q, k, v, dx.Full().layout(64, block_size=16), **options)
