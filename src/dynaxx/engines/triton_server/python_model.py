# SPDX-License-Identifier: Apache-2.0
"""Model for Triton's Python backend: one transformers model with one policy.

Triton calls `initialize` once, `execute` with each batch of requests, and `finalize` at the end. An invalid request
gets an error response; the other requests of its batch continue.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers

from dynaxx.engines.triton_server.generation import Limits, Prompt, TextStream, batches, generate
from dynaxx.engines.triton_server.metrics import TritonMetrics
from dynaxx.integrations.transformers import apply
from dynaxx.integrations.transformers.handle import Handle
from dynaxx.integrations.transformers.loading import from_folder
from dynaxx.policy import load_policy

DEFAULT_MAX_TOKENS = 128
WARM_UP_TOKENS = 1024

logger = logging.getLogger("dynaxx")


def _utils() -> Any:
    """Return Triton's module for Python models, which exists only in Triton's processes."""
    import triton_python_backend_utils

    return triton_python_backend_utils


class TritonPythonModel:
    """Implementation of Triton's interface for a Python model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model and the policy, and start watching the policy file.

        Raises:
            OSError, ValueError: the model or policy cannot be loaded. Triton shows the message and does not serve it.
        """
        config = json.loads(args["model_config"])
        logger.addHandler(_TritonLog(_utils().Logger))
        logger.setLevel(logging.INFO)
        folder = Path(args["model_repository"]) / args["model_version"]
        value = lambda name: config["parameters"][name]["string_value"]
        self._streams = bool(config.get("model_transaction_policy", {}).get("decoupled"))
        self._most_tokens = int(value("max_batch_tokens"))
        device = f"cuda:{args['model_instance_device_id']}" if args["model_instance_kind"] == "GPU" else "cpu"
        self._model = _load(folder / "model", value("dtype"), device)
        self._tokenizer = _load_tokenizer(folder / "model")
        self._limits = Limits(self._model)
        file = folder / "policy.json"
        policy = load_policy(file) if file.exists() else None
        self._handle = cast(Handle, apply(self._model, policy, name=args["model_name"]))
        if policy is not None:
            self._handle.follow(file, interval=float(value("follow_seconds")))
        self._warm_up()
        self._metrics = TritonMetrics(_utils())
        self._metrics.copy()
        logger.info("%s: %s on %s", args["model_name"], type(self._model).__name__, device)

    def execute(self, requests: list[Any]) -> list[Any] | None:
        """Answer the requests of a batch.

        Returns:
            One response per request, or None in streaming mode, which sends the responses itself.
        """
        answers = [_Answer(request, self._streams, self._text_stream()) for request in requests]
        prompts: list[Prompt] = []
        accepted: list[_Answer] = []
        for request, answer in zip(requests, answers, strict=True):
            try:
                prompt = self._prompt(request, answer)
                self._limits.check(prompt)
            except (ValueError, UnicodeDecodeError) as error:
                answer.fail(str(error))
            else:
                prompts.append(prompt)
                accepted.append(answer)
        for rows in batches(prompts, self._most_tokens):
            self._run([prompts[row] for row in rows], [accepted[row] for row in rows])
        self._metrics.copy()
        return None if self._streams else [answer.response for answer in answers]

    def finalize(self) -> None:
        """Remove the policy before Triton unloads the model."""
        self._handle.remove()

    def _warm_up(self) -> None:
        """Answer one prompt, so that kernels are compiled before Triton reports the model ready."""
        count = min(WARM_UP_TOKENS, self._limits.context - 2)
        if count > 0:
            generate(self._model, self._handle, [Prompt((0,) * count, 2, id="warm-up")], [_Nobody()])

    def _run(self, prompts: list[Prompt], answers: list[_Answer]) -> None:
        try:
            generate(self._model, self._handle, prompts, answers)
        except Exception as error:  # the failure of one batch must not stop the server
            logger.exception("a batch of %d requests failed", len(prompts))
            for answer in answers:
                answer.fail(f"{type(error).__name__}: {error}")
        for answer in answers:
            answer.close()

    def _text_stream(self) -> TextStream:
        tokenizer = self._tokenizer
        decode = (lambda ids: "") if tokenizer is None else lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
        return TextStream(decode)

    def _prompt(self, request: Any, answer: _Answer) -> Prompt:
        """Read a request's tensors. Raise ValueError if one is invalid."""
        text, ids = _read(request, "text_input"), _read(request, "input_ids")
        if (text is None) == (ids is None):
            raise ValueError("a request must have `text_input` or `input_ids`, and not both")
        if text is not None:
            if self._tokenizer is None:
                raise ValueError("this model has no tokenizer: send `input_ids`")
            ids = self._tokenizer(_scalar("text_input", text).decode("utf-8"))["input_ids"]
        stream = _read(request, "stream")
        answer.stream = stream is not None and bool(_scalar("stream", stream))
        if answer.stream and not self._streams:
            raise ValueError("`stream` needs `decoupled: true` in the model's config.pbtxt")
        given: dict[str, Any] = {}
        for name, kind in (("max_tokens", int), ("temperature", float), ("top_p", float), ("seed", int)):
            tensor = _read(request, name)
            if tensor is not None:
                given[name] = kind(_scalar(name, tensor))
        given.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
        return Prompt(tuple(int(each) for each in ids), id=request.request_id(), **given)


class _Nobody:
    """Receiver that discards tokens."""

    def token(self, token: int, finish_reason: str) -> None:
        """Take a token; see `Receiver`."""

    def cancelled(self) -> bool:
        """Return False."""
        return False


class _Answer:
    """Answer to one request, and receiver of its tokens."""

    def __init__(self, request: Any, streams: bool, text: TextStream) -> None:
        self._text, self._streams = text, streams
        self._link: Any = request.get_response_sender() if streams else request  # gone once the answer is complete
        self._ids: list[int] = []
        self._answer = ""
        self._done = False
        self.stream = False
        self.response: Any = None  # the response without streaming

    def token(self, token: int, finish_reason: str) -> None:
        """Take a token; see `Receiver`."""
        self._ids.append(token)
        self._answer += self._text.add(token, last=bool(finish_reason))
        if self.stream or finish_reason:
            self._send(finish_reason)

    def cancelled(self) -> bool:
        """Return whether the client has disconnected."""
        return self._done or bool(self._link.is_cancelled())

    def fail(self, message: str) -> None:
        """Answer with an error, unless the answer is complete."""
        if not self._done:
            utils = _utils()
            self._finish(utils.InferenceResponse(error=utils.TritonError(message)))

    def close(self) -> None:
        """Send the final response if none was sent. Triton waits for it even after a cancelled request."""
        if not self._done:
            utils = _utils()
            kind = getattr(utils.TritonError, "CANCELLED", None)
            error = utils.TritonError("cancelled", kind) if kind is not None else utils.TritonError("cancelled")
            self._finish(utils.InferenceResponse(error=error))

    def _send(self, finish_reason: str) -> None:
        utils = _utils()
        texts = {"text_output": self._answer.encode(), "finish_reason": finish_reason.encode()}
        tensors = [utils.Tensor(name, np.array([[text]], dtype=object)) for name, text in texts.items()]
        tensors.append(utils.Tensor("output_ids", np.array([self._ids], dtype=np.int64)))
        response = utils.InferenceResponse(output_tensors=tensors)
        self._ids, self._answer = [], ""
        if finish_reason:
            self._finish(response)
        else:
            self._link.send(response)

    def _finish(self, response: Any) -> None:
        """Send the last piece. Triton unloads no model while somebody holds a sender, so this one is let go."""
        self._done = True
        link, self._link = self._link, None
        if self._streams:
            link.send(response, flags=_utils().TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        else:
            self.response = response


class _TritonLog(logging.Handler):
    """Forwards the logger `dynaxx` to Triton's log."""

    def __init__(self, log: Any) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record at the corresponding level of Triton."""
        level = "error" if record.levelno >= logging.ERROR else "warn" if record.levelno >= logging.WARNING else "info"
        getattr(self._log, f"log_{level}")(f"dynaxx: {self.format(record)}")


def _load(folder: Path, dtype: str, device: str) -> Any:
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    kind = transformers.AutoModelForCausalLM
    model = from_folder(kind, folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    return model.eval().to(device)


def _load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer in a folder, or None if there is none."""
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        return None
    return from_folder(transformers.AutoTokenizer, folder)


def _read(request: Any, name: str) -> Any:
    """Return an input of one prompt, or None if it was not sent. Raise ValueError for several prompts."""
    tensor = _utils().get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    array = tensor.as_numpy()
    if array.ndim != 2 or array.shape[0] != 1:
        raise ValueError(
            f"`{name}` must have shape (1, n), got {tuple(array.shape)}: send one request per prompt, "
            "the server puts them together"
        )
    return array[0]


def _scalar(name: str, array: Any) -> Any:
    if array.shape != (1,):
        raise ValueError(f"`{name}` must hold one value, got {array.size}")
    return array[0]
