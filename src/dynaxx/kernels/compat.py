# SPDX-License-Identifier: Apache-2.0
"""Everything that differs between versions of Triton (3.6 to 3.9, and what is known of 3.10), in one place.

What a version offers is looked up where it would be, not concluded from its number. Importing this module loads Triton;
Gluon is loaded with the first of its names. Which versions were proven, and how others are tried, is in `trials`.

    Gluon        barrier, tma_load, tma_store, tma_add, copy_to_shared, reinterpret: instructions by our names
    compiling    OPTIONS: what we say, because its default changes
    launching    needs_wrapper, is_plain_map, encoded_map: below Triton's Python
"""

from __future__ import annotations

import importlib
from typing import Any

from triton.runtime import driver

OPTIONS = {"enable_fp_fusion": True}  # launch options of every kernel; the default becomes False in 3.10, 3.9 warns

GLUON = "triton.experimental.gluon.language."
# Our name of an instruction: the module, and the paths in it that versions of Triton have had, newest first.
INSTRUCTIONS = {
    "barrier": ("_core", "barrier", "thread_barrier"),  # newest since 3.7
    "tma_load": ("nvidia.hopper.tma", "async_load", "async_copy_global_to_shared"),  # 3.8
    "tma_store": ("nvidia.hopper.tma", "async_store", "async_copy_shared_to_global"),  # 3.8
    "tma_add": ("nvidia.hopper.tma", "async_atomic_add"),  # 3.8
    "copy_to_shared": ("nvidia.ampere.async_copy", "async_load", "async_copy_global_to_shared"),  # 3.8
    "reinterpret": ("_core", "shared_memory_descriptor.reinterpret", "shared_memory_descriptor._reinterpret"),  # 3.9
}


def __getattr__(name: str) -> Any:
    """Return one of `INSTRUCTIONS`.

    Raises:
        AttributeError: this Triton has none of its paths.
    """
    if name not in INSTRUCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, *paths = INSTRUCTIONS[name]
    for path in paths:
        found: Any = importlib.import_module(GLUON + module)
        for part in path.split("."):
            found = getattr(found, part, None)
        if found is not None:
            return found
    if name == "tma_add":
        return _tma_add()
    raise AttributeError(f"this version of Gluon has none of {', '.join(paths)}")


def _tma_add() -> Any:
    """Return `tma_add` for a Gluon that does not expose the instruction, which Triton has."""
    from triton._C.libtriton import ir

    builtin = importlib.import_module(GLUON + "_core").builtin

    @builtin  # type: ignore[untyped-decorator]
    def tma_add(tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
        """Start adding a tile of shared memory to global memory; otherwise like `tma_store`."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)

    return tma_add


def needs_wrapper(metadata: Any) -> bool:
    """Return whether Triton's wrapper does more for a kernel than to pass its arguments: memory, instrumentation."""
    scratch = metadata.global_scratch_size or metadata.profile_scratch_size
    return bool(scratch or getattr(metadata, "instrumentation_mode", "") or getattr(metadata, "gsan", False))


def is_plain_map(meta: Any) -> bool:
    """Return whether a descriptor is encoded as a tensor map of whole elements in tiles."""
    return meta is not None and not meta["fp4_padded"] and not meta.get("is_im2col")


def encoded_map(address: int, x: Any, meta: dict[str, Any]) -> Any:
    """Return the tensor map that Triton encodes for a descriptor, with the data at another address."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    utils = driver.active.utils
    encode = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor  # the latter until 3.6
    element = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
    sizes, padded = (list(x.shape), list(x.strides)), int(x.padding == "nan")
    return encode(address, meta["swizzle"], meta["elem_size"], element, meta["block_size"], *sizes, padded)
