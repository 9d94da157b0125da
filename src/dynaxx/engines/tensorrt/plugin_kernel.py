# SPDX-License-Identifier: Apache-2.0
"""The attention kernel in the form that TensorRT launches: PTX, compiled ahead of time, without a GPU if need be.

TensorRT passes a plugin's kernel the addresses of its inputs, then 32-bit numbers, then the addresses of its outputs.
The forward kernel gets an entry of that form: tensors are contiguous, and strides follow from the lengths.

Legend: B batch; N queries, M keys; Hq, Hk query and kv heads; D head_dim of q and k, E head_dim of v.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dynaxx.kernels.attention.triton.forward import ALL, _sparse_attention_fwd_kernel
from dynaxx.kernels.device import padded
from dynaxx.kernels.runtime.arguments import LayoutTables, Strides

DTYPES = {"fp32": 4, "fp16": 2, "bf16": 2}  # bytes by Triton's name
SHARED_MEMORY = 48 << 10  # bytes per program that every card gives without being asked
SPAN = 16  # tiles of a head that start in succession

_forward = _sparse_attention_fwd_kernel.kernel


@triton.jit
def dynaxx_sparse_attention(
    p_q,  # inputs: (B, N, Hq, D), (B, M, Hk, D), (B, M, Hk, E), contiguous
    p_k,
    p_v,
    p_indptr,  # inputs: the layout, as `layout_tensors` returns it
    p_num_partial,
    p_indices,
    p_mask_ids,
    p_bits,
    p_bands,
    batch,  # numbers
    seqlen_q,
    seqlen_k,
    q_heads,
    kv_heads,
    capacity,
    num_masks,
    layout_batch,
    layout_heads,
    p_out,  # outputs: (B, N, Hq, E), and (B, Hq, N) fp32
    p_lse,
    SCALE: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,
    MAXIMA: tl.constexpr,
):
    """Run the forward kernel on tensors of these sizes."""
    tables = LayoutTables(p_indptr, p_num_partial, p_indices, p_mask_ids, p_bits, p_bands)
    stride_b = tl.where(layout_batch > 1, layout_heads, 0)
    stride_h = tl.where(layout_heads > 1, 1, 0)
    _forward(
        p_q, p_k, p_v, p_out, p_lse,
        p_indptr,  # no order of rows: not read
        tables, capacity, num_masks, stride_b, stride_h,
        p_indptr, p_lse, p_lse, 0, 0, 1, 1,  # no parts
        seqlen_q, seqlen_k, batch, q_heads, q_heads // kv_heads, SPAN, SCALE, 1.0,
        Strides(seqlen_q.to(tl.int64) * q_heads * D, q_heads * D, D),
        Strides(seqlen_k.to(tl.int64) * kv_heads * D, kv_heads * D, D),
        Strides(seqlen_k.to(tl.int64) * kv_heads * E, kv_heads * E, E),
        None, None,  # no bias
        D, E, BLOCK_D, BLOCK_E, Q_BLOCK, KV_BLOCK, BLOCK_M, BLOCK_N,
        False, False, False, "in turn", False, 1, MAXIMA, "none",
    )  # fmt: skip


TENSORS = ("p_q", "p_k", "p_v", "p_indptr", "p_num_partial", "p_indices", "p_mask_ids", "p_bits", "p_bands")
NUMBERS = (
    "batch", "seqlen_q", "seqlen_k", "q_heads", "kv_heads", "capacity", "num_masks", "layout_batch", "layout_heads",
)  # fmt: skip
OUTPUTS = ("p_out", "p_lse")


class PluginKernel(NamedTuple):
    """A compiled kernel."""

    name: str
    ptx: str
    threads: int  # per program
    shared_memory: int  # bytes per program
    tiles: int  # programs per block of queries


class KernelShape(NamedTuple):
    """The shape that a kernel is compiled for; lengths, batch and heads are free."""

    dtype: str  # of `DTYPES`
    head_dim: int
    head_dim_v: int
    block_size: tuple[int, int]
    scale: float  # > 0
    capability: int  # of the card: 80, 89, 90, ...


@lru_cache(maxsize=64)
def compile_kernel(shape: KernelShape) -> PluginKernel:
    """Compile the kernel to PTX.

    Raises:
        ValueError: a dtype, scale or size that the kernel does not serve.
    """
    if shape.dtype not in DTYPES or shape.scale <= 0:
        raise ValueError(f"`dtype` must be of {', '.join(DTYPES)} and `scale` > 0, got {shape.dtype}, {shape.scale}")
    for block_m, block_n, stages in _tiles(shape):
        compiled = _compile(shape, block_m, block_n, stages)
        if compiled.metadata.shared <= SHARED_MEMORY:
            return PluginKernel(
                compiled.metadata.name,
                without_scratch(compiled.asm["ptx"]),
                compiled.metadata.num_warps * 32,
                compiled.metadata.shared,
                shape.block_size[0] // block_m,
            )
    raise ValueError(f"no tile of head_dim {shape.head_dim} and {shape.head_dim_v} fits into {SHARED_MEMORY} bytes")


def without_scratch(ptx: str) -> str:
    """Remove the parameters for scratch memory, which Triton appends and TensorRT does not pass.

    Raises:
        ValueError: the kernel reads one of them.
    """
    head = re.search(r"\.entry\s+(\w+)\s*\((.*?)\)", ptx, flags=re.DOTALL)
    assert head is not None, "Triton's PTX has an entry"
    params = [each.strip() for each in head[2].split(",")]
    kept, extra = params[: len(TENSORS + NUMBERS + OUTPUTS)], params[len(TENSORS + NUMBERS + OUTPUTS) :]
    for each in extra:
        name = each.split()[-1]
        if len(re.findall(rf"\b{re.escape(name)}\b", ptx)) > 1:
            raise ValueError(f"the kernel reads {name}, scratch memory that TensorRT does not pass")
    return ptx[: head.start(2)] + "\n\t" + ",\n\t".join(kept) + "\n" + ptx[head.end(2) :]


def _tiles(shape: KernelShape) -> list[tuple[int, int, int]]:
    """Return sizes of tiles to try, the fastest first: queries, keys, stages."""
    q_block, kv_block = shape.block_size
    wide = max(padded(shape.head_dim), padded(shape.head_dim_v))
    if shape.dtype == "fp32":  # no matrix unit computes exact fp32
        sizes = [(32 if wide <= 64 else 16, 32, 1), (16, 16, 1)]
    else:
        sizes = [(64, 64, 2), (64, 64, 1), (64, 32, 1), (32, 32, 1), (16, 32, 1)]
    found = [(min(rows, q_block), min(keys, max(kv_block, 64)), stages) for rows, keys, stages in sizes]
    return list(dict.fromkeys(found))


def _compile(shape: KernelShape, block_m: int, block_n: int, stages: int) -> Any:
    names = [*TENSORS, *NUMBERS, *OUTPUTS]
    data, tables = f"*{shape.dtype}", "*i32"
    types = dict.fromkeys(TENSORS, tables) | dict.fromkeys(NUMBERS, "i32")
    types |= dict.fromkeys(("p_q", "p_k", "p_v", "p_out"), data) | {"p_lse": "*fp32"}
    constants = {
        "SCALE": float(shape.scale),
        "D": shape.head_dim,
        "E": shape.head_dim_v,
        "BLOCK_D": padded(shape.head_dim),
        "BLOCK_E": padded(shape.head_dim_v),
        "Q_BLOCK": shape.block_size[0],
        "KV_BLOCK": shape.block_size[1],
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "SPAN": SPAN,
        "MAXIMA": ALL.value,
    }
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in names if types[name].startswith("*")}
    signature = {name: types[name] for name in names} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(dynaxx_sparse_attention, signature, constants, aligned)
    options = {"num_warps": 4, "num_stages": stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", shape.capability, 32), options=options)
