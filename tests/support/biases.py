# SPDX-License-Identifier: Apache-2.0
"""Checks of attention with a bias by position against dense fp64 attention, for every backend."""

import torch
from transformers.models.t5.modeling_t5 import T5Attention

import dynaxx as dx
from dynaxx.testing.oracle import error_reports, oracle_attention
from dynaxx.testing.rounding import rounding_errors

KINDS = ("alibi", "alibi per entry", "t5 encoder", "t5 decoder")
SHAPES = {  # batch, seqlen_q, seqlen_k, q_heads, kv_heads, head_dim
    "encoder": (2, 70, 70, 4, 4, 16),
    "grouped": (1, 130, 130, 6, 2, 24),
    "cached keys": (2, 33, 95, 3, 1, 8),
    "fewer keys": (1, 40, 21, 2, 2, 16),
    "one query": (1, 1, 65, 2, 1, 16),
    "one key": (1, 3, 1, 2, 1, 16),
}
LARGE = {"head_dim 64": (1, 270, 270, 4, 2, 64), "head_dim 128": (1, 200, 290, 2, 1, 128)}  # for GPUs
RULES = {"causal": dx.Causal(), "full": dx.Full(), "window": dx.SlidingWindow((20, 5)) | dx.Sink(3)}


def inputs(shape, dtype, seed=0):
    batch, n, m, heads, kv_heads, dim = (SHAPES | LARGE)[shape]
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *sizes: torch.randn(*sizes, generator=generator).to(dtype).requires_grad_()
    return draw(batch, n, heads, dim), draw(batch, m, kv_heads, dim), draw(batch, m, kv_heads, dim)


def bias_of(kind, heads, batch=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    if kind == "alibi":
        return dx.Alibi(torch.rand(heads, generator=generator).to(dtype).requires_grad_())
    if kind == "alibi per entry":
        return dx.Alibi(torch.rand(batch, heads, generator=generator).to(dtype).requires_grad_())
    table = torch.randn(32, heads, generator=generator).to(dtype).requires_grad_()
    return dx.T5Bias(table, bidirectional=kind == "t5 encoder", max_distance=64)


def numbers(bias):
    return bias.slopes if isinstance(bias, dx.Alibi) else bias.table


def dense(bias, n, m):
    """Return the bias of all pairs as the models compute it, (batch or 1, heads, n, m)."""
    ahead = torch.arange(m) - (torch.arange(n)[:, None] + m - n)
    if isinstance(bias, dx.Alibi):
        return -bias.slopes.double().reshape(-1, bias.slopes.shape[-1], 1, 1) * ahead.abs()
    buckets = T5Attention._relative_position_bucket(ahead, bias.bidirectional, len(bias.table), bias.max_distance)
    return bias.table[buckets].permute(2, 0, 1)[None]


def check(attend, shape, rule, kind, dtype, block_size=16, **options):
    """Compare out, lse and all gradients with fp64; the budget is twice the error of the same math in the dtype."""
    given = inputs(shape, dtype)
    batch, n, heads, _ = given[0].shape
    m = given[1].shape[1]
    layout = RULES[rule].layout(n, m, causal=rule == "causal", block_size=block_size)
    do = torch.randn(batch, n, heads, given[2].shape[3], generator=torch.Generator().manual_seed(3)).to(dtype)

    def run(function, dtype):
        bias = bias_of(kind, heads, batch, torch.promote_types(dtype, torch.float32))
        leaves = (*(x.detach().to(dtype).requires_grad_() for x in given), numbers(bias))
        out, lse = function(*leaves[:3], bias=bias)
        seen = lse.isfinite()
        grads = torch.autograd.grad([out, lse[seen]], leaves, [do.to(out.dtype), torch.ones_like(lse[seen])])
        return out.detach(), lse.detach(), *grads

    mask = layout.to_dense()

    def plain(dtype):
        return run(lambda *qkv, bias: oracle_attention(*qkv, mask, bias=dense(bias, n, m), **options), dtype)

    exact, names = plain(torch.float64), ("out", "lse", "dq", "dk", "dv", "dbias")
    seen = exact[1].isfinite().float()
    biases = dense(bias_of(kind, heads, batch), n, m).detach()
    rounded = rounding_errors(dict(zip("qkv", given, strict=True)), mask, do, seen, bias=biases, **options)
    rounded["dbias"] = 8 * torch.finfo(dtype).eps * float(exact[5].abs().amax())
    got = run(lambda *qkv, bias: attend(*qkv, layout, position_bias=bias, return_lse=True, **options), dtype)
    for report in error_reports(names, got, plain(dtype), exact, rounded):
        assert report.ok, report
