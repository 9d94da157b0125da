# SPDX-License-Identifier: Apache-2.0
"""The names, parameters and fields of vLLM that the plugin needs, checked before a backend is created.

vLLM changes its backend interface every few minor versions. This check turns a change into one clear message when the
engine starts. Start here when you port the plugin to a new version.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from dynaxx.errors import UnsupportedInputError

TESTED = "0.26 to 0.32"

_BASE = "vllm.v1.attention.backend"
_REGISTRY = "vllm.v1.attention.backends.registry"
_FORWARD = ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")
_UPDATE = ("layer", "key", "value", "kv_cache", "slot_mapping")
_BUILDER = ("kv_cache_spec", "layer_names", "vllm_config", "device")
_BUILD = ("common_prefix_len", "common_attn_metadata", "fast_build")
_IMPL = (
    *("num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype"),
    *("logits_soft_cap", "attn_type", "kv_sharing_target_layer_name"),
)
_COMMON = (
    *("query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu_upper_bound", "num_reqs"),
    *("num_actual_tokens", "max_query_len", "max_seq_len", "block_table_tensor", "slot_mapping", "causal"),
    *("positions", "is_prefilling"),
)


class Need(NamedTuple):
    """An object of vLLM and its required parameters and attributes."""

    module: str
    path: str  # "name" or "Class.method"
    parameters: tuple[str, ...] = ()  # names of its first parameters, in this order
    attributes: tuple[str, ...] = ()  # members, or fields of a dataclass


SHARED = (
    Need(_REGISTRY, "register_backend", ("backend", "class_path")),
    Need(_REGISTRY, "AttentionBackendEnum", attributes=("CPU_ATTN", "CUSTOM")),
    Need(_BASE, "CommonAttentionMetadata", attributes=_COMMON),
    Need(_BASE, "AttentionType", attributes=("DECODER",)),
    Need(_BASE, "AttentionCGSupport", attributes=("NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "ALWAYS")),
    Need("vllm.config", "get_layers_from_vllm_config", ("vllm_config", "layer_type", "layer_names")),
    Need("vllm.model_executor.layers.attention", "Attention"),
    Need("vllm.model_executor.models.utils", "extract_layer_index", ("layer_name",)),
)


def backend_needs(module: str, backend: str, impl: str, builder: str) -> tuple[Need, ...]:
    """Return the requirements on one of vLLM's dense backends."""
    return (
        Need(module, backend, attributes=("get_name", "get_impl_cls", "get_builder_cls")),
        Need(module, f"{impl}.__init__", _IMPL),
        Need(module, f"{impl}.forward", _FORWARD),
        Need(module, f"{impl}.do_kv_cache_update", _UPDATE),
        Need(module, f"{builder}.__init__", _BUILDER),
        Need(module, f"{builder}.build", _BUILD),
        Need(module, f"{builder}.get_cudagraph_support", ("vllm_config", "kv_cache_spec")),
    )


CPU = backend_needs(
    "vllm.v1.attention.backends.cpu_attn",
    "CPUAttentionBackend",
    "CPUAttentionBackendImpl",
    "CPUAttentionMetadataBuilder",
)
CUDA = backend_needs(
    "vllm.v1.attention.backends.flash_attn",
    "FlashAttentionBackend",
    "FlashAttentionImpl",
    "FlashAttentionMetadataBuilder",
)


def broken(needs: tuple[Need, ...], load: Callable[[str], Any] = importlib.import_module) -> list[str]:
    """Return descriptions of the requirements that the installed vLLM does not meet."""
    return [problem for need in needs if (problem := _problem(need, load))]


def check(needs: tuple[Need, ...]) -> None:
    """Check the installed vLLM.

    Raises:
        UnsupportedInputError: vLLM has changed; the message lists the changes and the fix.
    """
    problems = broken(needs)
    if problems:
        problems.append(
            f"this plugin is tested with vLLM {TESTED}; install one of these, or a dynaxx for the installed version"
        )
        raise UnsupportedInputError(f"vLLM {_version()}", {"vllm": problems})


def _problem(need: Need, load: Callable[[str], Any]) -> str:
    where = f"{need.module}.{need.path}"
    try:
        found = load(need.module)
        for part in need.path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        return f"{where} does not exist ({error})"
    fields = getattr(found, "__dataclass_fields__", {})
    missing = [name for name in need.attributes if not hasattr(found, name) and name not in fields]
    if missing:
        return f"{where} has no {', '.join(missing)}"
    if need.parameters:
        names = [name for name in inspect.signature(found).parameters if name not in ("self", "cls")]
        if tuple(names[: len(need.parameters)]) != need.parameters:
            return f"{where} takes ({', '.join(names)}), not ({', '.join(need.parameters)}, ...)"
    return ""


def _version() -> str:
    return str(getattr(importlib.import_module("vllm"), "__version__", "of unknown version"))
