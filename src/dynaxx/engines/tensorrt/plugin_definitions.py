# SPDX-License-Identifier: Apache-2.0
"""Definitions that TensorRT registers: the plugins' shapes, the kernel that it launches, and the call of Python.

This module imports TensorRT; only `plugin.register_plugins` imports it. TensorRT checks the annotations of these
functions as it registers them, so this file must not turn annotations into text.
"""

from collections.abc import Sequence
from typing import Any

import tensorrt as trt
import tensorrt.plugin as trtp
import torch
from tensorrt.plugin import KernelLaunchParams, SymIntExprs
from tensorrt.plugin import Tensor as Data
from tensorrt.plugin import TensorDesc as Desc
from torch import Tensor

from dynaxx.engines.tensorrt.plugin_kernel import KernelShape, compile_kernel
from dynaxx.engines.tensorrt.plugin_policy import LAYOUT_INPUTS, attend_by_policy
from dynaxx.kernels.device import gpu_of

NAMESPACE = "dynaxx"
ATTENTION = f"{NAMESPACE}::sparse_attention"
BY_POLICY = f"{NAMESPACE}::policy_attention"
DTYPES = {trt.float32: "fp32", trt.float16: "fp16", trt.bfloat16: "bf16"}
OF_TORCH = {trt.float32: torch.float32, trt.float16: torch.float16, trt.bfloat16: torch.bfloat16}


@trtp.register(ATTENTION)  # type: ignore[untyped-decorator]
def attention_shapes(
    q: Desc, k: Desc, v: Desc,
    kv_indptr: Desc, kv_num_partial: Desc, kv_indices: Desc, kv_masks: Desc, mask_bits: Desc, mask_bands: Desc,
    scale: float, q_block: int, kv_block: int, capability: int,
) -> tuple[Desc, Desc]:  # fmt: skip
    """Return the descriptors of out and lse."""
    tables = (kv_indptr, kv_num_partial, kv_indices, kv_masks, mask_bits, mask_bands)
    out = _out_of(ATTENTION, q, k, v)
    for table, name in zip(tables, LAYOUT_INPUTS, strict=True):
        if table.dtype != trt.int32:
            raise ValueError(f"{ATTENTION}: `{name}` must be int32, as `layout_tensors` makes it, got {table.dtype}")
    batch, seqlen_q, q_heads = (q.shape_expr[i] for i in range(3))
    return out, trtp.from_shape_expr((batch, q_heads, seqlen_q), trt.float32)


@trtp.aot_impl(ATTENTION)  # type: ignore[untyped-decorator]
def attention_kernel(
    q: Desc, k: Desc, v: Desc,
    kv_indptr: Desc, kv_num_partial: Desc, kv_indices: Desc, kv_masks: Desc, mask_bits: Desc, mask_bands: Desc,
    scale: float, q_block: int, kv_block: int, capability: int, outputs: tuple[Desc], tactic: int,
) -> tuple[str, str, KernelLaunchParams, SymIntExprs]:  # fmt: skip
    """Return the kernel's name and PTX, its launch, and the numbers between its inputs and outputs."""
    head_dim, head_dim_v = (_fixed(x, name) for x, name in ((q, "head_dim of q"), (v, "head_dim of v")))
    shape = KernelShape(
        DTYPES[q.dtype], head_dim, head_dim_v, (q_block, kv_block), scale, capability or _capability_here()
    )
    kernel = compile_kernel(shape)
    batch, seqlen_q, q_heads = (q.shape_expr[i] for i in range(3))
    launch = KernelLaunchParams()
    launch.grid_x = trtp.cdiv(seqlen_q, q_block) * batch * q_heads * kernel.tiles
    launch.block_x = kernel.threads
    launch.shared_mem = kernel.shared_memory
    numbers = (
        batch, seqlen_q, k.shape_expr[1], q_heads, k.shape_expr[2],
        kv_indices.shape_expr[0], mask_bands.shape_expr[0], kv_indptr.shape_expr[0], kv_indptr.shape_expr[1],
    )  # fmt: skip
    extra = SymIntExprs(len(numbers))
    for i, number in enumerate(numbers):
        extra[i] = trtp.SymInt32(number)
    return kernel.name, kernel.ptx, launch, extra


@trtp.register(BY_POLICY)  # type: ignore[untyped-decorator]
def policy_shapes(q: Desc, k: Desc, v: Desc, policy: str, layer: int, scale: float) -> Desc:
    """Return the descriptor of out."""
    return _out_of(BY_POLICY, q, k, v)


@trtp.impl(BY_POLICY)  # type: ignore[untyped-decorator]
def policy_call(
    q: Data, k: Data, v: Data, policy: str, layer: int, scale: float, outputs: tuple[Data], stream: int
) -> None:
    """Attend on TensorRT's stream, in its memory."""
    with on_stream(stream):
        found = attend_by_policy(*[torch_tensor(x) for x in (q, k, v)], policy=policy, layer=layer, scale=scale)
        torch_tensor(outputs[0]).copy_(found)


OPERATORS = getattr(trtp.op, NAMESPACE)


def _out_of(plugin: str, q: Any, k: Any, v: Any) -> Any:
    """Return the descriptor of out: that of q, with the head_dim of v. Raise ValueError for other ranks and dtypes."""
    _check(plugin, (q, k, v))
    out = q.like()
    out.shape_expr[3] = v.shape_expr[3]
    return out


def _check(plugin: str, tensors: Sequence[Any]) -> None:
    for x, name in zip(tensors, "qkv", strict=True):
        if x.ndim != 4:
            raise ValueError(f"{plugin}: `{name}` must be (batch, seqlen, heads, head_dim), got {x.ndim} dimensions")
        if x.dtype not in DTYPES or x.dtype != tensors[0].dtype:
            raise ValueError(
                f"{plugin}: q, k and v must be of one dtype, fp32, fp16 or bf16, got {x.dtype} for `{name}`"
            )


def _fixed(x: Any, name: str) -> int:
    size = x.shape_expr[3]
    if size.is_fake or not size.is_constant:
        raise ValueError(f"{ATTENTION}: the {name} must be fixed when the engine is built")
    return int(size.constant_value())


def _capability_here() -> int:
    if not torch.cuda.is_available():
        raise ValueError("no GPU is here to take the compute capability from: set `capability`, such as 90")
    major, minor = gpu_of(torch.device("cuda", torch.cuda.current_device())).capability
    return major * 10 + minor


def on_stream(stream: int) -> Any:
    """Run torch's work on TensorRT's stream."""
    return torch.cuda.stream(torch.cuda.ExternalStream(stream))


class _Memory:
    """Memory that TensorRT owns, in the form that torch reads."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], typestr: str) -> None:
        self.__cuda_array_interface__ = {
            "version": 3, "shape": shape, "typestr": typestr, "data": (address, False), "strides": strides,
        }  # fmt: skip


def torch_tensor(x: Any) -> Tensor:
    """Return a torch tensor on the memory of a `tensorrt.plugin.Tensor`; TensorRT's own way leaves out bf16."""
    dtype = OF_TORCH[x.dtype]
    strides = tuple(stride * dtype.itemsize for stride in x.strides)
    memory = _Memory(x.data_ptr, tuple(x.shape), strides, "<i4" if dtype.itemsize == 4 else "<i2")
    return torch.as_tensor(memory, device="cuda").view(dtype)
