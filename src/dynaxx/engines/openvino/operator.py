# SPDX-License-Identifier: Apache-2.0
"""`SparseAttention`: an OpenVINO operator that dynaxx computes in OpenVINO's memory.

This module imports OpenVINO; only `insert` imports it.
"""

from __future__ import annotations

from typing import Any

import openvino
import torch
from torch import Tensor

from dynaxx.engines.openvino.running import Arguments, OpenVinoHandle, is_causal_mask


class _Operator(openvino.Op):  # type: ignore[misc]
    """An operator with its own `evaluate`."""

    def __init__(self, inputs: Any, *settings: Any) -> None:
        super().__init__(self)
        self._settings = settings
        self.set_arguments(inputs)
        self.constructor_validate_and_infer_types()

    def clone_with_new_inputs(self, new_inputs: Any) -> Any:
        """Return the same operator with other inputs."""
        return type(self)(new_inputs, *self._settings)

    def visit_attributes(self, visitor: Any) -> bool:
        """Return True: there are no attributes."""
        return True

    def has_evaluate(self) -> bool:
        """Return True."""
        return True


class CausalMask(_Operator):
    """Whether a mask (..., N, M), bool or additive, is causal: an integer (1,), 1 or 0.

    The layers that read one mask read this one answer, so it belongs to their mask and their pass.
    """

    def validate_and_infer_types(self) -> None:
        """Set the type and shape of the output."""
        self.set_output_type(0, openvino.Type.i32, openvino.PartialShape([1]))

    def evaluate(self, outputs: Any, inputs: Any) -> bool:
        """Read the mask."""
        outputs[0].data[:] = is_causal_mask(_mask(inputs[0]))
        return True


class SparseAttention(_Operator):
    """Attention of one layer: q (B, Hq, N, D), k and v (B, Hk, M, D), to (B, N, Hq, D).

    The inputs may end with a mask and the answer of its `CausalMask`. Without them the attention is causal.
    OpenVINO clones nodes during compilation. All clones share the handle.

    Args:
        inputs: q, k, v, and maybe the mask and the answer.
        handle: runs the attention.
        layer: index of the layer.
        scale: softmax scale, None for head_dim ** -0.5.
        first_aligned: without a mask, whether the first query sees the first key, as OpenVINO's "causal" means it, or
            the last query the last key.
    """

    _settings: tuple[OpenVinoHandle, int, float | None, bool]

    def validate_and_infer_types(self) -> None:
        """Set the type and shape of the output."""
        q, v = self.get_input_partial_shape(0), self.get_input_partial_shape(2)
        self.set_output_type(0, self.get_input_element_type(0), openvino.PartialShape([q[0], q[2], q[1], v[3]]))

    def visit_attributes(self, visitor: Any) -> bool:
        """Report the layer, which distinguishes the operators."""
        visitor.on_attributes({"layer": self._settings[1]})
        return True

    def evaluate(self, outputs: Any, inputs: Any) -> bool:
        """Compute the attention."""
        handle, layer, scale, first_aligned = self._settings
        q, k, v = (_tensor(each).transpose(1, 2) for each in inputs[:3])
        sizes, mask = (q.shape[1], k.shape[1]), None
        if len(inputs) > 3:
            mask = _mask(inputs[3])
            mask = None if inputs[4].data[0] and mask.shape[-2:] == sizes else mask
        elif first_aligned and sizes[0] != sizes[1]:
            mask = torch.ones(1, 1, *sizes, dtype=torch.bool, device="cpu").tril()
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        handle.attend(layer, Arguments(q, k, v, mask, _tensor(outputs[0]), scale))
        return True


def _tensor(given: Any) -> Tensor:
    """Return a torch tensor on OpenVINO's memory. The CPU plugin passes booleans as bytes 0 and 1."""
    found = torch.from_numpy(given.data)
    return found.view(torch.bool) if found.dtype == torch.uint8 else found


def _mask(given: Any) -> Tensor:
    """Return a mask with four dimensions."""
    found = _tensor(given)
    return found.reshape((1,) * (4 - found.dim()) + found.shape)
