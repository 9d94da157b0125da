# SPDX-License-Identifier: Apache-2.0
"""`OnnxModel`: run an exported model in ONNX Runtime, for prompts and for decoding with the cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from dynaxx.arguments import typed
from dynaxx.core import build
from dynaxx.core.library import ISA_VARIABLE, load_core
from dynaxx.engines.exporting import imported
from dynaxx.engines.portable.greedy import Array, Greedy, Step
from dynaxx.engines.portable.manifest import read_manifest


def library_path() -> Path:
    """Return the path of the library for this processor, after compiling it if necessary.

    Pass the path to `SessionOptions.register_custom_ops_library` in this process. A library from the cache has the path
    of its open file, so ONNX Runtime gets the file that was checked, whatever replaces it meanwhile.

    Raises:
        RuntimeError: the library is missing and cannot be compiled, or cannot be trusted.
        ValueError: `DYNAXX_CPU_ISA` names an instruction set that this processor does not support.
    """
    isa = os.environ.get(ISA_VARIABLE, "")
    if isa == "torch":
        raise ValueError(
            f"`{ISA_VARIABLE}` must be one of {build.supported_isas()} for ONNX Runtime, got 'torch': unset it, "
            "because the operator has no torch implementation"
        )
    core = load_core(isa)
    if core.library is None:
        raise RuntimeError(
            f"dynaxx::SparseAttention needs the compiled CPU core, and there is none: {core.status.why}; install a "
            "wheel of dynaxx for this platform, or export with form='portable'"
        )
    return Path(core.library._name)


VERSION = 1
OLDEST_RUNTIME = (1, 20)

# ONNX Runtime computes its fused sum and norm number by number on a CPU: 7 % of the time of an encoder of BERT-base's
# shape. The two operators apart take 2 %.
SLOW_FUSIONS = ["SkipLayerNormFusion"]


class OnnxModel(Greedy):
    """An exported model in ONNX Runtime on a CPU.

    Args:
        folder: a folder that `export_onnx` wrote.
        threads: number of threads; None uses ONNX Runtime's default, the number of cores.

    Raises:
        ImportError: onnxruntime is not installed, or too old.
        FileNotFoundError: `folder` does not contain an export.
        ValueError: the manifest is damaged, or a newer version of dynaxx wrote it.
    """

    @typed
    def __init__(self, folder: str | os.PathLike[str], *, threads: int | None = None) -> None:
        self.folder = Path(folder)
        self._runtime = imported("onnxruntime", "pip install 'dynaxx[onnx]'", OLDEST_RUNTIME)
        self.manifest = read_manifest(self.folder, "onnx", VERSION, {"form": str, "sparse_from": int})
        self._threads = threads
        self._sessions: dict[str, Any] = {}

    def session(self, graph: str) -> Any:
        """Return the session of a graph ("prefill", "decode" or "model"), created at first use."""
        if graph not in self._sessions:
            options = self._runtime.SessionOptions()
            if self._threads is not None:
                options.intra_op_num_threads = self._threads
            self._sessions[graph] = self._open(self.folder / f"{graph}.onnx", options)
        return self._sessions[graph]

    def _open(self, path: Path, options: Any) -> Any:
        settings: dict[str, Any] = {"disabled_optimizers": SLOW_FUSIONS}
        if self.manifest["form"] == "custom":
            options.register_custom_ops_library(str(library_path()))
        return self._runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"], **settings)

    def encode(self, input_ids: Array, attention_mask: Array | None = None) -> Array:
        """Return an encoder's first output (batch, seqlen, hidden)."""
        mask = np.ones_like(input_ids) if attention_mask is None else attention_mask
        return self.session("model").run(None, {"input_ids": input_ids, "attention_mask": mask})[0]

    def step(self, input_ids: Array, cache: list[Array] | None = None) -> tuple[Array, list[Array]]:
        """Run tokens (batch, seqlen) after those in a cache, and return the logits and the extended cache.

        Several tokens, such as a prompt or a chunk of one, follow the policy's rules from its border on. A single token
        sees all keys.
        """
        past = 0 if cache is None else cache[0].shape[2]
        sparse = input_ids.shape[1] > 1 and past + input_ids.shape[1] >= self.manifest["sparse_from"]
        graph = "model" if self.manifest["form"] == "custom" else "prefill" if sparse else "decode"
        session = self.session(graph)
        cache = self._empty(session, input_ids.shape[0]) if cache is None else cache
        names = [each.name for each in session.get_inputs()]
        logits, *grown = session.run(None, dict(zip(names, [input_ids, *cache], strict=True)))
        return logits, grown

    def _start(self) -> Step:
        cache: list[Array] | None = None

        def step(tokens: Array) -> Array:
            nonlocal cache
            logits, cache = self.step(tokens, cache)
            return logits

        return step

    def _empty(self, session: Any, batch: int) -> list[Array]:
        types = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
        return [
            np.zeros((batch, each.shape[1], 0, each.shape[3]), types[each.type]) for each in session.get_inputs()[1:]
        ]
