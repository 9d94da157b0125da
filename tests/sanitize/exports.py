# SPDX-License-Identifier: Apache-2.0
"""Call the exported functions of the C++ core with extreme integers and with tensors that another thread writes to.

Run by `run.py` on an instrumented core: `python tests/sanitize/exports.py --cases 500`. A case passes if the function
returns; what it returns must be one of the core's status codes. Numbers that give the size of a buffer are replaced
only by ones that no buffer can have.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import sys
import threading
from contextlib import nullcontext
from ctypes import byref, c_int64, c_void_p
from math import prod

import torch

import dynaxx as dx
from dynaxx.core.library import active_library
from dynaxx.core.structures import BAD_INPUT, FAILED, NO_MEMORY, OK
from dynaxx.kernels.attention import cpu
from dynaxx.kernels.attention.cpu.plan import plan_of
from dynaxx.kernels.decode import cpu as decode
from dynaxx.kernels.runtime import core_arguments
from dynaxx.kernels.runtime.core_arguments import forward_args
from dynaxx.kernels.selection.cpu import best_blocks
from dynaxx.trained.tokens.kernels.cpu import attention as tokens
from dynaxx.trained.tokens.kernels.cpu import decode as token_decode
from dynaxx.trained.tokens.kernels.cpu import indexer

EXTREME = (-(2**63), -(2**62), -(2**31), -1, 2**41, 2**62, 2**63 - 1)
ANY = (*EXTREME, 0, 1, 2, 7, 2**31 - 1, 2**31, 2**32)
INT32 = (-(2**31), -7, -1, 0, 1, 3, 2**31 - 1)
FLOATS = (0.0, 1.0, -1.0, 1e30, -1e30, float("inf"), float("-inf"), float("nan"))
PATTERN = dx.SlidingWindow(30) | dx.Sink(2)


def check(code: int) -> None:
    """Accept only the core's own status codes, and no unnamed failure."""
    assert code in (OK, NO_MEMORY, BAD_INPUT), f"status {code}, FAILED is {FAILED}"


def programs(draw: random.Random) -> None:
    """Build layouts from valid and invalid rules as numbers; take some layouts and free others."""
    program: list[int] = []
    for _ in range(draw.randint(1, 4)):
        op = draw.choice((*range(9), draw.choice(ANY)))
        count = draw.choice((1, 2, 2, 3, 5))
        program += [op, *(draw.choice(ANY) if draw.random() < 0.3 else draw.randint(0, 90) for _ in range(count))]
    if draw.random() < 0.5:  # half of the programs are well formed
        number = draw.choice(ANY)
        program = draw.choice(([0, -5, number], [1, number], [2, 1, 3, number], [3, 1, 3, number], [5, number],
                               [6, number, number], [4, 3, 0, 50, 100], [0, 0, 9, 1, 3, 8, 2]))  # fmt: skip
    grid = [draw.randint(1, 300), draw.randint(1, 300), draw.choice((16, 32, 64)), draw.choice((16, 128)), 1]
    if draw.random() < 0.3:
        grid[draw.randrange(5)] = draw.choice(EXTREME)
    built, sizes = c_void_p(), (c_int64 * 7)()
    numbers = (c_int64 * len(program))(*program)
    library = active_library()
    code = library.dynaxx_cpu_static_layout(numbers, len(program), (c_int64 * 5)(*grid), sizes, byref(built))
    check(code)
    if code == OK:
        room = sum(size + -size % 4 for size in sizes)
        found = torch.empty(room, dtype=torch.int32)
        capacity = draw.choice((room, room, room - 1, 0, -1, -(2**63)))
        check(library.dynaxx_cpu_take_layout(built, found.data_ptr(), capacity))


def plans(draw: random.Random) -> None:
    """Make plans from index ranges with numbers out of range, and from impossible sizes."""
    library, layout = active_library(), PATTERN.layout(draw.randint(1, 200), block_size=16)
    tensors = [x.clone() for x in layout.tensors[:4]]
    for _ in range(draw.randint(0, 3)):
        x = draw.choice(tensors).view(-1)
        if len(x):
            x[draw.randrange(len(x))] = draw.choice(INT32)
    sizes = [1, layout.q_blocks, layout.kv_blocks, len(layout.masks), layout.kv_indices.numel()]
    code = library.dynaxx_cpu_plan_check(*(x.data_ptr() for x in tensors), *sizes)
    check(code)
    order = torch.empty(layout.q_blocks, dtype=torch.int32)
    check(library.dynaxx_cpu_plan_rows(tensors[0].data_ptr(), 1, layout.q_blocks, order.data_ptr()))
    if code == OK:
        counts, ranks = torch.empty(layout.kv_blocks, dtype=torch.int32), torch.empty_like(tensors[2])
        pointers = counts.data_ptr(), ranks.data_ptr()
        check(library.dynaxx_cpu_plan_ranks(*(tensors[i].data_ptr() for i in (0, 2)), 1, *sizes[1:3], *pointers))
    bad = [draw.choice(EXTREME) for _ in range(2)]
    check(library.dynaxx_cpu_plan_check(*(x.data_ptr() for x in tensors), *bad, *sizes[2:]))
    check(library.dynaxx_cpu_plan_rows(tensors[0].data_ptr(), *bad, order.data_ptr()))
    check(library.dynaxx_cpu_plan_masks(layout.masks.bits.data_ptr(), bad[0], 16, bad[1], 0, None, None))


def attention(draw: random.Random) -> None:
    """Draw a forward launch with one field that contradicts the others, and any scale and softcap."""
    library, layout = active_library(), PATTERN.layout(100, block_size=16)
    q, k, v = (torch.randn(1, 100, heads, 16) for heads in (4, 2, 2))
    out, lse = torch.empty(1, 100, 4, 16), torch.empty(1, 4, 100)
    plan = plan_of(layout, library)
    packed = forward_args(q, k, v, out, lse, plan.struct, draw.choice(FLOATS), draw.choice(FLOATS), None)
    fields = list(core_arguments._FORWARD.unpack(packed))
    where = draw.choice((5, 6, 7, 8, 9, 10, 23))  # element, batch, heads, widths, threads
    fields[where] = draw.choice(EXTREME)
    check(library.dynaxx_cpu_forward(core_arguments._FORWARD.pack(*fields)))


def decoding(draw: random.Random) -> None:
    """Draw page tables, lengths, selected pages and budgets out of range, and fields that contradict the others."""
    k, v = torch.randn(12, 16, 2, 16), torch.randn(12, 16, 2, 16)
    table = torch.tensor([[draw.choice((*INT32, *range(12))) for _ in range(6)] for _ in range(2)], dtype=torch.int32)
    used, pad = (torch.tensor([draw.choice((*INT32, 20, 90)) for _ in range(2)], dtype=torch.int32) for _ in range(2))
    plain = torch.tensor([90, 40], dtype=torch.int32)
    cache = dx.summarize_pages(dx.PagedCache(k, v, plain, torch.arange(12, dtype=torch.int32).view(2, 6)))
    cache.seqused_k.copy_(used)
    cache.page_table.copy_(table)
    arguments, kept = decode._cache_args(dx.PagedCache(k, v, used, table, leftpad_k=pad))
    if draw.random() < 0.3:
        name = draw.choice(("stored", "batch", "kv_heads", "max_pages", "page_size", "head_dim", "head_dim_v",
                            "num_pages", "max_keys"))  # fmt: skip
        setattr(arguments, name, draw.choice(EXTREME))
    q = torch.randn(2, 2, 4, 16)
    out, lse = torch.empty(2, 2, 4, 16), torch.empty(2, 4, 2)
    pages = torch.tensor([[[draw.choice(INT32) for _ in range(5)]] * 2] * 2, dtype=torch.int32)
    chosen = torch.empty(2, 2, 3, dtype=torch.int32)
    wanted = torch.tensor([[draw.choice(FLOATS)] * 2] * 2)
    step = decode.DecodeArgs(
        cache=ctypes.pointer(arguments), q=q.data_ptr(), element=0, q_strides=decode.strides(q), seqlen_q=2, q_heads=4,
        pages=draw.choice((None, pages.data_ptr())), slots=5, out=out.data_ptr(), lse=lse.data_ptr(),
        scale=draw.choice(FLOATS), threads=2, softcap=draw.choice((0.0, 1.0)), left=draw.choice(ANY),
    )  # fmt: skip
    summaries = decode._summary_args(arguments, cache.summaries, draw.choice(ANY[4:]))
    summaries.new_tokens, summaries.bound = draw.choice(ANY), draw.choice(FLOATS)
    choice = decode.SelectArgs(
        summaries=ctypes.pointer(summaries), q=q.data_ptr(), element=0, q_strides=decode.strides(q), seqlen_q=2,
        q_heads=4, wanted=wanted.data_ptr(), sinks=draw.choice(ANY), window=draw.choice(ANY), chosen=chosen.data_ptr(),
        slots=3, scale=draw.choice(FLOATS), threads=2,
    )  # fmt: skip
    if draw.random() < 0.2:
        which = draw.choice((step, choice))
        setattr(which, draw.choice(("q_heads", "seqlen_q", "element", "threads", "slots")), draw.choice(EXTREME))
    library = active_library()
    check(library.dynaxx_cpu_decode(byref(step)))
    check(library.dynaxx_cpu_select_pages(byref(choice)))
    check(library.dynaxx_cpu_summarize_pages(byref(summaries)))
    assert kept


def token_lists(draw: random.Random) -> None:
    """Draw chosen tokens out of range, in any order and twice, decreasing lengths, and fields that contradict the
    others.
    """
    library, rows, slots = active_library(), 40, draw.randint(0, 9)
    q, kv = torch.randn(rows, 4, 16), torch.randn(2, 50, 16)
    chosen = torch.tensor([draw.choice((*INT32, *range(50))) for _ in range(rows * 2 * slots)], dtype=torch.int32)
    ends = [torch.tensor([0, draw.choice((5, 60)) if draw.random() < 0.1 else 20, last]) for last in (rows, 50)]
    common = tokens.TokenArgs(
        q=q.data_ptr(), k=kv.data_ptr(), v=kv.data_ptr(), chosen=chosen.data_ptr(), ends_q=ends[0].data_ptr(),
        ends_k=ends[1].data_ptr(), sequences=2, q_heads=4, kv_heads=2, select_heads=draw.choice((1, 2)), head_dim=16,
        head_dim_v=draw.choice((3, 16)), slots=slots, block_size=draw.choice((1, 4, 128)), k_row=16, v_row=16,
        q_strides=(0, 64, 16), scale=draw.choice(FLOATS), softcap=draw.choice((0.0, 1.0)), threads=2,
    )  # fmt: skip
    if draw.random() < 0.3:
        name = draw.choice(("element", "sequences", "q_heads", "kv_heads", "select_heads", "head_dim", "head_dim_v",
                            "slots", "block_size", "k_row", "v_row", "threads"))  # fmt: skip
        setattr(common, name, draw.choice(EXTREME))
    out, lse = torch.empty(rows, 4, 16), torch.zeros(4, rows)
    step = tokens.TokenForwardArgs(common=common, out=out.data_ptr(), lse=lse.data_ptr())
    check(library.dynaxx_cpu_token_forward(byref(step)))
    dq, dk, dv = torch.zeros(rows, 4, 16), torch.zeros(2, 50, 16), torch.zeros(2, 50, 16)
    turns = torch.zeros(2 * rows, dtype=torch.int32)
    back = tokens.TokenBackwardArgs(
        common=common, grad=out.data_ptr(), grad_strides=(0, 64, 16), lse=lse.data_ptr(), delta=lse.data_ptr(),
        dq=dq.data_ptr(), dk=dk.data_ptr(), dv=dv.data_ptr(), d_row=draw.choice((16, 16, 3, *EXTREME)), e_row=16,
        turns=turns.data_ptr(),
    )  # fmt: skip
    check(library.dynaxx_cpu_token_backward(byref(back)))
    limits, found = torch.tensor([draw.choice(INT32) for _ in range(rows)], dtype=torch.int32), (c_int64 * 2)()
    check(library.dynaxx_cpu_token_check(chosen.data_ptr(), rows * 2, slots, limits.data_ptr(), 2, 2, found))
    check(library.dynaxx_cpu_token_check(None, draw.choice(EXTREME), draw.choice(EXTREME), None, 2, 2, found))
    steps(draw)


def steps(draw: random.Random) -> None:
    """Draw a decoding step over chosen tokens, and the choice of an indexer."""
    library = active_library()
    k = torch.randn(12, 16, 2, 16)
    table = torch.tensor([[draw.choice((*INT32, *range(12))) for _ in range(6)] for _ in range(2)], dtype=torch.int32)
    used, pad = (torch.tensor([draw.choice((*INT32, 20, 90)) for _ in range(2)], dtype=torch.int32) for _ in range(2))
    arguments, kept = decode._cache_args(dx.PagedCache(k, k, used, table, leftpad_k=pad))
    q, out, lse = torch.randn(2, 2, 4, 16), torch.empty(2, 2, 4, 16), torch.empty(2, 4, 2)
    chosen = torch.tensor([draw.choice((*INT32, *range(96))) for _ in range(2 * 2 * 2 * 5)], dtype=torch.int32)
    step = token_decode.TokenDecodeArgs(
        cache=ctypes.pointer(arguments), q=q.data_ptr(), element=0, q_strides=decode.strides(q), seqlen_q=2, q_heads=4,
        select_heads=draw.choice((1, 2)), chosen=chosen.data_ptr(), slots=5, block_size=draw.choice((1, 8, 128)),
        out=out.data_ptr(), lse=lse.data_ptr(), scale=draw.choice(FLOATS), softcap=draw.choice((0.0, 1.0)), threads=2,
    )  # fmt: skip
    if draw.random() < 0.2:
        setattr(step, draw.choice(("q_heads", "seqlen_q", "element", "threads", "slots", "select_heads", "block_size")),
                draw.choice(EXTREME))  # fmt: skip
    check(library.dynaxx_cpu_token_decode(byref(step)))
    slots = draw.choice((0, 1, 7, 100))
    best, scores = torch.empty(40, 1, slots, dtype=torch.int32), torch.full((40, 50), draw.choice(FLOATS)).normal_()
    scores[draw.randrange(40), draw.randrange(50)] = draw.choice(FLOATS)
    counts = torch.tensor([draw.choice((*INT32, 50)) for _ in range(40)], dtype=torch.int32)
    check(library.dynaxx_cpu_token_top(scores.data_ptr(), 40, 50, counts.data_ptr(), slots, 2, best.data_ptr()))
    ends = [torch.tensor([0, draw.choice((5, 60)) if draw.random() < 0.1 else 20, last]) for last in (40, 50)]
    keys = torch.randn(50, 16)
    index = indexer.IndexArgs(
        weights=scores.data_ptr(), k=keys.data_ptr(),
        k_scale=draw.choice((None, keys.data_ptr())), ends_q=ends[0].data_ptr(), ends_k=ends[1].data_ptr(), sequences=2,
        heads=4, row=16, slots=slots, block_size=draw.choice((1, 4, 64)), chosen=best.data_ptr(), threads=2,
    )  # fmt: skip
    queries = torch.randn(40, 4, 16)
    index.q = queries.data_ptr()
    if draw.random() < 0.2:
        setattr(
            index, draw.choice(("sequences", "heads", "row", "slots", "block_size", "threads")), draw.choice(EXTREME)
        )
    check(library.dynaxx_cpu_index_tokens(byref(index)))
    _choose_blocks(draw, library)
    assert kept


def _choose_blocks(draw: random.Random, library: ctypes.CDLL) -> None:
    """Choose blocks with any counts and bits, and list them beside those of a pattern with any entries."""
    tokens, lengths = draw.choice((1, 8, 16)), (draw.randrange(70), draw.randrange(1, 70))
    q, k = torch.randn(2, lengths[0], 4, 16), torch.randn(2, lengths[1], 2, 16)
    k[1, draw.randrange(lengths[1])] = draw.choice(FLOATS)
    rows, blocks = -(-lengths[0] // 16), -(-lengths[1] // 32)
    words = -(-blocks // 32)
    bits = lambda *shape: torch.tensor([draw.choice((*INT32, 1, 3)) for _ in range(prod(shape))], dtype=torch.int32)
    counts, optional, chosen = bits(4 * rows), bits(rows, words), bits(2, 4, rows, words)
    args = best_blocks.BestBlocksArgs(
        q=q.data_ptr(), k=k.data_ptr(), counts=counts.data_ptr(), optional=optional.data_ptr(),
        chosen=chosen.data_ptr(), q_strides=(c_int64 * 3)(*q.stride()[:3]), k_strides=(c_int64 * 3)(*k.stride()[:3]),
        batch=2, seqlen_q=lengths[0], seqlen_k=lengths[1], q_heads=4, kv_heads=2, head_dim=16, q_block=16, kv_block=32,
        tile=tokens, causal=draw.random() < 0.5,
        together=draw.random() < 0.5, scale=draw.choice(FLOATS), threads=2,
    )  # fmt: skip
    if draw.random() < 0.2:
        setattr(args, draw.choice(("kv_heads", "kv_block", "tile")), draw.choice((-1, 0, 3, 2**40, -(2**63))))
    check(library.dynaxx_cpu_best_blocks(byref(args)))
    entries = draw.randrange(5)
    pattern_indptr = torch.tensor(sorted(draw.randrange(entries + 1) for _ in range(rows + 1)), dtype=torch.int32)
    indices = torch.tensor([draw.choice((*INT32, 0, 1)) for _ in range(5)], dtype=torch.int32)
    indptr, num_partial = torch.zeros(8, rows + 1, dtype=torch.int32), torch.zeros(8, rows, dtype=torch.int32)
    listed = best_blocks.ListBlocksArgs(
        chosen=chosen.data_ptr(), pattern_indptr=draw.choice((None, pattern_indptr.data_ptr())),
        pattern_indices=indices.data_ptr(), pattern_mask_ids=indices.data_ptr(), indptr=indptr.data_ptr(),
        num_partial=num_partial.data_ptr(), heads=8, rows=rows, blocks=blocks, causal=draw.random() < 0.5,
        q_block=16, kv_block=32, offset=lengths[1] - lengths[0], first_cut=-15, cut_step=16,
    )  # fmt: skip
    if draw.random() < 0.2:
        setattr(listed, draw.choice(("kv_block", "cut_step", "blocks")), draw.choice((-1, 0, 3, -(2**63))))
    if library.dynaxx_cpu_list_blocks(byref(listed), 2) == OK and rows:
        found = torch.empty(2, max(1, int(indptr[-1, -1])), dtype=torch.int32)
        listed.indices, listed.mask_ids, listed.capacity = found[0].data_ptr(), found[1].data_ptr(), found.shape[1]
        check(library.dynaxx_cpu_list_blocks(byref(listed), 2))


def shared(draw: random.Random) -> None:
    """Draw a page table, lengths and a layout, to which another thread keeps writing."""
    library = active_library()
    if not hasattr(library, "dynaxx_test_write"):
        return
    write = library.dynaxx_test_write
    write.argtypes = [c_void_p, c_void_p, c_int64, c_int64]
    k = torch.randn(12, 16, 2, 16)
    table, used = torch.arange(12, dtype=torch.int32).view(2, 6), torch.tensor([90, 40], dtype=torch.int32)
    cache = dx.summarize_pages(dx.PagedCache(k, k, used, table))
    layout = PATTERN.layout(120, block_size=16)
    layout = dx.BlockLayout.from_entries(layout.grid(), *layout.entries(), layout.masks)
    values = torch.tensor([draw.choice((*INT32, 5, 6, 7, 80)) for _ in range(64)], dtype=torch.int32)
    targets = [table, used, *layout.tensors[:4]]
    writers = [
        threading.Thread(target=write, args=(x.data_ptr(), values.data_ptr(), min(x.numel(), 64), 3000))
        for x in targets
    ]
    q, queries = torch.randn(2, 1, 4, 16), torch.randn(1, 120, 2, 16)
    for writer in writers:
        writer.start()
    for _ in range(4):
        wanted = dx.PageBudget(2).wanted(2, torch.device("cpu"))
        decode.attend_pages(q, cache, *decode.select_pages(q, cache, wanted, 1, 1, 4, 0.25), 0.25)
        decode.summarize_pages(cache, cache.summaries, None)
        layout.derived.clear()
        try:
            dx.sparse_attention(queries, queries, queries, layout)
        except (ValueError, RuntimeError, IndexError):  # found out of range and refused
            continue
    for writer in writers:
        writer.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if active_library() is None:
        print("no C++ core")
        return 1
    torch.set_num_threads(2)
    for case in range(asked.cases):
        for kind in (programs, plans, attention, decoding, token_lists):
            draw = random.Random(f"{asked.seed} {case} {kind.__name__}")
            try:
                with cpu.own_threads() if case % 2 else nullcontext():
                    kind(draw)
            except AssertionError as error:
                print(f"case {case} of {kind.__name__}: {error}")
                return 1
        if case % 25 == 0:
            shared(random.Random(f"{asked.seed} {case}"))
    print(f"{asked.cases} cases of extreme numbers: every export returned")
    return 0


if __name__ == "__main__":
    sys.exit(main())
