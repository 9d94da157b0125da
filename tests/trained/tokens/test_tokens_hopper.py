# SPDX-License-Identifier: Apache-2.0
"""Latent attention over chosen tokens on Hopper against fp64, forward and gradients."""

import pytest
import torch

import dynaxx as dx
from interpreter import on_hopper

pytestmark = [pytest.mark.gpu, on_hopper]
SCALE = 0.05


def draw(queries, keys, heads, slots, dtype=torch.bfloat16):
    """Draw lists in any order with empty slots; the first queries are before all keys and see nothing."""
    torch.manual_seed(queries + slots)
    latent = torch.randn(1, keys, 1, 576, device="cuda").to(dtype).requires_grad_()
    q = torch.randn(1, queries, heads, 576, device="cuda").to(dtype).requires_grad_()
    chosen = torch.rand(queries, keys, device="cuda").argsort(1)[:, :slots].int()
    chosen[torch.rand_like(chosen, dtype=torch.float32) < 0.1] = -1
    return q, latent, chosen[None, :, None]


def run(q, latent, chosen, dtype, backend, **more):
    x = latent.to(dtype)
    out, lse = dx.trained.selected_attention(
        q.to(dtype), x, x[..., :512], chosen, block_size=1, scale=SCALE, return_lse=True, backend=backend, **more
    )
    loss = out.square().sum() + lse.masked_fill(lse == -torch.inf, 0.0).sin().sum()
    return out, lse, *torch.autograd.grad(loss, (q, latent))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "slots"),
    [
        (5, 300, 128, 200),
        (70, 64, 64, 64),
        (9, 400, 100, 1),
        (33, 513, 128, 65),
        (1, 3000, 128, 2048),
        (3, 90, 40, 33),
        (7, 500, 128, 208),
        (4, 600, 256, 144),
        (6, 500, 100, 96),
        (2, 700, 192, 128),
        (3, 400, 128, 256),
    ],
)
def test_against_fp64(queries, keys, heads, slots, dtype):
    q, latent, chosen = draw(queries, keys, heads, slots, dtype)
    got, want = run(q, latent, chosen, dtype, "hopper"), run(q, latent, chosen, torch.float64, "reference")
    assert torch.equal(got[1].isfinite(), want[1].isfinite())
    for x, y in zip(got, want, strict=True):
        x, y = (each.double().masked_fill(each == -torch.inf, 0.0) for each in (x, y))
        assert not x.isnan().any()
        assert (x - y).norm() <= 1e-2 * y.norm()
    assert all(torch.equal(x, y) for x, y in zip(got, run(q, latent, chosen, dtype, "hopper"), strict=True))


def test_packed_sequences_sinks_and_rows_that_nobody_chose():
    q, latent, chosen = (x.detach()[0] for x in draw(40, 100, 128, 24))
    sinks, ends, ends_k = torch.randn(128, device="cuda"), (0, 15, 15, 40), (0, 30, 33, 100)
    chosen = torch.where(chosen < 15, chosen, -1)
    latent = latent.clone()
    for start, stop in ((15, 33), (48, 100)):
        latent[start:stop] = torch.nan
    attend = lambda q, x, backend: dx.trained.selected_attention(
        q, x, x[..., :512], chosen, block_size=1, scale=SCALE, cu_seqlens_q=ends, cu_seqlens_k=ends_k, sinks=sinks,
        backend=backend,
    )  # fmt: skip
    got, want = attend(q, latent, "hopper"), attend(q.double(), latent.nan_to_num().double(), "reference")
    assert (got.double() - want).norm() <= 1e-2 * want.norm()


def test_rows_that_begin_anywhere():
    """Copies of 16 bytes need aligned rows of q and of the gradient of the output; others are copied first."""
    _, latent, chosen = draw(6, 200, 128, 96)
    apart = torch.randn(1, 6, 128, 579, device="cuda").bfloat16()[..., 1:577].requires_grad_()
    weights = torch.randn(1, 6, 128, 515, device="cuda").bfloat16()[..., 3:]
    grads = []
    for dtype, backend in ((torch.bfloat16, "hopper"), (torch.float64, "reference")):
        x = latent.to(dtype)
        out = dx.trained.selected_attention(
            apart.to(dtype) if dtype == torch.float64 else apart, x, x[..., :512], chosen, block_size=1, scale=SCALE,
            backend=backend,
        )  # fmt: skip
        grads.append((out, *torch.autograd.grad(out, (apart, latent), weights.to(dtype))))
    for x, y in zip(*grads, strict=True):
        assert (x.double() - y).norm() <= 1e-2 * y.double().norm()


def test_others_are_served_too():
    """Softcap, and values that are not a view of the keys, run on the portable kernels."""
    q, latent, chosen = draw(6, 80, 128, 16)
    got, want = (run(q, latent, chosen, dtype, backend, softcap=5.0) for dtype, backend in
                 ((torch.bfloat16, "hopper"), (torch.float64, "reference")))  # fmt: skip
    for x, y in zip(got, want, strict=True):
        x, y = (each.double().masked_fill(each == -torch.inf, 0.0) for each in (x, y))
        assert (x - y).norm() <= 1e-2 * y.norm()
    apart = latent[..., :512].clone()
    out = dx.trained.selected_attention(q, latent, apart, chosen, block_size=1, scale=SCALE, backend="hopper")
    same = dx.trained.selected_attention(
        q, latent, latent[..., :512], chosen, block_size=1, scale=SCALE, backend="triton"
    )
    assert (out - same).norm() <= 1e-2 * same.norm()
