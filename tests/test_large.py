"""Tensors of more than 2^31 elements: what lies behind them is computed like the rest."""

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


@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_the_last_of_more_than_2_31_elements(backend):
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, do = (
        torch.empty(1, TOKENS, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda").normal_(generator=generator)
        for _ in range(4)
    )
    assert q.numel() > 2**31
    layout = dx.SlidingWindow(WINDOW).layout(TOKENS, device="cuda")
    try:
        dx.explain(q, k, v, layout, backend=backend)
    except dx.UnsupportedInputError as error:
        pytest.skip(str(error))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = dx.sparse_attention(*leaves, layout, backend=backend)
    grads = torch.autograd.grad(out, leaves, do)

    tail = [
        x.detach()[:, -n:].cpu().double().requires_grad_()
        for x, n in ((q, LAST), (k, LAST + WINDOW), (v, LAST + WINDOW))
    ]
    rule = dx.SlidingWindow(WINDOW).layout(LAST, LAST + WINDOW)
    exact = dx.sparse_attention(*tail, rule, backend="reference")
    expected = torch.autograd.grad(exact, tail, do[:, -LAST:].cpu().double())
    for found, wanted in zip((out, *grads), (exact, *expected), strict=True):
        few = LAST - WINDOW  # keys that only the last queries see
        found, wanted = found[:, -few:].detach().cpu().double(), wanted[:, -few:].detach()
        assert (found - wanted).norm() <= 1e-2 * wanted.norm()
