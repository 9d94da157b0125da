# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of the code that Triton compiles from the kernels for sm_90; needs no GPU.

Moving or renaming code does not change fingerprints. After a change that is meant to alter kernels, record the
fingerprints of the installed Triton again, and say so in the commit:

    PYTHONPATH=src:tests/support python tests/kernels/fingerprints.py [--machine-code] [CASE ...]

`fingerprints.json` has, for each version of Triton and each case, one line per compiled variant of each launched
kernel: the number of lines of its intermediate code, or of instructions of its machine code, and a hash of them. Names,
labels and debug information are excluded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton import knobs

from compiled import compiling
from dynaxx.kernels.attention.contract import SavedForward
from dynaxx.kernels.runtime.launcher import recording_launches
from dynaxx.layout import BlockGrid
from dynaxx.layout.paging import PagedCache
from dynaxx.ops.decode import summarize_pages
from dynaxx.patterns import GlobalTokens, SlidingWindow
from dynaxx.trained.nsa.spans import NsaSizes, nsa_spans

FILE = Path(__file__).with_suffix(".json")
VERSION = ".".join(triton.__version__.split(".")[:2])
TOKENS = 512


def attention(
    backend: str, head_dim: int, block: int, *, heads: tuple[int, int] = (8, 2), dtype: torch.dtype = torch.bfloat16,
    softcap: float | None = None, backward: bool = False, one_pass: bool | None = None, split: bool = False,
    tokens: int = TOKENS,
) -> None:  # fmt: skip
    """Run forward or backward of a sliding window; `split` adds global tokens, whose columns are split into parts."""
    if backend == "hopper":
        from dynaxx.kernels.attention.hopper import backward as backward_of
        from dynaxx.kernels.attention.hopper import backward_dkv
        from dynaxx.kernels.attention.hopper.forward import attention_forward
    else:
        from dynaxx.kernels.attention.triton import backward as backward_of
        from dynaxx.kernels.attention.triton.forward import attention_forward
    pattern = SlidingWindow(300) | GlobalTokens(8) if split else SlidingWindow(300)
    layout = pattern.layout(tokens, block_size=block, device="cpu")
    q, k = (torch.zeros(1, tokens, count, head_dim, dtype=dtype) for count in heads)
    if not backward:
        attention_forward(q, k, k, layout, 0.1, softcap)
        return
    with pytest.MonkeyPatch.context() as patch:
        if backend == "hopper":  # two pieces of a group, whose dk and dv are summed
            patch.setattr(backward_dkv, "backward_pieces", lambda columns: 1 if split else 2)
        if one_pass is not None:
            patch.setattr(backward_of, "backward_in_one_pass", lambda *sizes: one_pass)
        lse = torch.zeros(1, heads[0], tokens)
        backward_of.attention_backward(q, None, q, k, k, q, lse, layout, 0.1, softcap)


def selected(
    backend: str, group: int, *, head_dim: int = 64, slots: int = 6, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Run selected attention, forward and backward."""
    if backend == "hopper":
        from dynaxx.trained.nsa.kernels.hopper import operators
    else:
        from dynaxx.trained.nsa.kernels.triton import operators
    spans = nsa_spans(NsaSizes(64, 64, 64, slots, 0, 0), (0, TOKENS))
    q, k = (torch.zeros(TOKENS, count, head_dim, dtype=dtype) for count in (2 * group, 2))
    rows, indices = torch.zeros(2 * group, TOKENS), torch.zeros(TOKENS, 2, slots, dtype=torch.int32)
    plan = operators.prepare_selected(indices, spans, q, k, k)
    operators.selected_forward(q, k, k, plan, 0.1)
    operators.selected_backward(q, rows, SavedForward(q, k, k, q, rows), plan, 0.1)


def tokens(backend: str, group: int, dims: tuple[int, int], grain: int, *, kv_heads: int = 2) -> None:
    """Run attention over chosen tokens, forward and backward; narrower values are the first part of the keys."""
    if backend == "hopper":
        from dynaxx.trained.tokens.kernels.hopper import operators
    else:
        from dynaxx.trained.tokens.kernels.triton import operators
    from dynaxx.trained.tokens.spans import TokenSpans

    zeros = lambda heads, width: torch.zeros(64, heads, width, dtype=torch.bfloat16)
    q, k = zeros(kv_heads * group, dims[0]), zeros(kv_heads, dims[0])
    v = k[..., : dims[1]] if dims[1] < dims[0] else zeros(kv_heads, dims[1])
    lse, chosen = torch.zeros(kv_heads * group, 64), torch.zeros(64, kv_heads, 32, dtype=torch.int32)
    plan = operators.prepare(chosen, TokenSpans((0, 64), (0, 64), grain), q, k, v)
    out, _ = operators.forward(q, k, v, plan, 0.1)
    backward = operators.latent_backward if dims[1] < dims[0] else operators.backward
    backward(out, lse, SavedForward(q, k, v, out, lse), plan, 0.1)


def token_decode(heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype) -> None:
    """Run a decoding step over chosen tokens of a paged cache; narrower values are a view of the keys."""
    from dynaxx.trained.tokens.kernels.triton import step

    k = torch.zeros(16, 64, heads[1], dims[0]).to(dtype)
    v = k[..., : dims[1]] if dims[1] < dims[0] else torch.zeros_like(k)
    scale = torch.ones(heads[1]) if dtype.itemsize == 1 else None
    table = torch.arange(16, dtype=torch.int32).view(2, 8)
    cache = PagedCache(k, v, torch.full((2,), 500, dtype=torch.int32), table, k_scale=scale, v_scale=scale)
    q = torch.zeros(2, 1, heads[0], dims[0], dtype=torch.bfloat16)
    step.attend_tokens(q, cache, torch.zeros(2, 1, 1, 256, dtype=torch.int32), 1, 0.1)


def indexer(backend: str, heads: int, dim: int, dtype: torch.dtype, grain: int = 1) -> None:
    """Run the indexer: streaming, and with scores in memory for a few queries."""
    if backend == "hopper":
        from dynaxx.trained.tokens.kernels.hopper import choose
    else:
        from dynaxx.trained.tokens.kernels.triton import choose
    from dynaxx.trained.tokens.spans import TokenSpans

    for queries in (TOKENS, 8):
        q, k = torch.zeros(queries, heads, dim).to(dtype), torch.zeros(TOKENS, dim).to(dtype)
        scale = torch.ones(TOKENS) if dtype in (torch.float32, torch.float8_e4m3fn, torch.int8) else None
        spans = TokenSpans((0, queries), (0, TOKENS), grain)
        choose.index_tokens(q, k, torch.zeros(queries, heads), scale, spans, 64)


def index_loss(heads: tuple[int, int, int], index_heads: int, index_dim: int, dtype: torch.dtype) -> None:
    """Run the loss of an indexer and its gradients, over all keys and over chosen ones."""
    from dynaxx.trained.tokens.kernels.contract import IndexLossCall
    from dynaxx.trained.tokens.kernels.triton.index_loss import index_loss
    from dynaxx.trained.tokens.spans import TokenSpans

    q, k = (torch.zeros(TOKENS, count, heads[2], dtype=dtype) for count in heads[:2])
    index_q, index_k = (
        torch.zeros(TOKENS, index_heads, index_dim, dtype=dtype),
        torch.zeros(TOKENS, index_dim).to(dtype),
    )
    spans, blocks = TokenSpans((0, TOKENS), (0, TOKENS)), torch.zeros(TOKENS, 64, dtype=torch.int32)
    for chosen in (None, blocks):
        weights = torch.zeros(TOKENS, index_heads)
        index_loss(IndexLossCall(index_q, index_k, weights, q, k, chosen, spans, 0.1, 0.1, True))


def rows_in_8_bits(dtype: torch.dtype) -> None:
    """Round rows to fp8, or to whole numbers in bf16."""
    from dynaxx.trained.tokens.kernels.gpu.rounding import round_rows

    round_rows(torch.zeros(TOKENS, 100, dtype=torch.bfloat16), dtype)


def nsa_selection(backend: str, sizes: tuple[int, int, int]) -> None:
    """Run block scores, selection of blocks, pooling and the gated sum of native sparse attention."""
    if backend == "hopper":
        from dynaxx.trained.nsa.kernels.hopper import operators
    else:
        from dynaxx.trained.nsa.kernels.triton import operators
    spans = nsa_spans(NsaSizes(*sizes), (0, TOKENS))
    q = torch.zeros(TOKENS, 16, 128, dtype=torch.bfloat16)
    pooled, lse = q[: spans.ends_cmp[-1], :1].contiguous(), torch.zeros(16, TOKENS)
    operators.select_blocks(q, pooled, lse, spans, 1, 0.1)
    if backend == "hopper":
        return
    operators.select_blocks(q, pooled, None, spans, 1, 0.1)
    weight, gates = torch.zeros(sizes[0], 16), torch.zeros(TOKENS, 16, 3)
    operators.pooling.pool_forward(q, weight, spans)
    operators.pooling.pool_backward(torch.zeros(len(pooled), 16, 128, dtype=q.dtype), q, weight, spans)
    operators.gating.gated_sum_forward((q, q, q), gates)
    operators.gating.gated_sum_backward(q, (q, q, q), gates)


def nsa_backward() -> None:
    """Run the row kernels of the Hopper backward of native sparse attention, over all branches."""
    from dynaxx.trained.nsa.kernels.hopper import operators

    spans = nsa_spans(NsaSizes(64, 64, 64, 6, 0, 0), (0, TOKENS))
    q, k = (torch.zeros(TOKENS, count, 128, dtype=torch.bfloat16) for count in (16, 1))
    lse, gates = torch.zeros(16, TOKENS), torch.zeros(TOKENS, 16, 3)
    plan = operators.prepare_selected(torch.zeros(TOKENS, 1, 6, dtype=torch.int32), spans, q, k, k)
    layout = SlidingWindow(300).layout(TOKENS, block_size=64, device="cpu")
    operators.fused.branch_rows(q, operators.fused.Branches(q, q, q, lse, lse, lse), gates, plan, layout)


def decode(cache_dtype: torch.dtype, *, choose: bool = False, paged: bool = True, head_dim: int = 64) -> None:
    """Run a decode step of 4 sequences over pages of 16 tokens: all pages, or selected ones."""
    from dynaxx.kernels.decode.triton import launch

    k = torch.zeros(*((64, 16) if paged else (4, 256)), 2, head_dim).to(cache_dtype)
    used = torch.full((4,), 200, dtype=torch.int32)
    table = torch.arange(64, dtype=torch.int32).view(4, 16) if paged else None
    scales = {}
    if cache_dtype.itemsize == 1:
        scale = torch.ones(*((64, 2) if paged else (4, 16, 2)))
        scales = {"k_scale": scale, "v_scale": scale}
    cache = PagedCache(k, k, used, table, 16, **scales)
    q = torch.zeros(4, 1, 8, head_dim, dtype=torch.bfloat16)
    if not choose:
        launch.attend_pages(q, cache, None, None, 0.1)
        launch.attend_pages(q, cache, torch.zeros(4, 2, 5, dtype=torch.int32), None, 0.1)
        return
    cache = summarize_pages(cache, backend="reference")
    launch.summarize_pages(cache, cache.summaries, None)
    if paged:
        launch.summarize_layers(cache, torch.zeros(3, 5, dtype=torch.int64), 40)
    wanted = torch.full((2,), 0.25)
    launch.select_pages(q, cache, wanted, 1, 16, 6, 0.1)
    launch.select_and_attend(q, cache, wanted, 1, 16, 6, 0.1)


def selection(scorer: str, head_dim: int = 64) -> None:
    """Run the scores of blocks and the selection among them."""
    from dynaxx.kernels.selection.triton import pool, query_scores
    from dynaxx.patterns import Sink
    from dynaxx.selection import TopK, TopP
    from dynaxx.selection.device import select_on_device

    q, k = (torch.zeros(1, TOKENS, heads, head_dim, dtype=torch.bfloat16) for heads in (4, 2))
    grid = BlockGrid(TOKENS, TOKENS, (64, 64), True)
    queries = torch.zeros(1, 4, grid.q_blocks, head_dim)
    if scorer == "query":
        query_scores.query_scores(queries.to(k.dtype), k, 0, grid)
    elif scorer == "query in pages":
        places = torch.zeros(grid.kv_blocks, dtype=torch.int32)
        query_scores.query_scores(queries.to(k.dtype), k, 0, grid, places=places)
    elif scorer == "pool":
        pool.pool_blocks(k, 64, "mean")
        pool.pool_blocks(k, 64, "largest")
    else:
        zeros = lambda start, stop: torch.zeros(1, 4, stop - start, grid.kv_blocks)
        for rule in (TopK(0.2, floor=2), TopP(0.8)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(type(rule.scorer), "prepare", lambda *given, **budget: zeros)
                select_on_device(q, k, Sink(16), rule, grid, 0.1, 1 << 20)


def hopper_scores(head_dim: int, block: int, *, placed: bool = False) -> None:
    """Run the scores of blocks by one query per row."""
    from dynaxx.kernels.selection.hopper.query_scores import query_scores

    grid = BlockGrid(TOKENS, TOKENS, (block, block), True)
    queries = torch.zeros(1, 4, grid.q_blocks, head_dim, dtype=torch.bfloat16)
    k = torch.zeros(1, TOKENS, 2, head_dim, dtype=torch.bfloat16)
    query_scores(queries, k, 0, grid, torch.zeros(grid.kv_blocks, dtype=torch.int32) if placed else None)


def merge() -> None:
    """Run the merge of two results."""
    from dynaxx.kernels.primitives.merge import merge_into

    out, other = (torch.zeros(1, TOKENS, 4, 128, dtype=torch.bfloat16) for _ in range(2))
    lse, other_lse = (torch.zeros(1, 4, TOKENS) for _ in range(2))
    merge_into(out, lse, other, other_lse, SlidingWindow(300).layout(TOKENS, device="cpu"))


CASES: dict[str, Callable[[], None]] = {}


def add(name: str, case: Callable[..., None], *given: object, **named: object) -> None:
    """Add a case by its name; names of Hopper cases begin with `hopper`."""
    CASES[name] = lambda: case(*given, **named)


for head_dim in (64, 128, 256):
    for block in (64, 128):
        add(f"triton forward {head_dim}/{block}", attention, "triton", head_dim, block)
        add(f"hopper forward {head_dim}/{block}", attention, "hopper", head_dim, block)
        add(f"triton backward {head_dim}/{block}", attention, "triton", head_dim, block, backward=True)
    add(
        f"hopper backward {head_dim}/128 in two passes",
        attention,
        "hopper",
        head_dim,
        128,
        backward=True,
        one_pass=False,
    )
    add(f"hopper forward {head_dim}/128 softcap", attention, "hopper", head_dim, 128, softcap=50.0)
    add(f"hopper forward {head_dim}/64 of 3 heads", attention, "hopper", head_dim, 64, heads=(3, 1))
for backend in ("triton", "hopper"):
    add(f"{backend} forward 128/64 split", attention, backend, 128, 64, split=True, tokens=4096)
    add(f"{backend} backward 128/64 split", attention, backend, 128, 64, split=True, tokens=4096, backward=True)
    add(f"{backend} backward 128/128 softcap", attention, backend, 128, 128, softcap=50.0, backward=True)
    for group in (1, 4, 16):
        add(f"{backend} selected {group}", selected, backend, group)
    add(f"{backend} nsa selection 32/16/64", nsa_selection, backend, (32, 16, 64))
    add(f"{backend} nsa selection 16/16/16", nsa_selection, backend, (16, 16, 16))
for head_dim in (64, 80, 128):
    add(f"hopper backward {head_dim}/128 in one pass", attention, "hopper", head_dim, 128, backward=True, one_pass=True)
add("hopper forward 128/128 fp16", attention, "hopper", 128, 128, dtype=torch.float16)
add("hopper nsa rows", nsa_backward)
add("triton forward 512/128", attention, "triton", 512, 128, heads=(8, 1))
add("triton forward 64/32", attention, "triton", 64, 32)
add("triton forward 40/64 fp32", attention, "triton", 40, 64, dtype=torch.float32, heads=(3, 1))
add("triton backward 40/64 fp32", attention, "triton", 40, 64, dtype=torch.float32, heads=(3, 1), backward=True)
add("triton forward 64/128 softcap", attention, "triton", 64, 128, softcap=50.0)
add("triton tokens 4 of 128", tokens, "triton", 4, (128, 128), 1)
add("triton tokens 16 of 576", tokens, "triton", 16, (576, 512), 4)
add("triton tokens 128 of 576", tokens, "triton", 128, (576, 512), 1, kv_heads=1)
add("hopper tokens 128 of 576", tokens, "hopper", 128, (576, 512), 1, kv_heads=1)
add("hopper scores 64/64", hopper_scores, 64, 64)
add("hopper scores 128/128 in pages", hopper_scores, 128, 128, placed=True)
add("triton token decode 16 of 576", token_decode, (16, 1), (576, 512), torch.bfloat16)
add("triton token decode int8", token_decode, (8, 2), (64, 64), torch.int8)
add("triton merge of two results", merge)
add("triton indexer 4 of 64", indexer, "triton", 4, 64, torch.bfloat16)
add("triton indexer 16 of 128 in 8 bits", indexer, "triton", 16, 128, torch.float32, 4)
add("hopper indexer 4 of 64", indexer, "hopper", 4, 64, torch.bfloat16)
add("hopper tokens 4 of 128", tokens, "hopper", 4, (128, 128), 1)
add("hopper indexer 2 of 32 in 8 bits", indexer, "hopper", 2, 32, torch.int8)
add("triton index loss 4 of 32", index_loss, (8, 2, 64), 4, 32, torch.bfloat16)
add("triton index loss 16 of 128 beside 576", index_loss, (16, 1, 576), 16, 128, torch.bfloat16)
add("triton index loss 2 of 64 in fp32", index_loss, (4, 2, 128), 2, 64, torch.float32)
add("triton rows in fp8", rows_in_8_bits, torch.float8_e4m3fn)
add("triton rows in int8", rows_in_8_bits, torch.bfloat16)
add("hopper indexer 64 of 128 in fp8", indexer, "hopper", 64, 128, torch.float8_e4m3fn)
add("triton decode bf16", decode, torch.bfloat16)
add("triton decode bf16, contiguous", decode, torch.bfloat16, paged=False)
add("triton decode int8", decode, torch.int8)
add("triton decode chosen pages", decode, torch.bfloat16, choose=True)
for scorer in ("query", "query in pages", "pool", "choice"):
    add(f"triton selection {scorer}", selection, scorer)


def machine_code(case: Callable[[], None]) -> list[str]:
    """Compile all kernels that a case launches, each variant once, in order; return "instructions hash" for each."""
    return _each_form(case, lambda compiled: of_code(compiled.asm["cubin"]))


def intermediate(case: Callable[[], None]) -> list[str]:
    """Return a hash of the intermediate code of each variant of a kernel; much faster than `machine_code`.

    With the same Triton, equal hashes imply equal machine code.
    """

    def stop(module: Any, metadata: dict[str, Any]) -> None:
        text = re.sub(r'#loc.*|loc\(.*?\)|@"[^"]*"|@\w+', "", str(module))
        text = _numbered("\n".join(line.strip() for line in text.splitlines() if line.strip()))
        chosen = {name: metadata.get(name) for name in ("num_warps", "num_stages", "maxnreg")}
        raise _StoppedError(f"{len(text.splitlines())} {hashlib.sha256(f'{text}{chosen}'.encode()).hexdigest()[:16]}")

    def stop_early(*given: Any) -> tuple[str, str] | None:
        if given:
            _, stages, _, language, _ = given
            stages["ttgir" if "GLUON" not in str(language) else "llir"] = stop
        return ("stopped", "stopped")

    with knobs.runtime.scope():
        knobs.runtime.add_stages_inspection_hook = stop_early
        return _each_form(case, lambda compiled: "", stopped=True)


def _numbered(text: str) -> str:
    """Replace the names of values, which Triton takes from the source, by numbers in order of appearance."""
    numbers: dict[str, str] = {}
    return re.sub(r"%[\w.$-]+", lambda found: numbers.setdefault(found[0], f"%{len(numbers)}"), text)


class _StoppedError(Exception):
    """Carries the fingerprint out of Triton's compiler."""


def _each_form(case: Callable[[], None], of: Callable[[Any], str], stopped: bool = False) -> list[str]:
    found: list[str] = []

    def compile_only(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        patch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
        try:
            fingerprint = of(kernel.warmup(*arguments, grid=grid, **named))
            assert not stopped, "Triton did not ask the hook"
        except _StoppedError as done:
            fingerprint = str(done)
        if fingerprint not in found:
            found.append(fingerprint)

    with compiling(compile_only) as patch, recording_launches():
        case()
    return found


def of_code(cubin: bytes) -> str:
    """Return the number of a kernel's instructions and a hash of them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    instructions = re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(.*?;)", text)
    assert instructions, text[:2000]
    named = re.compile(r"`\(.*?\)")
    code = "\n".join(named.sub("", each) for each in instructions)
    return f"{len(instructions)} {hashlib.sha256(code.encode()).hexdigest()[:16]}"


def main() -> None:
    """Record the fingerprints of the installed Triton, for the named cases or for all."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--machine-code", action="store_true", help="also compile to the end, ten times as slow")
    parser.add_argument("cases", nargs="*", metavar="case", help=", ".join(CASES))
    given = parser.parse_args()
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    of_version = known.setdefault(VERSION, {})
    for name in CASES:
        if name in (given.cases or CASES):
            of_version.setdefault("intermediate", {})[name] = intermediate(CASES[name])
            if given.machine_code:
                of_version.setdefault("machine code", {})[name] = machine_code(CASES[name])
            print(name, *of_version["intermediate"][name], sep="\n  ", flush=True)
            FILE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
