# SPDX-License-Identifier: Apache-2.0
"""`OpenVinoPrompts`: a policy's border between two compiled models, so that short prompts run OpenVINO's own code."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.engines.openvino.insert import insert_policy
from dynaxx.engines.openvino.packages import openvino
from dynaxx.engines.openvino.running import OpenVinoHandle, cpu_config
from dynaxx.policy import Policy


class OpenVinoPrompts:
    """Compute the logits of prompts: dense in OpenVINO below the policy's border, and with the policy from there on.

    One compiled model with a policy inside computes short prompts exactly, on dynaxx's kernels, which costs a
    conversion on both sides of them in bf16. Two compiled models avoid that, and hold the weights twice. Each is
    compiled when the first prompt needs it.

    Args:
        model: a dense `openvino.Model` without a cache, from `to_openvino`. It is not changed.
        policy: policy for the original model.
        precision: "f32" or "bf16".
        threads: number of threads; `torch.get_num_threads()` by default.
        name: name of the model in metrics, `model_name`.

    Attributes:
        border: number of tokens from which the policy runs.
        handle: counts and kill switch of the policy.

    Raises:
        ImportError, TypeError, PolicyError, UnsupportedInputError: as `insert_policy`.
    """

    @typed
    def __init__(
        self,
        model: Any,
        policy: Policy,
        *,
        precision: str = "f32",
        threads: int | None = None,
        name: str = "openvino",
    ) -> None:
        self._dense = model
        self._sparse = model.clone()
        self.handle: OpenVinoHandle = insert_policy(self._sparse, policy, precision=precision, name=name)
        self.border = policy.border
        self._config = cpu_config(precision, threads)
        self._requests: dict[bool, Any] = {}

    def __call__(self, input_ids: NDArray[Any] | Tensor) -> NDArray[Any]:
        """Return the logits of prompts (batch, seqlen) of one length."""
        ids = np.ascontiguousarray(np.asarray(input_ids, dtype=np.int64))
        sparse = ids.shape[1] >= self.border
        if sparse not in self._requests:
            model = self._sparse if sparse else self._dense
            self._requests[sparse] = openvino().Core().compile_model(model, "CPU", self._config).create_infer_request()
        return np.array(self._requests[sparse].infer({0: ids})[0])
