# SPDX-License-Identifier: Apache-2.0
"""Random calls under random settings of torch, against plain softmax in fp64: right, or refused in words.

Each seed draws an operation, its inputs, and what surrounds it: a default dtype or device, inference mode before
training, transforms of torch.func, a compiler, a tracer, autocast, odd memory, numbers of other types, biases by
position, copied and pickled layouts, counters and fake tensors.
`DYNAXX_FUZZ_MINUTES=30` draws for as long; otherwise a few seconds.
"""

import copy
import os
import pickle
import random
import time
import warnings
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, jvp, vjp, vmap
from torch.utils.flop_counter import FlopCounterMode

import dynaxx as dx
from dynaxx.integrations.flash_attn import flash_attn_func
from dynaxx.layout.paging import PagedCache
from dynaxx.testing import random_memory, random_pattern

MINUTES = float(os.environ.get("DYNAXX_FUZZ_MINUTES", "0"))
LIMITS = {torch.float64: 1e-9, torch.float32: 5e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}
LENGTHS = (1, 15, 16, 33, 70, 130)


def copied(way, layout):
    """Return a layout, a deep copy of it or one from its pickle, on a CPU: torch loads to the device that a user sets.

    A tracer records how torch copies a tensor, but not the numbers, and fake tensors have none: both get the layout.
    """
    if way == "same" or torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack():
        return layout
    with torch.device("cpu"):
        return copy.deepcopy(layout) if way == "copy" else pickle.loads(pickle.dumps(layout))


class Draw:
    """A random problem: q, k, v, a mask for the oracle and options."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = rng.choice((torch.float32, torch.float32, *LIMITS))
        self.batch, kv_heads, group, dim = (
            rng.choice((1, 2)),
            rng.choice((1, 2)),
            rng.choice((1, 3)),
            rng.choice((8, 16)),
        )
        self.seqlen_q = rng.choice(LENGTHS)
        self.seqlen_k = self.seqlen_q + rng.choice((0, 0, 7, 40))
        make = lambda n, heads: torch.randn(
            self.batch, n, heads, dim, generator=self.generator, dtype=torch.float32, device="cpu"
        ).to(self.dtype)
        self.q, self.k, self.v = make(self.seqlen_q, kv_heads * group), *(make(self.seqlen_k, kv_heads) for _ in "kv")
        self.scale, self.softcap = rng.choice((None, 0.3)), rng.choice((None, None, 2.0))
        self.block = rng.choice((16, 32, 64))
        self.bias = None
        self.made = self.draw_operation()

    def draw_bias(self):
        """Draw a bias by position, which patterns, dense masks and chosen blocks take."""
        heads = self.q.shape[2]
        slopes = torch.rand(self.rng.choice(((heads,), (self.batch, heads))), generator=self.generator, device="cpu")
        table = torch.randn(8, heads, generator=self.generator, dtype=torch.float32, device="cpu")
        self.bias = self.rng.choice(
            (None, None, dx.Alibi(slopes), dx.T5Bias(table, self.rng.random() < 0.5, self.rng.choice((9, 40))))
        )

    def draw_operation(self):
        """Return `attend(q, k, v, **options)`, whether it has gradients, and a function that returns its mask."""
        rng, q, k = self.rng, self.q, self.k
        odd = rng.choice((int, int, np.int64, np.int16))
        block, seqlen_q, seqlen_k = odd(self.block), odd(self.seqlen_q), odd(self.seqlen_k)
        kind = rng.choice(("pattern", "pattern", "pattern", "selector", "dense", "tokens", "decode", "flash", "packed"))
        if kind == "selector":
            rule = rng.choice((dx.TopK(2), dx.TopK(0.4), dx.TopP(0.7), dx.TopK(1, dx.MinMax())))
            if self.dtype not in (torch.float32, torch.float64):
                rule = dx.TopK(1)
            layout = partial(dx.select_blocks, q, k, rule, block_size=block)
        elif kind == "dense":
            seen = torch.rand(self.seqlen_q, self.seqlen_k, generator=self.generator, device="cpu") < 0.5
            layout = partial(dx.BlockLayout.from_dense, seen, block_size=block)
        elif kind == "tokens":
            last = torch.arange(self.seqlen_q, device="cpu") + self.seqlen_k - self.seqlen_q
            chosen = torch.stack([last * 0, last], -1).masked_fill_(
                (last == 0)[:, None] & torch.tensor([False, True]), -1
            )
            chosen = chosen.int()[None, :, None].expand(self.batch, -1, k.shape[2], -1)
            seen = torch.zeros(self.seqlen_q, self.seqlen_k, dtype=torch.bool, device="cpu")
            seen[:, 0] = seen[torch.arange(self.seqlen_q, device="cpu"), last] = True
            return partial(self.by_tokens, chosen), True, lambda: seen[None, None]
        elif kind == "decode":
            size = rng.choice((16, 32))
            rows = torch.arange(self.seqlen_q, device="cpu")[:, None] + self.seqlen_k - self.seqlen_q
            return (
                partial(self.by_decode, size),
                False,
                lambda: (rows >= torch.arange(self.seqlen_k, device="cpu"))[None, None],
            )
        elif kind == "flash":
            window = rng.choice(((-1, -1), (9, 0), (5, 3)))
            rows = torch.arange(self.seqlen_q, device="cpu")[:, None] + self.seqlen_k - self.seqlen_q
            apart = rows - torch.arange(self.seqlen_k, device="cpu")
            seen = ((apart <= window[0]) | (window[0] < 0)) & ((-apart <= window[1]) | (window[1] < 0))
            window = rng.choice((tuple, list, torch.tensor, np.array))(window) if window != (-1, -1) else window
            window = window.tolist() if isinstance(window, np.ndarray) else window
            return partial(self.by_flash, window), True, lambda: seen[None, None]
        else:
            rule = random_pattern(rng, self.seqlen_k)
            causal = rng.random() < 0.7
            layout = partial(rule.layout, seqlen_q, seqlen_k, block_size=block, causal=causal)
        again = partial(copied, rng.choice(("same", "same", "same", "copy", "pickle")))
        attend = lambda q, k, v, **options: dx.sparse_attention(q, k, v, again(layout()), **options)
        self.draw_bias()
        return attend, True, lambda: layout().to_dense()

    def by_tokens(self, chosen, q, k, v, **options):
        return dx.trained.selected_attention(q, k, v, chosen, block_size=1, **options)

    def by_decode(self, size, q, k, v, **options):
        return dx.sparse_decode(q, PagedCache.contiguous(k, v, page_size=size), **options)

    def by_flash(self, window, q, k, v, *, scale=None, softcap=None):
        return flash_attn_func(q, k, v, softmax_scale=scale, softcap=softcap or 0.0, window_size=window)

    def options(self, number=lambda x: x):
        named = {"scale": self.scale, "softcap": self.softcap}
        given = {name: number(value) for name, value in named.items() if value is not None}
        return given | ({} if self.bias is None else {"position_bias": self.bias})

    def expected(self, mask, leaves):
        """Return softmax attention over a mask, in fp64."""
        q, k, v = leaves
        group = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
        scores = q.transpose(1, 2) @ k.mT * (q.shape[3] ** -0.5 if self.scale is None else self.scale)
        scores = scores if self.softcap is None else self.softcap * (scores / self.softcap).tanh()
        if self.bias is not None:
            ahead = torch.arange(self.seqlen_k, device="cpu") - torch.arange(self.seqlen_q, device="cpu")[:, None]
            scores = scores + bias_of(self.bias, ahead - (self.seqlen_k - self.seqlen_q))
        scores = scores.masked_fill(~mask, torch.finfo(torch.float64).min)
        return ((scores.softmax(-1) * mask) @ v).transpose(1, 2)


def bias_of(bias, ahead):
    """Return a bias of keys that many positions after the query, (batch or 1, heads, N, M) fp64."""
    if isinstance(bias, dx.Alibi):
        slopes = bias.slopes if bias.slopes.ndim == 2 else bias.slopes[None]
        return -slopes.double()[..., None, None] * ahead.abs()
    buckets = len(bias.table) // (2 if bias.bidirectional else 1)
    distance, single = (ahead.abs() if bias.bidirectional else -ahead.clamp(max=0)), buckets // 2
    far = (distance.clamp(min=1).double() / single).log() / np.log(bias.max_distance / single) * (buckets - single)
    bucket = torch.where(distance < single, distance, single + (far + 1e-9).long()).clamp(max=buckets - 1)
    bucket = bucket + (ahead > 0) * buckets if bias.bidirectional else bucket
    return bias.table.double()[bucket].permute(2, 0, 1)[None]


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def surroundings(rng, stack):
    """Enter some settings and return their names."""
    names = []
    if rng.random() < 0.6:
        dtype = rng.choice((torch.float64, torch.float16, torch.bfloat16))
        stack.enter_context(default_dtype(dtype))
        names.append(f"default {dtype}")
    if rng.random() < 0.3:
        stack.enter_context(torch.device("meta"))
        names.append("device meta")
    return names


def in_words(error, *said):
    """Raise the error unless its message has one of these words."""
    if not any(each in str(error) for each in said):
        raise error


def check(seed):
    """Run one problem; return a description."""
    problem = Draw(seed)
    rng, (attend, differentiable, mask_of) = problem.rng, problem.made
    mask = mask_of()
    exact = [x.detach().double().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    wanted = problem.expected(mask, exact)
    do = torch.randn(wanted.shape, generator=problem.generator, dtype=torch.float64, device="cpu").to(problem.dtype)
    dq, dk, dv = torch.autograd.grad(wanted, exact, do.double())
    wanted = wanted.detach()
    limit = LIMITS[problem.dtype] * 4

    def close(found, goal, what):
        assert found.shape == goal.shape, what
        error = float(((found.double() - goal).abs() / (1 + goal.abs())).max()) if goal.numel() else 0.0
        assert error <= limit, f"{what}: {error}"

    odd = lambda x: random_memory(rng, x)[0] if differentiable and rng.random() < 0.5 else x  # caches are dense
    given = [odd(x) for x in (problem.q, problem.k, problem.v)]
    way = rng.choice(("plain", "plain", "grad", "vjp", "vmap", "jvp", "fake", "flops", "trace", "inference", "number",
                      "learned", "compile" if rng.random() < 0.05 else "autocast"))  # fmt: skip
    with ExitStack() as stack:
        names = surroundings(rng, stack) if way not in ("compile", "trace", "fake") else []
        run = lambda *x, **more: attend(*x, **(problem.options() | more))
        total = lambda *x: (run(*x) * do).sum()
        if way == "number":
            number = rng.choice((np.float64, np.array, partial(torch.tensor, dtype=torch.float64)))
            with torch.device("cpu"):
                options = problem.options(number)
            close(run(*given, **options), wanted, "numbers")
        elif way == "learned" and problem.scale is not None:
            scale = torch.tensor(problem.scale, requires_grad=True, device="cpu")
            with pytest.raises(TypeError, match="requires a gradient"):
                run(*given, scale=scale)
        elif way == "inference":
            with torch.inference_mode():
                close(run(*given), wanted, "inference")
            leaves = [x.detach().clone().requires_grad_() for x in given]
            out = run(*leaves)
            close(out.detach(), wanted, "after inference mode")
            if differentiable:
                for a, b in zip(torch.autograd.grad(out, leaves, do), (dq, dk, dv), strict=True):
                    close(a, b, "gradient after inference mode")
        elif way in ("grad", "vjp", "vmap", "jvp"):
            try:
                if way == "grad":
                    close(grad(total)(*given), dq, "func.grad")
                elif way == "vjp":
                    close(vjp(run, *given)[1](do)[2], dv, "func.vjp")
                elif way == "vmap":
                    close(vmap(run)(*(x[None] for x in given))[0], wanted, "func.vmap")
                else:
                    jvp(run, tuple(given), tuple(torch.ones_like(x) for x in given))
                    assert problem.dtype == torch.float64, "jvp must be refused"  # else by the reference, which has it
            except NotImplementedError as error:
                in_words(error, "torch.func", "forward-mode")
        elif way == "fake":
            try:
                with FakeTensorMode() as mode:
                    out = run(*(mode.from_tensor(x) for x in given))
                assert out.shape == wanted.shape
            except (NotImplementedError, AssertionError) as error:  # a real mask is refused by the mode itself
                in_words(error, "memory", "convert all Tensors to FakeTensors")
        elif way == "flops":
            with FlopCounterMode(display=False) as counter:
                close(run(*given), wanted, "counted")
            assert counter.get_total_flops() > 0 or isinstance(attend, partial) or not mask.any()
        elif way == "trace":
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    traced = torch.jit.trace(run, tuple(given), check_trace=False)
                close(traced(*given), wanted, "traced")
            except NotImplementedError as error:
                in_words(error, "torch.jit.trace")
        elif way == "compile":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch._dynamo.reset()
                close(torch.compile(run, backend="aot_eager")(*given), wanted, "compiled")
        elif way == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                out = run(*given)
            limit = max(limit, 4 * LIMITS[torch.bfloat16])
            close(out.detach(), wanted, "autocast")
        else:
            leaves = [x.detach().requires_grad_() for x in given]
            out = run(*leaves)
            close(out.detach(), wanted, "plain")
            if differentiable:
                for a, b in zip(torch.autograd.grad(out, leaves, do), (dq, dk, dv), strict=True):
                    close(a, b, "gradient")
    return way, names


def test_random_settings():
    start, seed, last = time.monotonic(), 0, 60.0 * MINUTES
    first = int(start * 1000) % 10**9 if MINUTES else 0
    while seed < 40 or time.monotonic() - start < last:
        try:
            check(first + seed)
        except Exception as error:
            raise AssertionError(f"seed {first + seed}: {type(error).__name__}: {error}") from error
        seed += 1
