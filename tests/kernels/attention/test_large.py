# SPDX-License-Identifier: Apache-2.0
"""Tensors of more than 2^31 elements give correct results beyond that index."""

import pytest
import torch

import dynaxx as dx

TOKENS, HEADS, HEAD_DIM, WINDOW = 525_288, 32, 128, 64  # 2.15e9 elements
LAST = 300

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 60e9,
        reason="needs a GPU of 60 GB",
    ),
]


def test_the_last_of_more_than_2_31_elements():
    """Run both backends in one test, one after the other, because each takes 50 GB."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, do = (
        torch.empty(1, TOKENS, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda").normal_(generator=generator)
        for _ in range(4)
    )
    assert q.numel() > 2**31
    layout = dx.SlidingWindow(WINDOW).layout(TOKENS, device="cuda")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    tail = [x.detach()[:, -LAST - (x is not q) * WINDOW :].cpu().double().requires_grad_() for x in (q, k, v)]
    exact = dx.sparse_attention(*tail, dx.SlidingWindow(WINDOW).layout(LAST, LAST + WINDOW), backend="reference")
    expected = torch.autograd.grad(exact, tail, do[:, -LAST:].cpu().double())
    few = LAST - WINDOW  # keys that only the last queries see

    for backend in ("triton", "hopper"):
        try:
            dx.explain(q, k, v, layout, backend=backend)
        except dx.UnsupportedInputError:
            continue
        out = dx.sparse_attention(*leaves, layout, backend=backend)
        grads = torch.autograd.grad(out, leaves, do)
        for found, wanted in zip((out, *grads), (exact, *expected), strict=True):
            found, wanted = found[:, -few:].detach().cpu().double(), wanted[:, -few:].detach()
            assert (found - wanted).norm() <= 1e-2 * wanted.norm(), backend
        del out, grads, found
        torch.cuda.empty_cache()
