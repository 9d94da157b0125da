# SPDX-License-Identifier: Apache-2.0
"""Patterns and layouts against the definition, element by element."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from benchmarks.kernels.gpu_beside import LENGTH, PATTERNS
from torch.utils._python_dispatch import TorchDispatchMode

import dynaxx as dx
from dynaxx.core import library
from dynaxx.layout import BlockGrid, BlockLayout, ElementMasks, from_block_mask, to_block_mask
from dynaxx.patterns.build import build_layout, layout_tensors, numpy_layout
from dynaxx.patterns.runs import Runs, Visited, all_of, any_of, without
from dynaxx.testing import random_pattern


@pytest.mark.parametrize("seed", range(300))
def test_layout_shows_exactly_what_the_rule_says(seed):
    rng = random.Random(seed)
    seqlen_k = rng.choice((1, 15, 16, 17, 63, 65, 100, 129, 200, 257))
    seqlen_q = seqlen_k if rng.random() < 0.6 else rng.randint(1, 257)
    block_size = (rng.choice((16, 32, 64, 128)), rng.choice((16, 32, 64, 128)))
    causal, rule = rng.random() < 0.6, random_pattern(rng, seqlen_k)
    layout = rule.layout(seqlen_q, seqlen_k, causal=causal, block_size=block_size).validate()
    grid = BlockGrid(seqlen_q, seqlen_k, block_size, causal)
    q_pos, k_pos = torch.arange(seqlen_q)[:, None] + grid.offset, torch.arange(seqlen_k)[None]
    want = rule.visible(grid, q_pos, k_pos).expand(seqlen_q, seqlen_k)
    want = want & (k_pos <= q_pos) if causal else want

    assert torch.equal(layout.to_dense()[0, 0], want), rule
    assert int(layout.visible_pairs()[0, 0]) == int(want.sum())
    again = BlockLayout.from_dense(want, block_size=block_size).validate()
    assert torch.equal(again.to_dense()[0, 0], want)
    flex = from_block_mask(to_block_mask(layout)).validate()
    assert torch.equal(flex.to_dense()[0, 0], want)
    both = BlockLayout.stack_heads([layout, again]).validate()
    assert torch.equal(both.head_slice([1]).to_dense()[0, 0], want)
    masks = layout.masks
    r, c = torch.arange(block_size[0])[:, None], torch.arange(block_size[1])
    for dense, (lo, hi) in zip(masks.to_dense(), masks.bands.tolist(), strict=True):
        assert lo > hi or torch.equal(dense, (r - c >= lo) & (r - c <= hi))


@pytest.mark.parametrize("seed", range(150))
def test_the_compiled_core_builds_what_numpy_defines(seed, compiled_core):
    rng = random.Random(seed)
    seqlen_k = rng.choice((1, 16, 17, 63, 65, 129, 200, 257, 700))
    seqlen_q = seqlen_k if rng.random() < 0.5 else rng.randint(1, 700)
    block_size = (rng.choice((16, 32, 64, 128)), rng.choice((16, 32, 64, 128)))
    rule = random_pattern(rng, seqlen_k)
    if seed % 3 == 0:
        rule = rule & (random_pattern(rng, seqlen_k) | dx.LastQueries(rng.randint(0, 60)))
    grid = BlockGrid(seqlen_q, seqlen_k, block_size, causal=rng.random() < 0.6)
    rule = rule & dx.Causal() if grid.causal else rule
    found = build_layout(rule, grid).validate()
    assert layout_tensors(rule, grid, torch.device("cpu")) is not None
    want = numpy_layout(rule, grid, torch.device("cpu"))

    assert torch.equal(found.to_dense(), want.to_dense()), rule
    assert (found.kv_num_blocks <= want.kv_num_blocks).all()  # blocks past an end that show nothing are left out
    masks = ElementMasks.from_dense(found.masks.to_dense())
    assert torch.equal(found.masks.bits, masks.bits)
    assert torch.equal(found.masks.bands, masks.bands)
    assert len(masks.bits.unique(dim=0)) == len(masks)
    fields = ("seqlen_q", "seqlen_k", "block_size", "kv_indptr", "kv_num_partial", "kv_indices", "kv_masks", "masks")
    again = BlockLayout(*(getattr(found, name) for name in fields))
    assert again.nnz == found.nnz
    assert (again.kv_order is None) == (found.kv_order is None)
    assert again.kv_order is None or torch.equal(again.kv_order, found.kv_order)


def test_the_compiled_core_at_length(compiled_core):
    """Cover windows and global tokens far from the start, more kinds of masks than a table holds, and positions
    beyond the end.
    """
    tokens = 20_000
    documents = (*tuple(range(0, tokens, 701)), tokens)
    of_any_length = (0, *sorted(random.Random(0).sample(range(tokens), 150)), tokens)
    for rule in (
        dx.SlidingWindow(2**63 - 1),
        dx.SlidingWindow(900) | dx.Strided(2**40),
        dx.Strided(997) | dx.Dilated(50, 7) | dx.GlobalTokens((5, 2**40), symmetric=True),
        dx.bigbird(300, tuple(range(0, tokens, 333)), 3) & dx.Documents(documents),
        dx.Documents(documents) & dx.Documents((*tuple(range(0, tokens, 100)), tokens)) & dx.Strided(3),
        dx.Documents(of_any_length),
        (dx.Documents(of_any_length) | dx.Strided(700)) & (dx.Documents(documents) | dx.LastQueries(99)),
    ):
        for block_size in (128, (64, 128), (128, 16)):
            pair = (block_size, block_size) if isinstance(block_size, int) else block_size
            grid = BlockGrid(tokens, tokens, pair)
            found, want = build_layout(rule, grid), numpy_layout(rule & dx.Causal(), grid, torch.device("cpu"))
            for name in ("kv_indptr", "kv_num_partial", "kv_indices"):
                assert torch.equal(getattr(found, name), getattr(want, name)), (rule, block_size, name)
            shown = [x.masks.to_dense()[x.kv_masks[x.kv_masks >= 0].long()] for x in (found, want)]
            assert torch.equal(*shown), (rule, block_size)


@pytest.fixture
def compiled_core():
    if library.active_library() is None:
        pytest.skip("no C++ core on this machine")
    library.load_core.cache_clear()  # what was not there before may have been compiled now
    assert library.present_library() is not None


@pytest.mark.parametrize("seed", range(40))
def test_runs_are_sets_of_blocks(seed):
    rng = random.Random(seed)
    rows, blocks = rng.randint(1, 4), 12

    def drawn(within=None):
        shown = [[rng.random() < 0.5 and (within is None or within[r][c]) for c in range(blocks)] for r in range(rows)]
        edges = torch.nn.functional.pad(torch.tensor(shown, dtype=torch.int64), (1, 1)).diff()
        most = 1 + int((edges > 0).sum(1).amax())
        at = rng.randrange(blocks)  # where empty runs stand
        sides = [[row.nonzero().flatten().tolist() for row in side] for side in (edges > 0, edges < 0)]
        filled = [[sorted(row + [at] * (most - len(row))) for row in side] for side in sides]
        return shown, Runs(*(np.array(side, np.int64).reshape(rows, most).T for side in filled))

    def listed(runs):
        counts = np.zeros((rows, blocks), np.int64)
        np.add.at(counts, runs.blocks(rows), 1)
        return counts.tolist()

    (a, runs_a), (b, runs_b), (c, runs_c) = drawn(), drawn(), drawn()
    some, runs_some = drawn(a)
    each = [(r, col) for r in range(rows) for col in range(blocks)]
    for runs, holds in (
        (runs_a, lambda r, col: a[r][col]),
        (any_of([runs_a, runs_b, runs_c]), lambda r, col: a[r][col] or b[r][col] or c[r][col]),
        (all_of([runs_a, runs_b, runs_c]), lambda r, col: a[r][col] and b[r][col] and c[r][col]),
        (without(runs_a, runs_some), lambda r, col: a[r][col] and not some[r][col]),
    ):
        found = listed(runs)
        assert all(found[r][col] == holds(r, col) for r, col in each)


@pytest.mark.parametrize("seed", range(30))
def test_one_rule_at_many_lengths(seed):
    """Masks that were evaluated at another length are reused correctly."""
    rng = random.Random(seed)
    rule = random_pattern(rng, 200) & (dx.LastQueries(rng.randint(1, 60)) | random_pattern(rng, 200))
    block_size = (rng.choice((16, 32, 64)), rng.choice((16, 32, 64)))
    for causal in (True, False):
        for seqlen_q in (200, 33, 199, 64, 1, 230):
            layout = rule.layout(seqlen_q, 200, causal=causal, block_size=block_size).validate()
            grid = BlockGrid(seqlen_q, 200, block_size, causal)
            q_pos, k_pos = torch.arange(seqlen_q)[:, None] + grid.offset, torch.arange(200)[None]
            want = rule.visible(grid, q_pos, k_pos).expand(seqlen_q, 200)
            want = want & (k_pos <= q_pos) if causal else want
            assert torch.equal(layout.to_dense()[0, 0], want), (rule, seqlen_q, causal)


def test_lengths_in_turn():
    rule = dx.SlidingWindow(70) | dx.GlobalTokens((0, 17, 90), symmetric=True) | dx.LastQueries(20) | dx.Strided(41)
    for seqlen in (*range(1, 300, 13), 128, 64, 300):
        for causal in (True, False):
            found = rule.layout(seqlen, causal=causal, block_size=(32, 16)).to_dense()[0, 0]
            grid = BlockGrid(seqlen, seqlen, (32, 16), causal)
            at = torch.arange(seqlen)
            want = rule.visible(grid, at[:, None], at[None])
            assert torch.equal(found, want & (at[None] <= at[:, None]) if causal else want), (seqlen, causal)


class OnGpu(BlockLayout):
    """Claim to be on a GPU, so that the number of used slots is not read."""

    device = property(lambda self: torch.device("cuda"))


@pytest.mark.parametrize("junk", [0, -1, 10**6])
def test_transposed_of_unused_slots(junk):
    rules = (dx.SlidingWindow(50) | dx.GlobalTokens(3), dx.RandomBlocks(2, seed=1), dx.Strided(7))
    heads = BlockLayout.stack_heads([rule.layout(200, 230, block_size=(32, 16)) for rule in rules])
    for layout in (heads, heads.head_slice([0])):
        sizes = {name: getattr(layout, name) for name in ("seqlen_q", "seqlen_k", "block_size", "masks")}
        offsets = {name: getattr(layout, name) for name in ("kv_indptr", "kv_num_partial")}
        more = lambda x: torch.cat([x, torch.full((9,), junk, dtype=torch.int32)])
        there = OnGpu(**sizes, **offsets, kv_indices=more(layout.kv_indices), kv_masks=more(layout.kv_masks)).transposed
        here = layout.transposed
        assert torch.equal(there.q_indptr, here.q_indptr)
        assert torch.equal(there.q_num_partial, here.q_num_partial)
        assert torch.equal(there.q_indices[: layout.nnz], here.q_indices)
        assert torch.equal(there.q_masks[: layout.nnz], here.q_masks)


def test_transposed_lists_the_same_blocks():
    layout = (dx.SlidingWindow(50) | dx.GlobalTokens(3)).layout(200, 230, block_size=(32, 16))
    flat_rows, cols, mask_ids = layout.entries()
    forward = set(zip(flat_rows.tolist(), cols.tolist(), mask_ids.tolist(), strict=True))
    turned = layout.transposed
    counts = turned.q_indptr.diff(dim=-1)[0, 0].tolist()
    starts = turned.q_indptr[0, 0].tolist()
    backward = {
        (int(turned.q_indices[at]), col, int(turned.q_masks[at]))
        for col, count in enumerate(counts)
        for at in range(starts[col], starts[col] + count)
    }
    assert forward == backward
    for col, count in enumerate(turned.q_num_partial[0, 0].tolist()):
        masks = turned.q_masks[starts[col] : starts[col + 1]]
        assert (masks[:count] >= 0).all()
        assert (masks[count:] == -1).all()


def test_a_million_tokens_stay_small():
    layout = (dx.SlidingWindow(4096) | dx.GlobalTokens(64)).layout(1_048_576, block_size=128)
    assert layout.nnz < 300_000
    assert len(layout.masks) <= 8


class Counted(TorchDispatchMode):
    """Count the torch operations that run inside."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rule", PATTERNS.values(), ids=PATTERNS)
def test_a_layout_asks_little_of_torch(rule):
    """A layout needs few torch operations: its memory, one copy to a GPU, and a view per tensor."""
    with Counted() as counted:
        build_layout(rule, BlockGrid(LENGTH, LENGTH, (128, 128), True))
    assert counted.count <= 10


@dataclass(frozen=True)
class Parity(dx.Pattern):
    """A rule with only the required methods: even keys, and odd keys for queries from a position on."""

    since: int

    def visible(self, grid, q_pos, k_pos):
        return (k_pos % 2 == 0) | (q_pos >= self.since)

    def visited(self, grid):
        return Visited(dx.Full().visited(grid).touched, Runs.none())


def test_a_rule_of_ones_own():
    for rule in (Parity(70), Parity(70) & dx.SlidingWindow(40), Parity(20) | dx.RandomBlocks(1)):
        for causal in (True, False):
            layout = rule.layout(100, 110, causal=causal, block_size=(32, 16)).validate()
            q_pos, k_pos = torch.arange(100)[:, None] + 10, torch.arange(110)[None]
            want = rule.visible(BlockGrid(100, 110, (32, 16), causal), q_pos, k_pos)
            assert torch.equal(layout.to_dense()[0, 0], want & (k_pos <= q_pos) if causal else want)


def test_a_rule_that_changes_another():
    class EvenDistances(dx.SlidingWindow):
        def shows(self, grid, distance):
            return super().shows(grid, distance) & (distance % 2 == 0)

        def visited(self, grid):
            return Visited(super().visited(grid).touched, Runs.none())

    layout = (EvenDistances(40) | dx.Sink(2)).layout(100, block_size=16).validate()
    at = torch.arange(100)
    distance = at[:, None] - at
    want = ((distance < 40) & (distance % 2 == 0) | (at < 2)) & (distance >= 0)
    assert torch.equal(layout.to_dense()[0, 0], want)


def test_random_blocks_stay_what_they_were():
    for rule, drawn in (
        (dx.RandomBlocks(2, seed=7), ((0,), (0, 1), (0, 1), (0, 2), (0, 3))),
        (dx.RandomBlocks(3, seed=12345), ((0,), (0, 1), (0, 1, 2), (0, 1, 2), (0, 1, 4))),
    ):
        seen = rule.layout(80, block_size=16).to_dense()[0, 0, 15::16, ::16]
        assert [tuple(row.nonzero().flatten().tolist()) for row in seen] == list(drawn)


def test_layouts_are_cached_by_value():
    make = lambda: (dx.SlidingWindow(64) | dx.Sink(4)).layout(512, block_size=64)
    assert make() is make()


def test_presets_and_repr():
    assert dx.longformer(8, 2) == dx.SlidingWindow(8) | dx.GlobalTokens(2, symmetric=True)
    assert repr(dx.streaming(8, 2)) == "Sink(2) | SlidingWindow(window=8)"
    assert dx.bigbird(8, 2, 3).layout(256, block_size=16).validate().nnz > 0
    assert "nnz=unknown" in repr(dx.SlidingWindow(8).layout(64, block_size=16).to("meta"))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: dx.SlidingWindow(0), "`window` must be >= 1"),
        (lambda: dx.SlidingWindow((1, -2)), "`window` must be"),
        (lambda: dx.Strided(0), "`stride` must be >= 1"),
        (lambda: dx.GlobalTokens((-1,)), "`tokens` must be >= 0"),
        (lambda: dx.Documents((1, 2)), "`cu_seqlens` must start at 0"),
        (lambda: dx.Documents((0, 5)).layout(6), "`cu_seqlens` must end at seqlen_k = 6"),
        (lambda: dx.Full().layout(6, block_size=48), "`block_size` must be one of"),
        (lambda: dx.Full().layout(-1), "must be >= 0"),
        (lambda: indices([[5]]), r"in \[0, kv_blocks = 2\)"),
        (lambda: indices([[1, 1]]), "twice"),
        (lambda: BlockLayout.from_dense(torch.ones(3, 3)), "`mask` must be bool"),
        (lambda: BlockLayout.stack_heads([]), "`layouts` must contain at least one"),
        (lambda: three_heads().head_slice([3]), "`heads` must be distinct heads from 0 to 2"),
        (lambda: three_heads().head_slice([1, 1]), "`heads` must be distinct"),
        (lambda: three_heads().head_slice([]), "`heads` must be distinct"),
        (lambda: BlockLayout.stack_heads([three_heads(), three_heads().to("meta")]), "must be on one device"),
    ],
)
def test_bad_input_is_refused_with_its_contract(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def three_heads():
    return BlockLayout.stack_heads([dx.Full().layout(20, block_size=16)] * 3)


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: dx.Dilated(3, 2.0), "dilation"),
        (lambda: dx.Strided(2.5), "stride"),
        (lambda: dx.GlobalTokens(2.5), "tokens"),
        (lambda: dx.GlobalTokens((1, 2.5)), "tokens"),
        (lambda: dx.LastQueries("3"), "queries"),
        (lambda: dx.LocalBlocks(1.5), "blocks"),
        (lambda: dx.RandomBlocks(2, seed=0.5), "seed"),
        (lambda: dx.Documents((0, 2.5, 6)), "cu_seqlens"),
        (lambda: dx.Full().layout(6.0), "seqlen_q"),
        (lambda: dx.packed_layout(dx.Full(), (0, 5.5)), "cu_seqlens_q"),
    ],
)
def test_no_number_is_cut_to_a_whole_one(build, name):
    with pytest.raises(TypeError, match=f"`{name}` must be an integer"):
        build()


def test_integers_of_any_kind():
    for number in (np.int64(3), torch.tensor(3)):
        for rule in (dx.SlidingWindow, dx.Strided, dx.GlobalTokens, dx.LastQueries, dx.LocalBlocks, dx.RandomBlocks):
            assert rule(number) == rule(3)
    assert dx.GlobalTokens(torch.tensor([1, 3])) == dx.GlobalTokens(np.array([3, 1])) == dx.GlobalTokens((1, 3))
    assert dx.Full().layout(np.int64(40)) is dx.Full().layout(torch.tensor(40)) is dx.Full().layout(40)
    rows = torch.tensor([[[[0, 1], [1, 0]]]])
    found = [BlockLayout.from_block_indices(rows.to(kind), 32, block_size=16) for kind in (torch.uint8, torch.int64)]
    assert torch.equal(found[0].kv_indices, found[1].kv_indices)


def test_block_indices_are_a_tensor():
    with pytest.raises(TypeError, match="`block_indices` must be a tensor, got list"):
        BlockLayout.from_block_indices([[[[0]]]], 16, block_size=16)


def indices(rows):
    return BlockLayout.from_block_indices(torch.tensor([[rows, rows]]).view(1, 1, 2, -1), 32, block_size=16)


def test_block_indices_drop_empty_slots_and_the_future():
    layout = indices([[-1, 1]]).validate()
    assert layout.kv_num_blocks.tolist() == [[[0, 1]]]


def test_no_queries_and_no_keys():
    for seqlen_q, seqlen_k in ((0, 0), (0, 5), (5, 0)):
        layout = (dx.SlidingWindow(4) | dx.GlobalTokens(2)).layout(seqlen_q, seqlen_k, block_size=16).validate()
        assert layout.nnz == 0
        assert layout.to_dense().shape == (1, 1, seqlen_q, seqlen_k)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_layout_comes_back_from_a_busy_gpu_whole():
    layout = (dx.SlidingWindow(300) | dx.GlobalTokens(3)).layout(20_000, block_size=16)
    there = layout.to("cuda")
    assert there.host is layout
    direct = (dx.SlidingWindow(300) | dx.GlobalTokens(3)).layout(20_000, block_size=16, device="cuda")
    assert torch.equal(direct.host.kv_indices, layout.kv_indices)
    assert torch.equal(direct.to("cpu").kv_indptr, layout.kv_indptr)
    x = torch.randn(8192, 8192, device="cuda")
    for _ in range(5):
        x = x @ x  # what the copies back have to wait behind
        back = there.to("cpu")
        assert torch.equal(back.kv_indptr, layout.kv_indptr)
        assert torch.equal(back.kv_indices, layout.kv_indices)
        assert torch.equal(back.masks.bits, layout.masks.bits)
