# SPDX-License-Identifier: Apache-2.0
"""The vLLM plugin: `DYNAXX_POLICY=policy.json vllm serve MODEL --attention-backend CUSTOM` serves a policy.

vLLM finds `register` through the entry point group `vllm.general_plugins` and calls it in each of its processes. The
plugin patches nothing in vLLM; it registers a backend.
"""

from __future__ import annotations

import logging
from typing import Any

from dynaxx.errors import UnsupportedInputError
from dynaxx.integrations.vllm import engine as vllm_engine
from dynaxx.policy import load_policy
from dynaxx.telemetry import prometheus

logger = logging.getLogger("dynaxx")


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

    path = vllm_engine.policy_path()
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
    """Return the state of the policy in this process as plain data.

    Returns:
        "active": whether layers follow it, otherwise "reason". "policy": its file, with its "digest". "killed": what
        engages the kill switch, or None. "sparse_layers": indices of the sparse layers among "layers". "density": the
        mean of sampled sparse calls. "sparse_calls", "dense_calls", "dense_sequences": see `Handle.stats`.
    """
    engine = vllm_engine.current()
    if engine is None:
        named = vllm_engine.policy_path() is not None
        reason = "no layer asked for the backend" if named else f"{vllm_engine.POLICY_VARIABLE} is not set"
        return {"active": False, "reason": reason}
    return engine.status()


def switch(enabled: bool) -> dict[str, Any]:
    """Turn sparse attention on or off from the next step on, and return `status()`.

    Raises:
        RuntimeError: no policy is active in this process.
    """
    engine = vllm_engine.current()
    if engine is None:
        raise RuntimeError(f"no policy is active in this process: {status()['reason']}")
    if enabled:
        engine.kill_switch.release()
    else:
        engine.kill_switch.engage()
    logger.info("sparse attention is switched %s", "on" if enabled else "off")
    return engine.status()


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
