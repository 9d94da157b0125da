# SPDX-License-Identifier: Apache-2.0
"""`SparseAttention`: an OpenVINO operator that dynaxx computes in OpenVINO's memory.

This module imports OpenVINO; only `insert` imports it.
"""

from __future__ import annotations

from typing import Any

import openvino
import torch
from torch import Tensor

from dynaxx.integrations.openvino.running import Arguments, OpenVinoHandle


class SparseAttention(openvino.Op):  # type: ignore[misc]
    """Attention of one layer: q (B, Hq, N, D), k and v (B, Hk, M, D), optionally a mask, to (B, N, Hq, D).

    OpenVINO clones nodes during compilation. All clones share the handle.
    """

    def __init__(self, inputs: Any, handle: OpenVinoHandle, layer: int, scale: float | None) -> None:
        super().__init__(self)
        self._handle, self._layer, self._scale = handle, layer, scale
        self.set_arguments(inputs)
        self.constructor_validate_and_infer_types()

    def validate_and_infer_types(self) -> None:
        """Set the type and shape of the output."""
        q, v = self.get_input_partial_shape(0), self.get_input_partial_shape(2)
        self.set_output_type(0, self.get_input_element_type(0), openvino.PartialShape([q[0], q[2], q[1], v[3]]))

    def clone_with_new_inputs(self, new_inputs: Any) -> SparseAttention:
        """Return the same operator with other inputs."""
        return SparseAttention(new_inputs, self._handle, self._layer, self._scale)

    def visit_attributes(self, visitor: Any) -> bool:
        """Report the layer, which distinguishes the operators."""
        visitor.on_attributes({"layer": self._layer})
        return True

    def has_evaluate(self) -> bool:
        """Return True: the operator has its own `evaluate`."""
        return True

    def evaluate(self, outputs: Any, inputs: Any) -> bool:
        """Compute the attention."""
        q, k, v = (_tensor(each).transpose(1, 2) for each in inputs[:3])
        mask = _tensor(inputs[3]) if len(inputs) > 3 else None
        scale = q.shape[-1] ** -0.5 if self._scale is None else self._scale
        self._handle.attend(self._layer, Arguments(q, k, v, mask, _tensor(outputs[0]), scale))
        return True


def _tensor(given: Any) -> Tensor:
    """Return a torch tensor on OpenVINO's memory. The CPU plugin passes booleans as bytes 0 and 1."""
    found = torch.from_numpy(given.data)
    return found.view(torch.bool) if found.dtype == torch.uint8 else found
