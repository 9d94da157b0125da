# SPDX-License-Identifier: Apache-2.0
"""Linear layers with weights of 8 bits, as ONNX Runtime's operator `com.microsoft::MatMulNBits` reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

DOMAIN, OPERATOR = "com.microsoft", "MatMulNBits"
BLOCK = 32  # input channels that share a scale
ZERO = 128  # stored value of a weight of 0
INT8 = 4  # the operator's `accuracy_level` at which inputs are rounded to 8 bits, and products are those of integers


def with_int8_weights(graph: Any) -> Any:
    """Store the weights of a traced graph's linear layers in 8 bits, in place, and return the graph.

    Embeddings, norms and attention stay in fp32. An embedding that the last layer shares is stored both ways.
    """
    import onnx_ir as ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    main = graph.graph
    for node in list(main):
        weight = _weight(node)
        if weight is None:
            continue
        inputs, outputs = weight.shape
        parts = dict(zip(("int8", "scales"), int8_blocks(weight), strict=True))
        stored = [ir.Value(name=f"{node.name}.{name}", const_value=ir.tensor(part)) for name, part in parts.items()]
        for value in stored:
            main.register_initializer(value)
        sizes = {"K": inputs, "N": outputs, "bits": 8, "block_size": BLOCK, "accuracy_level": INT8}
        made = ir.node(OPERATOR, [node.inputs[0], *stored], sizes, domain=DOMAIN, name=node.name)
        ir.convenience.replace_nodes_and_values(main, node, [node], [made], node.outputs, made.outputs)
    main.opset_imports[DOMAIN] = 1
    RemoveUnusedNodesPass()(graph)  # with the weights in fp32 that nothing reads any more
    return graph


def _weight(node: Any) -> NDArray[Any] | None:
    """Return the weight (inputs, outputs) of a linear layer, or None for other nodes."""
    if node.op_type != "MatMul":
        return None
    value = node.inputs[1]
    transpose = value.producer() if value.producer() is not None and value.producer().op_type == "Transpose" else None
    constant = (value if transpose is None else transpose.inputs[0]).const_value
    if constant is None or len(constant.shape) != 2:
        return None
    weight: NDArray[Any] = constant.numpy()
    return weight if transpose is None else weight.T


def int8_blocks(weight: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return a weight (K, N) fp32 in blocks of its input channels: values (N, blocks, 32) uint8 and scales (N, blocks).

    `weight[k, n] = (values[n, k // 32, k % 32] - 128) * scales[n, k // 32]`, rounded. The last block is filled with 0.
    """
    inputs, outputs = weight.shape
    padded = np.pad(weight, ((0, -inputs % BLOCK), (0, 0))).T.reshape(outputs, -1, BLOCK)
    scales = np.abs(padded).max(-1) / 127
    values = np.rint(padded / np.where(scales == 0, 1, scales)[..., None]) + ZERO
    return values.astype(np.uint8), scales.astype(np.float32)
