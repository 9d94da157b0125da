# SPDX-License-Identifier: Apache-2.0
"""The SGLang plugin: `DYNAXX_POLICY=policy.json sglang serve MODEL --prefill-attention-backend dynaxx`.

SGLang finds `register` through the entry point group `sglang.srt.plugins` and calls it in each of its processes, before
it reads its arguments. The plugin registers two attention backends: `dynaxx` over SGLang's FlashAttention 3, and
`dynaxx_triton` over its Triton backend.

It was written to the interface of SGLang 0.5.23 and tested with stand-ins, never with SGLang itself.
"""

from __future__ import annotations

from typing import Any

from dynaxx.integrations.runtime import served
from dynaxx.integrations.sglang import engine as sglang_engine
from dynaxx.policy import load_policy
from dynaxx.telemetry import prometheus

NOT_STARTED = "no backend was created"

BACKENDS = {
    "dynaxx": "flashattention_backend.FlashAttentionBackend",
    "dynaxx_triton": "triton_backend.TritonAttnBackend",
}


def register() -> None:
    """Register the backends, if `DYNAXX_POLICY` names a policy.

    SGLang logs the errors of plugins and goes on, so that `--attention-backend dynaxx` is an unknown name then.

    Raises:
        FileNotFoundError: the file that `DYNAXX_POLICY` names does not exist.
        PolicyError: that file is not a valid policy.
    """
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    path = served.policy_path()
    if path is None:
        return
    load_policy(path)
    prometheus.register()
    for name in BACKENDS:
        register_attention_backend(name)(_creator(name))
    add_attention_backend_choices(list(BACKENDS))


def status() -> dict[str, Any]:
    """Return the state of the policy in this process as plain data; see `runtime.served.status_of`."""
    return served.status_of(sglang_engine.current(), NOT_STARTED)


def switch(enabled: bool) -> dict[str, Any]:
    """Turn sparse attention on or off from the next step on, and return `status()`.

    Raises:
        RuntimeError: no policy is active in this process.
    """
    return served.switch(sglang_engine.current(), enabled, NOT_STARTED)


def _creator(name: str) -> Any:
    """Return the function that SGLang calls with its model runner to create the backend."""

    def create(runner: Any) -> Any:
        from dynaxx.integrations.sglang.backend import backend_class

        return backend_class(BACKENDS[name])(runner)

    return create
