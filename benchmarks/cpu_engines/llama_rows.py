# SPDX-License-Identifier: Apache-2.0
"""Rows of llama.cpp, through llama-cpp-python: the same GGUF weights, written again in the row's precision."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.cpu_engines.engines import EngineRow, Given, NotHereError, Precision, Prefill
from torch import Tensor

from dynaxx.core.build import processors
from dynaxx.storage import temporary_folder

FILE_TYPES: dict[Precision, tuple[int, str]] = {"fp32": (0, "F32"), "bf16": (32, "BF16"), "int8": (7, "Q8_0")}
BATCH = 512  # tokens per step, llama.cpp's default
_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda level, text, data: None)


def llama_rows(precision: Precision) -> list[EngineRow]:
    """Return the row of llama.cpp for one precision; int8 stands for its Q8_0."""
    return [EngineRow("llama.cpp", "dense", precision, _made(precision), FILE_TYPES[precision][1])]


def _made(precision: Precision) -> Callable[[Given], Prefill]:
    def make(given: Given) -> Prefill:
        try:
            import llama_cpp
        except ImportError as error:
            raise NotHereError("not installed: pip install llama-cpp-python, which compiles it") from error
        llama_cpp.llama_log_set(_SILENT, None)
        if given.source is None:
            raise NotHereError("the model does not come from a GGUF file")
        longest = given.models["fp32"].config.max_position_embeddings
        model = llama_cpp.Llama(
            str(_written(llama_cpp, given.source, given.work, precision)),
            n_ctx=longest,
            n_batch=BATCH,
            n_ubatch=BATCH,
            n_threads=given.threads,
            n_threads_batch=given.threads,
            flash_attn=True,
            verbose=False,
        )

        def run(ids: Tensor) -> Tensor:
            model.reset()
            model.eval(ids[0].tolist())
            logits = llama_cpp.llama_get_logits_ith(model._ctx.ctx, -1)
            return torch.from_numpy(np.ctypeslib.as_array(logits, shape=(model.n_vocab(),)).copy())

        return run

    return make


def _written(llama_cpp: Any, source: Path, folder: Path, precision: Precision) -> Path:
    """Return the GGUF with all matrices in one type, written once."""
    number, name = FILE_TYPES[precision]
    path = folder / f"model-{name}.gguf"
    if path.exists():
        return path
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = number, True, processors()
    with temporary_folder(path) as temporary:
        made = temporary / path.name
        failed = llama_cpp.llama_model_quantize(str(source).encode(), str(made).encode(), ctypes.byref(params))
        if failed:
            raise NotHereError(f"llama.cpp could not write the weights as {name} (status {failed})")
        made.rename(path)
    return path
