# SPDX-License-Identifier: Apache-2.0
"""Every public attention function against plain softmax in fp64, on problems that hypothesis draws.

The problems combine dtypes, groups of heads, head_dims, strides, empty sequences, more queries than keys, padding,
missing pages, scales, softcaps and sinks. The examples are the same in every run. `random_problem` does the same for
layouts of any kind, and `dynaxx doctor --fuzz` draws any number of those. `DYNAXX_SWEEP=50` draws fifty times as many
problems, others in each run. On a machine with a GPU the calls run there.

Legend: N queries and M keys of one sequence, Hq and Hk heads of q and of k and v.
"""

import os
import random
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dynaxx as dx
from dynaxx.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
from dynaxx.testing import Expected, random_memory, random_problem
from interpreter import DEVICE

# Limits on |found - exact| / (1 + |exact|): a few roundings. The kernels' own tests derive a budget for each problem.
LIMITS = {torch.float64: 1e-10, torch.float32: 3e-5, torch.bfloat16: 5e-2, torch.float16: 7e-3}
LENGTHS = (0, 1, 5, 17, 33, 40)
HEAD_DIMS = ((1, 1), (7, 7), (16, 3), (24, 24), (64, 64), (80, 80), (130, 48))
if DEVICE == "cuda":  # each head_dim is compiled
    HEAD_DIMS = ((7, 7), (16, 3), (64, 64), (130, 48))
TIMES = int(os.environ.get("DYNAXX_SWEEP", "0"))


def sweep(examples):
    """Run a test on so many seeds, from which it draws its problem."""
    chosen = settings(
        max_examples=examples * max(1, TIMES),
        derandomize=not TIMES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: chosen(given(st.integers(0, 10**6))(test))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Use one thread, because with more of them small tensors wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Problem:
    """Random sequences, and the options of an attention call."""

    def __init__(self, seed, *, batched=False, dtypes=tuple(LIMITS)):
        self.rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        choose = self.rng.choice
        self.dtype, self.kv_heads, self.group = choose(dtypes), choose((1, 2, 3)), choose((1, 2, 3, 5))
        self.heads, (self.dim, self.dim_v) = self.kv_heads * self.group, choose(HEAD_DIMS)
        lengths = [
            (n, max(0, n + choose((0, 0, 0, -3, 4, 30)))) for n in self.rng.choices(LENGTHS, k=choose((1, 2, 3)))
        ]
        self.lengths = lengths[:1] * len(lengths) if batched else lengths
        self.batched = batched
        self.ends = [list(accumulate((pair[side] for pair in self.lengths), initial=0)) for side in (0, 1)]
        total_q, total_k = (ends[-1] for ends in self.ends)
        self.q, self.k = self.draw(total_q, self.heads, self.dim), self.draw(total_k, self.kv_heads, self.dim)
        self.v = self.draw(total_k, self.kv_heads, self.dim_v)
        self.options = {"scale": choose((None, None, 0.3, -0.2)), "softcap": choose((None, None, 4.0))}
        self.sinks = self.draw(self.heads) if self.rng.random() < 0.3 else None

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def shaped(self, x, length):
        """Return packed rows as a function takes them, with random strides, on the device."""
        x = x.to(DEVICE)
        x = x.view(len(self.lengths), length, *x.shape[1:]) if self.batched else x[None]
        x = random_memory(self.rng, x)[0] if x.numel() else x
        return x if self.batched else x[0]

    def pieces(self):
        """Yield the rows of queries, the rows of keys, and the positions of the queries of each sequence."""
        for (a, b), (c, d) in zip(pairwise(self.ends[0]), pairwise(self.ends[1]), strict=True):
            yield slice(a, b), slice(c, d), torch.arange(b - a) + (d - c) - (b - a)

    def check(self, attend, mask):
        """Compare `attend(q, k, v[, sinks])` and its gradients with fp64 over the pairs of mask (Hq | 1, N, M)."""
        given = [self.q, self.k, self.v, *([] if self.sinks is None else [self.sinks])]
        leaves = [x.clone().requires_grad_(self.rng.random() < 0.8) for x in given]
        exact = [x.detach().double().requires_grad_(x.requires_grad) for x in leaves]
        found = [x.cpu() for x in attend(*leaves)]
        names = ("q", "k", "v", "sinks")[: len(given)]
        wanted = plain(mask=mask, **self.options, **dict(zip(names, exact, strict=True)))
        seen = wanted[1].isfinite()
        for name, a, b in zip(("out", "lse"), found, wanted, strict=True):
            close(a.detach(), b.detach(), self.dtype, name)
        do, dlse = (torch.randn(x.shape, generator=self.generator).to(x.dtype) for x in found)
        results = []
        for (out, lse), inputs in ((found, leaves), (wanted, exact)):
            pairs = [(x, g.to(x.dtype)) for x, g in ((out, do), (lse[seen], dlse[seen])) if x.requires_grad]
            total = sum((x * g).sum() for x, g in pairs)
            inputs = [x for x in inputs if x.requires_grad]
            results.append(torch.autograd.grad(total, inputs, materialize_grads=True) if pairs and inputs else ())
        moved = [name for name, x in zip(names, leaves, strict=True) if x.requires_grad]
        for name, a, b in zip(moved, *results, strict=False):
            close(a, b, self.dtype, f"d{name}", times=4)


def plain(q, k, v, mask, scale=None, softcap=None, sinks=None):
    """Return out (N, Hq, E) and lse (Hq, N): softmax over the pairs of mask, by its formula."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    extra = scores.new_full((q.shape[1], 1, 1), -torch.inf) if sinks is None else sinks[:, None, None]
    scores = torch.cat([scores.masked_fill(~mask, -torch.inf), extra.expand(-1, len(q), 1)], -1)
    top = scores.detach().amax(-1, keepdim=True)
    weights = (scores - top.where(top.isfinite(), 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    lse = total.where(total > 0, 1.0).log() + top.where(top.isfinite(), 0.0)
    lse = lse.masked_fill(total == 0, -torch.inf)[..., 0]
    return torch.einsum("hqk,khd->qhd", (weights / total.where(total > 0, 1.0))[..., :-1], v), lse


def close(found, exact, dtype, what, times=1):
    """Check shapes, the places of infinite values, and values."""
    assert found.shape == exact.shape, what
    finite = exact.isfinite()
    assert torch.equal(found.isfinite(), finite), what
    error = (found.double() - exact).masked_fill(~finite, 0.0).abs() / (1 + exact.masked_fill(~finite, 0.0).abs())
    assert not error.numel() or float(error.max()) <= times * LIMITS[dtype], f"{what}: {float(error.max()):.1e}"


@sweep(20)
def test_sparse_attention(seed):
    """Layouts of rules, selectors, masks and indices, packed sequences, merged results, and buckets by length."""
    problem = random_problem(seed, DEVICE)
    backend = ("auto", "reference")[seed % 2]
    reports = Expected(problem).reports(lambda *inputs: problem.attend(*inputs, backend=backend))
    assert all(report.ok for report in reports), (problem.label, *map(str, reports))


@pytest.mark.parametrize("batched", [False, True])
@sweep(60)
def test_selected_attention(batched, seed):
    """Blocks of 1 to 64 tokens that each query chooses, in any order, with empty slots."""
    problem = Problem(seed, batched=batched)
    rng, size = problem.rng, problem.rng.choice((1, 1, 2, 4, 8, 16, 64))
    heads, slots = rng.choice((1, problem.kv_heads, problem.heads)), rng.choice((0, 1, 3, 40))
    chosen = torch.full((len(problem.q), heads, slots), -1, dtype=rng.choice((torch.int32, torch.int64, torch.int16)))
    mask = torch.zeros(heads, len(problem.q), len(problem.k), dtype=torch.bool)
    for rows, cols, position in problem.pieces():
        keys = torch.arange(cols.stop - cols.start)
        for row, head in [(row, head) for row in range(rows.start, rows.stop) for head in range(heads)]:
            blocks = rng.sample(range(-(-len(keys) // size)), min(rng.randint(0, slots), -(-len(keys) // size)))
            places = rng.sample(range(slots), len(blocks))
            chosen[row, head, places] = torch.tensor(blocks, dtype=chosen.dtype)
            seen = torch.isin(keys // size, torch.tensor(blocks)) & (keys <= position[row - rows.start])
            mask[head, row, cols] = seen
    ends = {} if batched else {"cu_seqlens_q": problem.ends[0], "cu_seqlens_k": torch.tensor(problem.ends[1])}
    seqlen_q, seqlen_k = problem.lengths[0]

    def attend(q, k, v, sinks=None):
        q, k, v = problem.shaped(q, seqlen_q), problem.shaped(k, seqlen_k), problem.shaped(v, seqlen_k)
        blocks = chosen.to(DEVICE).view(*q.shape[:-2], heads, slots)
        sinks = None if sinks is None else sinks.to(DEVICE)
        out, lse = dx.trained.selected_attention(
            q, k, v, blocks, block_size=size, **ends, **problem.options, sinks=sinks, return_lse=True,
            backend=rng.choice(("auto", "auto", "reference")),
        )  # fmt: skip
        return (out.flatten(0, 1), lse.transpose(0, 1).flatten(1)) if batched else (out, lse)

    problem.check(attend, mask.repeat_interleave(problem.heads // heads, 0))


@pytest.mark.parametrize("batched", [False, True])
@sweep(40)
def test_flash_attention(batched, seed):
    """FlashAttention's functions, causal or not, with windows to the left and to the right."""
    problem = Problem(seed, batched=batched)
    problem.sinks = None
    causal, left, right = problem.rng.random() < 0.5, *problem.rng.choices((-1, 0, 3, 20), k=2)
    mask = torch.zeros(len(problem.q), len(problem.k), dtype=torch.bool)
    for rows, cols, position in problem.pieces():
        ahead = torch.arange(cols.stop - cols.start) - position[:, None]
        most, least = 0 if causal else 999 if right < 0 else right, -999 if left < 0 else -left
        mask[rows, cols] = (ahead <= most) & (ahead >= least)
    options = {"softmax_scale": problem.options["scale"], "softcap": problem.options["softcap"] or 0.0}
    options |= {"causal": causal, "window_size": (left, right), "return_attn_probs": True}
    seqlen_q, seqlen_k = problem.lengths[0]

    def attend(q, k, v):
        q, k, v = problem.shaped(q, seqlen_q), problem.shaped(k, seqlen_k), problem.shaped(v, seqlen_k)
        if not batched:
            return flash_attn_varlen_func(q, k, v, *problem.ends, 99, 99, **options)[:2]
        out, lse, _ = flash_attn_func(q, k, v, **options)
        return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)

    problem.check(attend, mask)


@pytest.mark.parametrize("batched", [False, True])
@sweep(20)
def test_native_sparse_attention(batched, seed):
    """The three branches with every block selected, and their gates."""
    problem = Problem(seed, batched=batched)
    problem.sinks, problem.options["softcap"] = None, None
    stride, parts, window = problem.rng.choice((4, 8, 16)), problem.rng.choice((1, 2)), problem.rng.choice((1, 9, 99))
    sizes = dx.trained.NsaSizes(min(16, stride * parts), stride, 16, 99, 1, 1, window)
    seqlen_q, seqlen_k = problem.lengths[0]
    ends = {} if batched else {"cu_seqlens_q": problem.ends[0], "cu_seqlens_k": problem.ends[1]}
    of_keys = {} if batched else {"cu_seqlens": problem.ends[1]}
    gates = problem.draw(len(problem.q), problem.heads, 3)

    def attend(q, k, v, gates):
        q, k, v = problem.shaped(q, seqlen_q), problem.shaped(k, seqlen_k), problem.shaped(v, seqlen_k)
        pooled = dx.trained.compress(k, sizes, **of_keys), dx.trained.compress(v, sizes, **of_keys)
        out = dx.trained.native_sparse_attention(
            q, k, v, pooled, gates.to(DEVICE).view(*q.shape[:-1], 3), sizes, **ends, scale=problem.options["scale"]
        )
        return (out.flatten(0, 1) if batched else out).cpu()

    def definition(q, k, v, gates):
        outs = []
        for rows, cols, position in problem.pieces():
            keys, values, count = k[cols], v[cols], sizes.compressed(cols.stop - cols.start)
            means = lambda x, count=count: torch.stack(
                [x[i * stride : i * stride + sizes.cmp_block].mean(0) for i in range(count)] or [x[:0].sum(0)]
            )
            last = torch.arange(max(1, count)) * stride + sizes.cmp_block - 1
            ahead = torch.arange(len(keys)) - position[:, None]
            branches = (
                (means(keys), means(values), (last <= position[:, None]) & (count > 0)),
                (keys, values, ahead <= 0),
                (keys, values, (ahead <= 0) & (ahead > -window)),
            )
            parts = [plain(q[rows], a, b, mask, problem.options["scale"])[0] for a, b, mask in branches]
            outs.append((torch.stack(parts, -1) * gates[rows][:, :, None]).sum(-1))
        return torch.cat(outs)

    leaves = [x.requires_grad_() for x in (problem.q, problem.k, problem.v, gates)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    found, wanted = attend(*leaves), definition(*exact)
    close(found.detach(), wanted.detach(), problem.dtype, "out", times=4)
    do = torch.randn(wanted.shape, generator=problem.generator)
    results = [torch.autograd.grad(x, i, do.to(x.dtype)) for x, i in ((found, leaves), (wanted, exact))]
    for name, a, b in zip(("dq", "dk", "dv", "dgates"), *results, strict=True):
        close(a, b, problem.dtype, name, times=16)


class Pages:
    """A cache with random lengths, padding and page table. What no query may read is NaN."""

    def __init__(self, problem, batch):
        rng, self.size = problem.rng, problem.rng.choice((1, 4, 16, 32))
        self.count = rng.choice((0, 1, 2, 2, 3, 3))
        room = self.size * self.count
        self.k, self.v = (problem.draw(batch, room, problem.kv_heads, n) for n in (problem.dim, problem.dim_v))
        self.used = [rng.choice((0, room, *[rng.randint(0, room)] * 4)) for _ in range(batch)]
        self.pad = [rng.randint(0, n + 2) if rng.random() < 0.2 else 0 for n in self.used]
        self.seen = torch.zeros(batch, room, dtype=torch.bool)
        pool_of = lambda x: x.new_full((batch * self.count + 2, self.size, *x.shape[2:]), torch.nan)
        table, k, v = torch.full((batch, self.count), -1, dtype=torch.int32), pool_of(self.k), pool_of(self.v)
        free = rng.sample(range(len(k)), len(k))
        for b in range(batch):
            self.seen[b, self.pad[b] : self.used[b]] = True
            for page in range(self.count):
                rows = slice(page * self.size, (page + 1) * self.size)
                if rng.random() < 0.1:
                    self.seen[b, rows] = False
                    continue
                table[b, page] = free.pop()
                for pool, x in ((k, self.k), (v, self.v)):
                    pool[table[b, page]][self.seen[b, rows]] = x[b, rows][self.seen[b, rows]]
        used, pad = (torch.tensor(x, dtype=torch.int32) for x in (self.used, self.pad))
        pad = pad.to(DEVICE) if rng.random() < 0.5 or any(self.pad) else None
        self.cache = dx.PagedCache(*(x.to(DEVICE) for x in (k, v, used, table)), leftpad_k=pad)

    def check(self, problem, q, found, mask):
        """Compare (out, lse) with fp64 over what each query sees and mask (batch, Hq | 1, N | 1, M) shows."""
        keys = torch.arange(self.k.shape[1])
        for b in range(len(q)):
            position = self.used[b] - q.shape[1] + torch.arange(q.shape[1])
            seen = mask[b] & self.seen[b] & (keys <= position[:, None])
            parts = q[b].double(), self.k[b].double(), self.v[b].double()
            sinks = None if problem.sinks is None else problem.sinks.double()
            out, lse = plain(*parts, seen, **problem.options, sinks=sinks)
            close(found.out[b].cpu(), out, problem.dtype, "out")
            close(found.lse[b].cpu(), lse, problem.dtype, "lse")


@sweep(120)
def test_decoding_over_pages(seed):
    """All pages, a window, listed pages, and pages that a budget selects."""
    problem = Problem(seed)
    rng, batch, seqlen = problem.rng, problem.rng.choice((0, *[1, 2] * 4)), problem.rng.choice((0, *[1, 1, 4] * 3))
    pages, q = Pages(problem, batch), problem.draw(batch, seqlen, problem.heads, problem.dim)
    keys, cache, read = torch.arange(pages.k.shape[1]), pages.cache, None
    mask = torch.ones(batch, problem.heads, seqlen, len(keys), dtype=torch.bool)
    sinks, on_device = None if problem.sinks is None else problem.sinks.to(DEVICE), q.to(DEVICE)
    options = {**problem.options, "sinks": sinks, "return_lse": True}
    kind = rng.choice(("all", "window", "list", "budget"))
    if kind == "window":
        left = rng.choice((0, 3, 10**9))
        options["window_size"] = (left, 0)
        position = torch.tensor(pages.used, dtype=torch.int64)[:, None] - seqlen + torch.arange(seqlen)
        mask &= (keys >= position[..., None] - left)[:, None]
    elif kind == "list":
        slots = rng.randint(0, pages.count)
        rows = [rng.sample([*range(pages.count), -1], slots) for _ in range(batch * problem.kv_heads)]
        read = chosen = torch.tensor(rows, dtype=torch.int32).view(batch, problem.kv_heads, slots)
    elif kind == "budget":
        bound = rng.choice((0.0, 0.5, 1.0))
        cache = dx.summarize_pages(cache, bound=bound)
        read = dx.PageBudget(rng.choice((0, 1, 0.4)), rng.choice((0, 2)), rng.choice((1, 5)), bound)
        chosen = dx.select_pages(on_device, cache, read, scale=problem.options["scale"]).cpu()
    if read is not None:
        shown = (chosen[..., None] == keys // pages.size).any(-2)
        mask &= shown.repeat_interleave(problem.group, 1)[:, :, None]
    on_device = random_memory(rng, on_device)[0] if q.numel() else on_device
    found = dx.sparse_decode(on_device, cache, read.to(DEVICE) if kind == "list" else read, **options)
    pages.check(problem, q, found, mask)


@sweep(80)
def test_decoding_over_chosen_tokens(seed):
    problem = Problem(seed)
    rng, batch, seqlen = problem.rng, problem.rng.choice((0, *[1, 2] * 4)), problem.rng.choice((0, *[1, 1, 4] * 3))
    pages, q = Pages(problem, batch), problem.draw(batch, seqlen, problem.heads, problem.dim)
    size, slots, heads = (
        rng.choice((1, 2, 8, 16)),
        rng.choice((0, 1, 5)),
        rng.choice((1, problem.kv_heads, problem.heads)),
    )
    keys, blocks = torch.arange(pages.k.shape[1]), -(-pages.k.shape[1] // size)
    rows = [rng.sample([*range(blocks), *[-1] * slots], slots) for _ in range(batch * seqlen * heads)]
    chosen = torch.tensor(rows, dtype=torch.int64).view(batch, seqlen, heads, slots)
    mask = (chosen[..., None] == keys // size).any(-2).transpose(1, 2).repeat_interleave(problem.heads // heads, 1)
    sinks = None if problem.sinks is None else problem.sinks.to(DEVICE)
    found = dx.trained.selected_decode(q.to(DEVICE), pages.cache, chosen.to(DEVICE), block_size=size, **problem.options,
                               sinks=sinks, return_lse=True)  # fmt: skip
    pages.check(problem, q, found, mask)


@sweep(60)
def test_choices_of_an_indexer(seed):
    """Small whole numbers give exact scores with many ties, so that every choice has one right answer."""
    problem = Problem(seed)
    rng, heads, dim = problem.rng, problem.rng.choice((1, 3, 4)), problem.rng.choice((1, 8, 33))
    whole = lambda *shape: torch.randint(-2, 3, shape, generator=problem.generator).to(problem.dtype)
    q, k, weights = whole(len(problem.q), heads, dim), whole(len(problem.k), dim), whole(len(problem.q), heads)
    size, slots = rng.choice((1, 1, 2, 8, 16)), rng.choice((1, 3, 40))
    choice, precision = dx.trained.TopKTokens(size * slots, size), rng.choice(("fp32", "bf16"))
    scores = (torch.einsum("qhd,kd->qhk", q.double(), k.double()).relu() * weights.double()[..., None]).sum(1)
    wanted = torch.full((len(q), 1, slots), -1, dtype=torch.int32)
    for rows, cols, position in problem.pieces():
        for row, last in zip(range(rows.start, rows.stop), position.tolist(), strict=True):
            seen = scores[row, cols][: max(0, last + 1)].split(size) if last >= 0 else ()
            best = sorted(range(len(seen)), key=lambda block, seen=seen: (-float(seen[block].max()), block))[:slots]
            wanted[row, 0, : len(best)] = torch.tensor(sorted(best), dtype=torch.int32)
    ends = {"cu_seqlens_q": problem.ends[0], "cu_seqlens_k": problem.ends[1]}
    q, k, weights = (x.to(DEVICE) for x in (q, k, weights))
    for backend in ("auto", "reference"):
        found = dx.trained.index_tokens(q, k, weights, choice, **ends, precision=precision, backend=backend)
        assert torch.equal(found.cpu(), wanted)
    for rows, cols, _ in problem.pieces():
        used = torch.tensor([cols.stop - cols.start], dtype=torch.int32, device=DEVICE)
        step = dx.trained.index_decode(
            q[None, rows], k[None, cols], weights[None, rows], choice, used, precision=precision
        )
        assert torch.equal(step[0].cpu(), wanted[rows])
