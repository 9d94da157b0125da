# SPDX-License-Identifier: Apache-2.0
r"""Serve a model with transformers' own HTTP server under a policy: OpenAI's endpoints, streaming, continuous batching.

    pip install 'dynaxx[transformers,metrics]' 'transformers[serving]'
    python examples/serve_transformers.py MODEL policy.json --port 8000
    curl localhost:8000/v1/completions -H 'content-type: application/json' \
        -d '{"model": "MODEL", "prompt": "...", "max_tokens": 32}'

The server is what `transformers serve` runs. Only its model manager is another: it applies the policy to the model
that it loads. Prompts run by the prefill rules, tokens after them by the decode rules. The policy's file is followed:
replace it and new requests use the new one. Without a policy the model's own pattern runs on dynaxx's kernels.

`--continuous-batching` puts requests together, step by step; on a CPU, bound its cache by `--cb-num-blocks`. `--plain`
serves the model as transformers does, to compare with. Metrics are served at http://localhost:9466/metrics.
`DYNAXX_KILL_FILE=PATH` makes everything dense while that file is there.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import threading
from typing import Any

try:
    import uvicorn
except ImportError:
    raise SystemExit("this server needs more packages: pip install 'transformers[serving]'") from None
from transformers import ContinuousBatchingConfig
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.transcription import TranscriptionHandler
from transformers.cli.serving.utils import GenerationState

import dynaxx as dx
from dynaxx.telemetry.prometheus import serve as serve_metrics


class PolicyModelManager(ModelManager):
    """transformers' model manager, with a policy applied to each model that it loads.

    Args:
        policy: file of the policy; None runs the model's own pattern.
        plain: leave models as they are.
        options: as transformers' `ModelManager`.
    """

    def __init__(self, policy: str | None, *, continuous_batching: bool, plain: bool = False, **options: Any) -> None:
        self._policy, self._continuous, self._plain = policy, continuous_batching, plain
        self._applying, self._stack = threading.Lock(), contextlib.ExitStack()
        self.handles: dict[int, Any] = {}
        if "continuous_batching" in inspect.signature(ModelManager).parameters:  # not in transformers 5.17
            options["continuous_batching"] = continuous_batching
        super().__init__(**options)  # loads the model

    def load_model_and_processor(self, *args: Any, **kwargs: Any) -> Any:
        """Load a model, or return the one that is loaded, under the policy."""
        model, processor = super().load_model_and_processor(*args, **kwargs)
        with self._applying:
            if id(model) not in self.handles and not self._plain:
                handle = dx.apply(model, None if self._policy is None else dx.load_policy(self._policy))
                if self._policy is not None:
                    handle.follow(self._policy)
                if self._continuous:
                    self._stack.enter_context(handle.continuous_batching())
                self.handles[id(model)] = handle
        return model, processor

    def shutdown(self) -> None:
        """Take the policy off and unload."""
        self._stack.close()
        for handle in self.handles.values():
            handle.remove()
        super().shutdown()


def build_app(args: argparse.Namespace) -> Any:
    """Load the model and return the server's application."""
    batching = args.continuous_batching
    # On CUDA, continuous batching would leave for flash attention, and captured steps run dense.
    sizes = {"num_blocks": args.cb_num_blocks, "max_batch_tokens": args.cb_max_batch_tokens}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    config = ContinuousBatchingConfig(auto_switch_to_flash=False, use_cuda_graph=False, **sizes) if batching else None
    state = GenerationState(continuous_batching=batching, compile=False, cb_config=config)
    manager = PolicyModelManager(
        args.policy, device=args.device, dtype=args.dtype, attn_implementation="sdpa",
        continuous_batching=batching, force_model=args.model, plain=args.plain,
    )  # fmt: skip
    chat = {"chat_template_kwargs": {}}
    handlers = {
        "chat_handler": ChatCompletionHandler(model_manager=manager, generation_state=state, **chat),
        "completion_handler": CompletionHandler(model_manager=manager, generation_state=state),
        "response_handler": ResponseHandler(model_manager=manager, generation_state=state, **chat),
        "transcription_handler": TranscriptionHandler(manager, state),
    }
    if importlib.util.find_spec("transformers.cli.serving.systemone"):  # not in transformers 5.17
        from transformers.cli.serving.systemone import SystemOneHandler

        handlers["systemone_handler"] = SystemOneHandler(
            model_manager=manager, generation_state=state, decision_config=None, **chat
        )
    return build_server(manager, generation_state=state, **handlers)


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model, or its name")
    parser.add_argument("policy", nargs="?", help="a policy for it, from `dynaxx tune`")
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--plain", action="store_true", help="without dynaxx")
    parser.add_argument("--continuous-batching", action="store_true")
    parser.add_argument("--cb-num-blocks", type=int, help="of the paged cache; else it takes most of the memory")
    parser.add_argument("--cb-max-batch-tokens", type=int, help="of a step; longer prompts are cut into chunks")
    parser.add_argument("--metrics-port", type=int, default=9466)
    args = parser.parse_args()
    app = build_app(args)
    with serve_metrics(args.metrics_port):
        uvicorn.run(app, host=args.host, port=args.port, log_level="info")


if __name__ == "__main__":
    main()
