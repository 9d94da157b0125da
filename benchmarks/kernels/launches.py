# SPDX-License-Identifier: Apache-2.0
"""Time the host's part of a layer under a rule: not replayed, a launch list, and a CUDA graph.

    python benchmarks/kernels/launches.py [--tokens 512] [--json FILE]

SmolLM2-135M's shape, bf16, one thread. The results of the ways are compared bit by bit. A graph has the same kernels in
a chain; the parameters of its nodes are set before each launch. Rows that begin with C time the driver alone.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import struct
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from host_time import host_us
from torch import Tensor

import dynaxx as dx
from dynaxx.kernels.runtime import launch_cache, launch_list
from dynaxx.kernels.runtime.recorder import Recording
from dynaxx.lab.machine import need_gpu
from dynaxx.ops.prepared import layer

RULE = dx.SlidingWindow(256) | dx.Sink(64) | dx.TopK(0.1)
ROUNDS = 300
in_queue = partial(host_us, count=60, rounds=15)  # so few calls that the GPU's queue of launches never fills


def make_call(tokens: int) -> tuple[layer.Prepared, tuple[Tensor, Tensor, Tensor], list[tuple[Any, ...]]]:
    """Record the call of a layer; return it, its tensors, and the arguments of its launch list."""
    heads = (9, 3, 3)
    q, k, v = (torch.randn(1, h, tokens, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for h in heads)
    layout = dx.select_blocks(q, k, RULE, block_size=64)
    dx.sparse_attention(q, k, v, layout)
    made: list[tuple[Any, ...]] = []
    code, code_of = launch_list._code(), launch_list._code
    if code is None:
        raise SystemExit("error: launch lists are off here; they need Triton 3.6, a C compiler and CUDA 12.4")

    class Kept:
        @staticmethod
        def LaunchList(driver: Any, *given: Any) -> Any:
            made.append(given)
            return code.LaunchList(driver, *given)

    launch_list._code = lambda: Kept
    try:
        call = layer.prepare_rule(RULE, layout, q, k, v)
        assert call is not None, "the rule is served"
        launch_cache.recordings.clear()
        call(q, k, v)
    finally:
        launch_list._code = code_of
    call(q, k, v)
    return call, (q, k, v), made


def filled(given: tuple[Any, ...], addresses: list[int]) -> bytes:
    """Return packed parameters with addresses in their gaps."""
    _, _, packed, pointers, maps, _ = given
    found = bytearray(packed)
    library = ctypes.CDLL("libcuda.so.1")
    library.cuTensorMapReplaceAddress.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    memory = ctypes.create_string_buffer(256)
    aligned = ctypes.addressof(memory) + -ctypes.addressof(memory) % 128
    for at, number, offset in pointers:
        struct.pack_into("=Q", found, at, addresses[number] + offset)
    for at, number, offset in maps:
        ctypes.memmove(aligned, bytes(found[at : at + 128]), 128)
        if library.cuTensorMapReplaceAddress(aligned, addresses[number] + offset):
            raise SystemExit("error: a tensor map refused its address")
        found[at : at + 128] = ctypes.string_at(aligned, 128)
    return bytes(found)


@torch.inference_mode()
def measure(tokens: int) -> dict[str, float]:
    """Return the microseconds of each way."""
    from triton.backends.nvidia import driver
    from triton.runtime.build import compile_module_from_src

    call, first, made = make_call(tokens)
    q, k, v = first
    turned = tuple(x.transpose(1, 2) for x in (q, k, v))
    again = call.replay(*turned)
    assert again is not None, "the call was replayed"
    start, seen = Recording.start, []

    def see(self: Recording, addresses: list[int], index: int, sizes: list[int]) -> Any:
        out = start(self, addresses, index, sizes)
        seen.append(addresses)
        return out

    Recording.start = see  # type: ignore[method-assign]
    out = again(*turned, None)
    Recording.start = start  # type: ignore[method-assign]
    assert out is not None, "the tensors are those of the call"
    recording, stream = again.recording, torch.cuda.current_stream().cuda_stream
    found = {"SDPA": in_queue(lambda: sdpa(*turned))}
    Recording.start = lambda *given: None  # type: ignore[assignment, method-assign]
    equal = torch.equal(call(q, k, v), out)
    found["layer, not replayed"] = in_queue(lambda: call(q, k, v))
    Recording.start = start  # type: ignore[method-assign]
    code_of_lists = launch_list.compiled_code()
    code_of_lists.use_graphs(False)
    found["layer, launch list kernel by kernel"] = in_queue(lambda: call(q, k, v))
    code_of_lists.use_graphs(True)
    found["layer, launch list as a graph"] = in_queue(lambda: call(q, k, v))
    found["layer from addresses, as a graph"] = in_queue(lambda: again(*turned, None))
    for seed in range(3):
        q, k, v = (torch.randn_like(x) for x in (q, k, v))
        code_of_lists.use_graphs(seed == 1)
        outs = [call(q, k, v)]
        code_of_lists.use_graphs(seed != 1)
        outs.append(call(q, k, v))
        equal = equal and torch.equal(*outs)
    q, k, v = first
    code_of_lists.use_graphs(True)
    scratch = torch.empty(max(recording.scratch, 1), dtype=torch.uint8, device="cuda")
    other = torch.zeros_like(out)
    addresses = [*seen[0][:-2], other.data_ptr(), scratch.data_ptr()]
    assert recording.launches is not None, "it was replayed"
    list_of = recording.launches
    code_of_lists.use_graphs(False)
    found["the list alone, kernel by kernel"] = in_queue(lambda: list_of.run(stream, addresses, []))
    code_of_lists.use_graphs(True)
    found["the list alone, as a graph"] = in_queue(lambda: list_of.run(stream, addresses, []))
    equal = equal and torch.equal(other, out)
    source = Path(__file__).with_suffix(".c").read_text(encoding="utf-8")
    code = compile_module_from_src(source, "launches", [], driver.include_dirs, [])
    other.zero_()
    torch.cuda.synchronize()
    launches, positions = made[-1][:2]
    ready, times, rows = code.bench(stream, launches, positions, filled(made[-1], addresses), ROUNDS)
    torch.cuda.synchronize()
    if not (equal and torch.equal(other, out)):
        raise SystemExit("error: the ways differ")
    names = ("launches", "graph", "parameters of the graph set", "graph after that", "one launch")
    found |= {f"C, {name}": median(values) for name, values in zip(names, times, strict=True)}
    names = ("launches", "graph", "graph with parameters set")
    found |= {f"C, 100 in a row, {name}": us for name, us in zip(names, rows, strict=True)}
    return {**found, "C, graph instantiated once": ready}


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention as transformers calls it."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--json", type=Path, help="write the times to this file")
    given = parser.parse_args()
    need_gpu()
    torch.set_num_threads(1)
    times = measure(given.tokens)
    print(torch.cuda.get_device_name())
    for name, us in times.items():
        print(f"{name:42}{us:8.2f} us", flush=True)
    if given.json:
        facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "host_us": times}
        given.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
