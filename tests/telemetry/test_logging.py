# SPDX-License-Identifier: Apache-2.0
"""Logs can be structured, and never contain parts of prompts."""

import io
import json
import logging

import pytest
import torch

from dynaxx.telemetry.logging import JsonFormatter, log_json

logger = logging.getLogger("dynaxx")


@pytest.fixture
def stream():
    before = (list(logger.handlers), logger.level, logger.propagate)
    stream = io.StringIO()
    log_json(stream)
    yield stream
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def lines(stream) -> list[dict]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_is_one_line_of_json(stream, telemetry):
    telemetry.bind(model_name="smollm2").event("kernel_failed", layer=3, backend="cpu")
    (line,) = lines(stream)
    assert line["level"] == "info"
    assert line["message"] == "kernel_failed: a kernel failed; the call ran dense"
    assert line["facts"] == {"model_name": "smollm2", "engine": "0", "layer": 3, "backend": "cpu"}
    assert line["time"].endswith("+00:00")


def test_lists_and_tensors_are_no_facts(stream, telemetry):
    ids = torch.tensor([101, 2023, 2003])
    telemetry.event("kernel_failed", ids=ids, tokens=[101, 2023], text="x" * 1000, share=float("nan"))
    assert "2023" not in stream.getvalue()
    facts = lines(stream)[0]["facts"]
    assert (facts["ids"], facts["tokens"], facts["share"]) == ("<Tensor>", "<list>", "nan")
    assert len(facts["text"]) == 200


def test_errors_and_odd_characters_stay_on_one_line(stream):
    try:
        raise ValueError("broken\nin two")
    except ValueError:
        logger.exception("it failed: %s", "ü\n☃")
    (line,) = lines(stream)
    assert line["message"] == "it failed: ü\n☃"
    assert "ValueError: broken" in line["error"]


def test_asking_twice_gives_one_handler(stream):
    again = io.StringIO()
    log_json(again, level="WARNING")
    logger.warning("once")
    logger.info("not at all")
    assert [line["message"] for line in lines(again)] == ["once"]
    assert stream.getvalue() == ""
    assert sum(isinstance(handler.formatter, JsonFormatter) for handler in logger.handlers) == 1


def test_a_request_leaves_no_word_and_no_token_in_logs_and_metrics(stream, telemetry, tmp_path):
    transformers = pytest.importorskip("transformers")
    import dynaxx as dx
    from dynaxx.policy import Policy
    from dynaxx.telemetry.snapshot import Snapshot
    from tiny import save_tiny_model

    model = transformers.AutoModelForCausalLM.from_pretrained(save_tiny_model(tmp_path)).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    facts = {"model_type": "llama", "layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 16}
    rule = {"attention": {"kind": "sliding_window", "window": 64}}
    policy = Policy.model_validate({"model": facts, "rules": [rule], "block_size": 16, "dense_below": 64})
    prompt = "my account number is 4929551 and my name is Zebulon. " * 20
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    logger.setLevel("DEBUG")
    with dx.apply(model, policy) as handle, torch.no_grad():
        model(ids)
        assert handle.stats()["sparse_calls"]
    said = stream.getvalue() + json.dumps(Snapshot.of(telemetry).to_document())
    assert "Zebulon" not in said
    assert "4929551" not in said
    assert str(ids[0, :4].tolist())[1:-1] not in said
