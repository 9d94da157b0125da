# SPDX-License-Identifier: Apache-2.0
"""The vLLM plugin: `DYNAXX_POLICY=policy.json vllm serve MODEL --attention-backend CUSTOM` serves a policy.

vLLM finds `register` through the entry point group `vllm.general_plugins` and calls it in each of its processes. The
plugin patches nothing in vLLM; it registers a backend.
"""

from __future__ import annotations

from typing import Any

from dynaxx.errors import UnsupportedInputError
from dynaxx.integrations.runtime import served
from dynaxx.integrations.vllm import engine as vllm_engine
from dynaxx.policy import load_policy
from dynaxx.telemetry import prometheus

NOT_STARTED = "no layer asked for the backend"


def register() -> None:
    """Register the backend: as CUSTOM on CUDA, and over CPU_ATTN on a CPU if a policy is set.

    On a CPU, vLLM knows only the name CPU_ATTN.

    Raises:
        FileNotFoundError: the file that `DYNAXX_POLICY` names does not exist.
        PolicyError: that file is not a valid policy.
        UnsupportedInputError: the plugin does not support the installed vLLM.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    path = served.policy_path()
    if path is not None:
        load_policy(path)
        prometheus.register()
    if current_platform.is_cuda():
        register_backend(AttentionBackendEnum.CUSTOM, "dynaxx.integrations.vllm.cuda.CudaBackend")
    elif path is not None and current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, "dynaxx.integrations.vllm.cpu.CpuBackend")
    elif path is not None:
        raise UnsupportedInputError(
            f"vLLM on {current_platform.device_name}", {"vllm": ["the plugin serves CUDA and CPU"]}
        )


def status() -> dict[str, Any]:
    """Return the state of the policy in this process as plain data; see `runtime.served.status_of`."""
    return served.status_of(vllm_engine.current(), NOT_STARTED)


def switch(enabled: bool) -> dict[str, Any]:
    """Turn sparse attention on or off from the next step on, and return `status()`.

    Raises:
        RuntimeError: no policy is active in this process.
    """
    return served.switch(vllm_engine.current(), enabled, NOT_STARTED)


class WorkerExtension:
    """`status` and `switch` for vLLM's `collective_rpc`.

    Pass `--worker-extension-cls dynaxx.integrations.vllm.WorkerExtension` to vLLM.
    """

    def dynaxx_status(self) -> dict[str, Any]:
        """Return `status()` of this worker."""
        return status()

    def dynaxx_switch(self, enabled: bool) -> dict[str, Any]:
        """Call `switch(enabled)` in this worker."""
        return switch(enabled)
