# SPDX-License-Identifier: Apache-2.0
"""ptxas compiles the main kernels without serialized products and with few spilled bytes; no GPU is needed.

ptxas can run the matrix instructions of a kernel one at a time, which costs a third of its speed and appears only in
its verbose output (C7510 to C7518). The output also lists spilled registers. Scores of blocks also compile for fp64
tokens; Triton's interpreter accepts loops that change a dtype, and its compiler does not.
"""

import re
from functools import partial

import pytest
import torch

pytest.importorskip("triton")
import triton
from triton.backends import backends

from compiled import RECORDED, compile_kernels
from dynaxx.kernels.attention.contract import SavedForward
from dynaxx.kernels.attention.triton import backward, forward
from dynaxx.kernels.attention.triton.config import TileSizes
from dynaxx.kernels.device import RESERVED
from dynaxx.kernels.selection.triton.pool import pool_blocks
from dynaxx.kernels.selection.triton.query_scores import query_scores
from dynaxx.layout import BlockGrid
from dynaxx.patterns import SlidingWindow
from interpreter import INTERPRETED

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="nothing is compiled under the interpreter"),
    pytest.mark.skipif("nvidia" not in backends, reason="this triton has no compiler for NVIDIA's GPUs"),
]

HEADS = (8, 2)
TOKENS = 512
UNKNOWN = 1 << 30
SLACK = 64  # bytes: Triton gives ptxas the same instructions in another order from run to run


def tensors(head_dim, block, heads=HEADS, dtype=torch.bfloat16, head_dim_v=None):
    """Return (do, dlse, q, k, v, out, lse), whose values are never read, and a layout with bands and full blocks."""
    q, out = (torch.zeros(1, TOKENS, heads[0], dim, dtype=dtype) for dim in (head_dim, head_dim_v or head_dim))
    k, v = (torch.zeros(1, TOKENS, heads[1], dim, dtype=dtype) for dim in (head_dim, head_dim_v or head_dim))
    layout = SlidingWindow(300).layout(TOKENS, block_size=block, device="cpu")
    return (out, None, q, k, v, out, torch.zeros(1, heads[0], TOKENS)), layout


def forward_of(head_dim, block, attention_forward=forward.attention_forward, softcap=None, **given):
    (_, _, q, k, v, *_), layout = tensors(head_dim, block, **given)
    return lambda: attention_forward(q, k, v, layout, 0.1, softcap)


def backward_of(head_dim, block, attention_backward=backward.attention_backward, softcap=None, **sizes):
    given, layout = tensors(head_dim, block, **sizes)
    return lambda: attention_backward(*given, layout, 0.1, softcap)


def of_3_6(spilled):
    """Return the bytes that Triton 3.6 spills; how many others spill is not on record."""
    return spilled if VERSION == (3, 6) else [UNKNOWN] * len(spilled)


def check(found, spilled, injected=0):
    """Assert that no kernel serializes its products and that each spills at most `spilled` bytes, in order of launch.

    Args:
        injected: starts of products (C7519), or waits for one before a loop (C7517), that ptxas may add.
    """
    said = "\n".join(str(each) for each in found)
    assert len(found) == len(spilled), f"other kernels than were asked for:\n{said}"
    for each, most in zip(found, spilled, strict=True):
        assert not [line for line in each.warnings if not re.search(r"\(C751[79]\)", line)], said
        assert len(each.warnings) <= injected, said
        assert each.spilled <= most + SLACK, f"spills more than {most} bytes:\n{said}"


slow = partial(pytest.param, marks=pytest.mark.slow)


# Bytes spilled by Triton 3.6, which the figures in docs use, and by 3.9; other versions are not known.
@pytest.mark.parametrize(
    ("head_dim", "block", "spilled", "injected"),
    [
        slow(64, 64, {(3, 6): 0, (3, 9): 0}, 0),
        (64, 128, {(3, 6): 20, (3, 9): 52}, 2),
        slow(128, 64, {(3, 6): 0, (3, 9): 0}, 0),
        (128, 128, {(3, 6): 0, (3, 9): 4}, 0),
        slow(256, 128, {(3, 6): 56, (3, 9): 100}, 0),
    ],
)
def test_portable_forward(head_dim, block, spilled, injected):
    found = compile_kernels(forward_of(head_dim, block), "fwd_kernel")
    check(found, [spilled.get(VERSION, UNKNOWN)], injected)


@pytest.mark.parametrize(
    ("head_dim", "spilled", "injected"),
    [
        slow(64, {(3, 6): (36, 48), (3, 9): (96, 120)}, 2),
        (128, {(3, 6): (0, 20), (3, 9): (4, 28)}, 0),
    ],
)
def test_portable_forward_in_two_launches(head_dim, spilled, injected, monkeypatch):
    monkeypatch.setattr(forward, "MANY_TILES", 0)
    found = compile_kernels(forward_of(head_dim, 128), "fwd_kernel")
    check(found, spilled.get(VERSION, (UNKNOWN, UNKNOWN)), injected)


@pytest.mark.parametrize(
    ("head_dim", "block", "spilled", "injected"),
    [
        (64, 128, {(3, 6): (0, 0), (3, 9): (12, 0)}, 3),
        (128, 128, {(3, 6): (0, 56), (3, 9): (20, 20)}, 0),
    ],
)
def test_portable_backward(head_dim, block, spilled, injected):
    found = compile_kernels(backward_of(head_dim, block), "bwd_(dq|dkv)_kernel")
    check(found, spilled.get(VERSION, (UNKNOWN, UNKNOWN)), injected)
    assert all(2 * (each.shared + RESERVED) <= RECORDED.shared_memory_of_processor for each in found), (
        "one program a multiprocessor"
    )


@pytest.mark.slow
def test_portable_head_dim_512():
    """Each kernel fits on a multiprocessor; dq spills before its loop only, and all sums stay in registers."""
    found = compile_kernels(forward_of(512, 128), "fwd_kernel")
    found += compile_kernels(backward_of(512, 128), "bwd_(dq|dkv)_kernel")
    spilled = {(3, 6): (0, 628, 28, 0), (3, 9): (UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN)}
    check(found, spilled.get(VERSION, (UNKNOWN,) * 4))
    assert all(each.shared <= RECORDED.shared_memory for each in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "block", "softcap", "spilled"),
    [
        (64, 128, None, 0),
        (128, 64, None, 72),
        (128, 128, None, 96),
        (256, 128, None, 120),
        (64, 128, 50.0, 0),
        (128, 128, 50.0, 116),
        (256, 128, 50.0, 92),
    ],
)
def test_hopper_forward(head_dim, block, softcap, spilled):
    """In bf16, all spilled bytes lie outside the loops over steps."""
    from dynaxx.kernels.attention.hopper.forward import attention_forward

    check(compile_kernels(forward_of(head_dim, block, attention_forward, softcap), "hopper_fwd"), of_3_6([spilled]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "block", "given", "spilled"),
    [
        (64, 64, {"heads": (3, 1)}, 0),
        (128, 64, {"heads": (3, 1)}, 0),
        (256, 64, {"heads": (3, 1)}, 12),
        (64, 128, {"dtype": torch.float16}, 0),
        (128, 128, {"dtype": torch.float16}, 0),
        (256, 128, {"dtype": torch.float16}, 28),
    ],
)
def test_hopper_forward_with_one_consumer_or_with_maxima(head_dim, block, given, spilled):
    from dynaxx.kernels.attention.hopper.forward import attention_forward

    check(compile_kernels(forward_of(head_dim, block, attention_forward, **given), "hopper_fwd"), of_3_6([spilled]))


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "block"), [(64, 128), (128, 64), (128, 128)])
def test_hopper_scores(head_dim, block):
    from dynaxx.kernels.selection.hopper.query_scores import query_scores

    grid = BlockGrid(TOKENS, TOKENS, (block, block), True)
    queries = torch.zeros(1, HEADS[0], grid.q_blocks, head_dim, dtype=torch.bfloat16)
    k = torch.zeros(1, TOKENS, HEADS[1], head_dim, dtype=torch.bfloat16)
    places = torch.zeros(grid.kv_blocks, dtype=torch.int32)
    check(compile_kernels(lambda: query_scores(queries, k, 0, grid, places=places), "scores"), [0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "block", "one_pass", "softcap", "spilled"),
    [
        (64, 128, True, None, [20]),
        (128, 128, True, None, [144]),
        (128, 128, False, None, [0, 12]),
        (128, 64, False, None, [0, 28]),
        (256, 128, False, None, [144, 8]),
        (128, 128, True, 50.0, [288]),
        (128, 128, False, 50.0, [0, 96]),
        (256, 128, False, 50.0, [84, 8]),
    ],
)
def test_hopper_backward(head_dim, block, one_pass, softcap, spilled, monkeypatch):
    from dynaxx.kernels.attention.hopper import backward

    monkeypatch.setattr(backward, "backward_in_one_pass", lambda *sizes: one_pass)
    start = backward_of(head_dim, block, backward.attention_backward, softcap)
    check(compile_kernels(start, r"hopper_bwd_(dq_|dkv_|dkv_head_dim_256_|fused_)kernel"), of_3_6(spilled))


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "head_dim_v", "spilled"), [(80, 80, 150), (192, 128, 150), (160, 160, 1300)])
def test_hopper_head_dims_between_tiles(head_dim, head_dim_v, spilled):
    """A forward with tiles of 256 columns spills when it stores some of them, once per row of blocks."""
    from dynaxx.kernels.attention.hopper.backward import attention_backward
    from dynaxx.kernels.attention.hopper.forward import attention_forward

    sizes = {"head_dim_v": head_dim_v}
    found = compile_kernels(forward_of(head_dim, 128, attention_forward, **sizes), "hopper_fwd")
    found += compile_kernels(backward_of(head_dim, 128, attention_backward, **sizes), "hopper_bwd")
    assert max(each.spilled for each in found) <= spilled + SLACK, found
    assert max(each.shared for each in found) <= RECORDED.shared_memory


@pytest.mark.slow
@pytest.mark.parametrize(("group", "spilled"), [(16, [0, 0, 8, 48]), (4, [0, 0, 8]), (1, [0])])
def test_selected(group, spilled):
    """Selected attention of native sparse attention: the kernels by query, by either, and by key."""
    from dynaxx.trained.nsa.kernels.hopper import operators as nsa
    from dynaxx.trained.nsa.spans import NsaSizes, nsa_spans
    from dynaxx.trained.testing.nsa import random_selected_case

    fixed = {"head_dims": (128,), "blocks": (64,), "lengths": (300, 517), "groups": (group,), "slots": (6,)}
    case = random_selected_case(3, device="cpu", dtype=torch.bfloat16, **fixed)
    q, k, v = case.q[0], case.k[0], case.v[0]
    rows = torch.zeros(q.shape[1], q.shape[0])
    spans = nsa_spans(NsaSizes(64, 64, 64, 6, 0, 0), case.spans.ends_q, case.spans.ends_k)

    def start():
        plan = nsa.prepare_selected(case.block_indices, spans, q, k, v)
        nsa.selected_forward(q, k, v, plan, 0.1)
        nsa.selected_backward(q, rows, SavedForward(q, k, v, q, rows), plan, 0.1)

    check(compile_kernels(start, "selected_hopper"), of_3_6(spilled))


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "spilled"), [((32, 16, 64), 0), ((16, 16, 16), 8)])
def test_scores(sizes, spilled):
    """Scores of blocks of several compressed tokens, and of one, whose scores take the most shared memory."""
    from dynaxx.trained.nsa.kernels.hopper import operators as nsa
    from dynaxx.trained.nsa.spans import NsaSizes, nsa_spans

    spans = nsa_spans(NsaSizes(*sizes), (0, TOKENS))
    q = torch.zeros(TOKENS, 16, 128, dtype=torch.bfloat16)
    start = lambda: nsa.select_blocks(q, q[: spans.ends_cmp[-1], :1], torch.zeros(16, TOKENS), spans, 1, 0.1)
    found = compile_kernels(start, "nsa_scores_hopper")
    check(found, of_3_6([spilled]))
    assert found[0].shared <= RECORDED.shared_memory


@pytest.mark.slow
def test_latent_attention():
    """Forward, and the steps of the backward that have kernels for Hopper: nothing waits, and nothing spills."""
    from dynaxx.trained.tokens.kernels.hopper import operators
    from dynaxx.trained.tokens.spans import TokenSpans

    zeros = lambda heads, width: torch.zeros(64, heads, width, dtype=torch.bfloat16)
    q, k, lse = zeros(128, 576), zeros(1, 576), torch.zeros(128, 64)
    chosen = torch.zeros(64, 1, 32, dtype=torch.int32)

    def start():
        plan = operators.prepare(chosen, TokenSpans((0, 64), (0, 64), 1), q, k, k[..., :512])
        out, _ = operators.forward(q, k, k[..., :512], plan, 0.1)
        operators.latent_backward(out, lse, SavedForward(q, k, k[..., :512], out, lse), plan, 0.1)

    check(compile_kernels(start, "token_latent"), of_3_6([0, 0, 0, 0]))


def test_kernels_that_wait_are_found(monkeypatch):
    """The tiles' sums do not fit in registers, so the next product waits until they are stored."""
    monkeypatch.setattr(forward, "forward_tiles", lambda *shape: TileSizes(128, 128, 8, 2, 128))
    monkeypatch.setattr(forward, "forward_loop", lambda *tiles: "overlapped")
    found = compile_kernels(forward_of(64, 128), "fwd_kernel")
    assert any("serialized" in line for line in found[0].warnings)
    assert found[0].spilled
    with pytest.raises(AssertionError):
        check(found, [UNKNOWN])


def scores_of(kind):
    """Return a function that computes scores of blocks, or a part of them, from fp64 tokens."""
    grid = BlockGrid(128, 128, (64, 64), True)
    k = torch.zeros(1, 128, 1, 16, dtype=torch.float64)
    return {
        "query": lambda: query_scores(torch.zeros(1, 2, 2, 16, dtype=torch.float64), k, 0, grid),
        "means": lambda: pool_blocks(k, 64, "mean", 1.0, torch.float64),
    }[kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["query", "means"])
def test_scores_compile_for_fp64_tokens(kind):
    assert compile_kernels(scores_of(kind), "kernel")
