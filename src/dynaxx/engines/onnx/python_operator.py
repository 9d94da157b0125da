# SPDX-License-Identifier: Apache-2.0
"""The operator in Python, through `onnxruntime-extensions`, for machines that cannot compile or load its library.

It computes what `dynaxx::SparseAttention` computes, with `dx.sparse_attention` on the session's tensors. Operators in
Python have a fixed domain and no optional inputs, so the graph's nodes are renamed as it is loaded.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter
from torch import Tensor

from dynaxx.engines.onnx.packages import require
from dynaxx.forks import new_lock
from dynaxx.kernels.attention import cpu
from dynaxx.layout import BlockLayout
from dynaxx.ops import sparse_attention
from dynaxx.patterns import Causal, Full, Pattern
from dynaxx.policy import HeadGroup, LayerPlan
from dynaxx.policy.specs import AttentionSpec

DOMAIN = "ai.onnx.contrib"  # domain of onnxruntime-extensions' Python operators
NAMES = {3: "DynaxxSparseAttention", 4: "DynaxxMaskedSparseAttention"}  # by number of inputs
EXACT_BLOCK = (64, 64)
FOLDER_OF_WEIGHTS = "session.model_external_initializers_file_folder_path"

_one_run = new_lock()
_failures: list[Exception] = []  # exceptions of the current run
_of_data: TypeAdapter[Any] = TypeAdapter(AttentionSpec)


class PythonOperatorError(RuntimeError):
    """The Python operator cannot run a graph."""


def session_in_python(runtime: Any, path: Path, options: Any, **settings: Any) -> Any:
    """Return a session of a graph whose operators run in Python, as a `PythonSession`.

    Raises:
        ImportError: onnx or onnxruntime-extensions is not installed.
        PythonOperatorError: an older version of dynaxx wrote the graph.
    """
    extensions = _extensions()
    _declare()
    options.register_custom_ops_library(extensions.get_library_path())
    options.add_session_config_entry(FOLDER_OF_WEIGHTS, str(path.parent))
    graph = renamed(path).SerializeToString()
    return PythonSession(runtime.InferenceSession(graph, options, providers=["CPUExecutionProvider"], **settings))


class PythonSession:
    """A session whose operators run in Python. An exception inside of ONNX Runtime would end the process.

    Args:
        session: the session of ONNX Runtime.
    """

    def __init__(self, session: Any) -> None:
        self._session = session

    def get_inputs(self) -> Any:
        """Return the inputs of the graph."""
        return self._session.get_inputs()

    def run(self, outputs: Any, inputs: dict[str, Any]) -> list[NDArray[Any]]:
        """Run the graph, one call at a time, and raise what an operator could not do."""
        with _one_run:
            _failures.clear()
            found: list[NDArray[Any]] = self._session.run(outputs, inputs)
            if _failures:
                raise _failures[0]
        return found


def renamed(path: Path) -> Any:
    """Return a graph without its weights, an `onnx.ModelProto`, whose operators are Python's.

    Raises:
        PythonOperatorError: an operator does not tell its rules as data.
    """
    require("onnx")
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    kept = {"scale", "sparse_from", "always", "causal", "tokens_first", "spec"}
    for node in model.graph.node:
        if node.domain == "dynaxx":
            found = {each.name: each for each in node.attribute if each.name in kept}
            if "spec" not in found:
                raise PythonOperatorError(f"an older dynaxx wrote {path}: export the model again, or install g++")
            attributes = {"causal": 1, "tokens_first": 0}
            attributes |= {name: onnx.helper.get_attribute_value(each) for name, each in found.items()}
            del node.attribute[:]
            node.attribute.extend(onnx.helper.make_attribute(*each) for each in sorted(attributes.items()))
            node.domain, node.op_type = DOMAIN, NAMES[len(node.input)]
    model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
    return model


def _extensions() -> Any:
    try:
        return importlib.import_module("onnxruntime_extensions")
    except ImportError as error:
        raise ImportError(
            f"the operator in Python needs onnxruntime-extensions ({error}): pip install onnxruntime-extensions",
            name="onnxruntime_extensions",
        ) from error


@lru_cache(maxsize=1)
def _declare() -> None:
    """Declare both operators, once per process."""
    extensions = _extensions()
    kinds = extensions.PyCustomOpDef
    attributes = dict.fromkeys(("sparse_from", "always", "causal", "tokens_first"), kinds.dt_int64)
    attributes |= {"scale": kinds.dt_float, "spec": kinds.dt_string}
    for count, name in NAMES.items():
        inputs = [kinds.dt_float] * 3 + [kinds.dt_bool] * (count - 3)
        extensions.onnx_op(op_type=name, inputs=inputs, outputs=[kinds.dt_float], attrs=attributes)(_run_operator)


def _run_operator(*inputs: NDArray[Any], **attributes: Any) -> NDArray[Any]:
    """Compute the operator, or note why it cannot and return NaN."""
    try:
        return attend(*inputs, **attributes)
    except Exception as error:  # ONNX Runtime would end the process
        _failures.append(error)
        q, v, first = inputs[0], inputs[2], bool(attributes["tokens_first"])
        seqlen, heads = (q.shape[1], q.shape[2]) if first else (q.shape[2], q.shape[1])
        return np.full((q.shape[0], seqlen, heads, v.shape[3]), np.nan, np.float32)


def attend(*inputs: NDArray[Any], **attributes: Any) -> NDArray[Any]:
    """Compute the operator; inputs and attributes are those of `dynaxx::SparseAttention`.

    Raises:
        ValueError: a mask has holes, or the tensors do not fit each other.
    """
    called = Attributes.of(attributes)
    q, k, v = (torch.from_numpy(np.ascontiguousarray(x)) for x in inputs[:3])
    if not called.tokens_first:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    with torch.inference_mode(), cpu.own_threads():  # ONNX Runtime's go on at once on the same cores
        if len(inputs) == 3:
            _attend(called, q, k, v, out)
        else:
            for i, (first, end) in enumerate(_runs(inputs[3])):
                own = (x[i : i + 1, first:end] for x in (q, k, v, out))
                _attend(called, *own)
    return out.numpy()


class Attributes(NamedTuple):
    """The attributes of an operator."""

    scale: float
    sparse_from: int
    always: bool
    causal: bool
    tokens_first: bool
    spec: str  # rules as data, see `rules_as_data`; "" for all keys

    @classmethod
    def of(cls, given: dict[str, Any]) -> Attributes:
        """Return the attributes as a call passes them."""
        flags = {name: bool(given[name]) for name in ("always", "causal", "tokens_first")}
        spec = given["spec"]
        text = spec.decode() if isinstance(spec, bytes) else str(spec)
        return cls(scale=float(given["scale"]), sparse_from=int(given["sparse_from"]), spec=text, **flags)


def _attend(called: Attributes, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    if out.numel():
        out.copy_(sparse_attention(q, k, v, _layout(called, q, k), scale=called.scale))


def _layout(called: Attributes, q: Tensor, k: Tensor) -> BlockLayout:
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    ruled = called.spec and (called.always or (seqlen_q > 1 and seqlen_k >= called.sparse_from))
    if not ruled:
        everything: Pattern = Causal() if called.causal else Full()
        return everything.layout(seqlen_q, seqlen_k, block_size=EXACT_BLOCK, causal=called.causal, device="cpu")
    block_size, groups = _rules(called.spec)
    if called.causal:
        return LayerPlan(groups, q.shape[2], k.shape[2], block_size).layout(q, k, scale=called.scale)
    (group,) = groups
    assert isinstance(group.rule, Pattern), "encoders have one window for all heads"
    return group.rule.layout(seqlen_q, seqlen_k, block_size=block_size, causal=False, device="cpu")


@lru_cache(maxsize=256)
def _rules(spec: str) -> tuple[tuple[int, int], tuple[HeadGroup, ...]]:
    data = json.loads(spec)
    groups = (
        HeadGroup(tuple(each["heads"]), _of_data.validate_python(each["rule"]).build()) for each in data["groups"]
    )
    q_block, kv_block = data["block_size"]
    return (q_block, kv_block), tuple(groups)


def _runs(mask: NDArray[np.bool_]) -> Sequence[tuple[int, int]]:
    """Return first and last + 1 of each sequence's tokens.

    Raises:
        ValueError: a mask has holes.
    """
    found = []
    for i, row in enumerate(mask):
        (places,) = row.nonzero()
        first, end = (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)
        if end - first != len(places):
            raise ValueError(
                f"mask has holes in sequence {i}: hide tokens at the ends only, or export with form='portable'"
            )
        found.append((first, end))
    return found
