# SPDX-License-Identifier: Apache-2.0
"""The vLLM plugin: `DYNAXX_POLICY=policy.json vllm serve MODEL --attention-backend CUSTOM` serves a policy.

vLLM finds `register` by the entry point group `vllm.general_plugins` and calls it in each of its processes. Nothing of
vLLM is patched: the backend is registered, vLLM makes it.
"""

from __future__ import annotations

from typing import Any

from dynaxx.errors import UnsupportedInputError
from dynaxx.integrations.vllm import engine as vllm_engine
from dynaxx.integrations.vllm.engine import POLICY_VARIABLE, logger
from dynaxx.policy import load_policy
from dynaxx.telemetry import prometheus


def register() -> None:
    """Register the backend: as CUSTOM on CUDA; on a CPU, where vLLM knows one name, over CPU_ATTN if a policy is set.

    Raises:
        FileNotFoundError, PolicyError: `DYNAXX_POLICY` names no policy, or a broken one.
        UnsupportedInputError: a vLLM that this plugin was not made for.
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
    """Return what the policy does in this process; plain data.

    Returns:
        "active": whether layers follow it, else "reason"; "policy": its file, and "digest"; "killed": what engages the
        kill switch, None if nothing; "sparse_layers": their indices, of "layers"; "density": of sampled sparse calls;
        "sparse_calls", "dense_calls", "dense_sequences": as `Handle.stats`.
    """
    engine = vllm_engine.current()
    if engine is None:
        reason = "no layer asked for the backend" if vllm_engine.policy_path() else f"{POLICY_VARIABLE} is not set"
        return {"active": False, "reason": reason}
    return engine.status()


def switch(enabled: bool) -> dict[str, Any]:
    """Turn sparsity on or off from the next step on; returns `status()`.

    Raises:
        RuntimeError: no policy is active here.
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
    """`--worker-extension-cls dynaxx.integrations.vllm.WorkerExtension`: the same through vLLM's `collective_rpc`."""

    def dynaxx_status(self) -> dict[str, Any]:
        """`status()` of this worker."""
        return status()

    def dynaxx_switch(self, enabled: bool) -> dict[str, Any]:
        """`switch(enabled)` in this worker."""
        return switch(enabled)
