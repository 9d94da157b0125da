"""The reference against the oracle, and its edges."""

import pytest
import torch

import dynaxx as dx
from dynaxx.testing import check_forward, check_gradients, make_qkv, random_case


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
