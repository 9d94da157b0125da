# SPDX-License-Identifier: Apache-2.0
"""Quality is measured on the faster library, times on the user's, and the model is restored."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dynaxx.integrations.onednn import OneDnnLinear, use_onednn
from dynaxx.lab import perplexity as module
from dynaxx.lab.perplexity import fast_linears
from dynaxx.policy import Tolerances


class Model(nn.Sequential):
    device = torch.device("cpu")


@pytest.fixture
def model():
    return Model(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))


def kinds(model):
    return [type(each) for each in model]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_large_models_run_on_the_faster_library_within_the_block(model, monkeypatch):
    monkeypatch.setattr(module, "MIN_PARAMETERS", 1000)
    monkeypatch.setattr(module, "use_onednn", partial(use_onednn, always=True))
    x = torch.randn(40, 64)
    with torch.no_grad():
        expected = model(x)
        with fast_linears(model):
            assert kinds(model) == [OneDnnLinear, nn.ReLU, OneDnnLinear]
            torch.testing.assert_close(model(x), expected)
    assert kinds(model) == [nn.Linear, nn.ReLU, nn.Linear]
    with pytest.raises(KeyError), fast_linears(model):
        raise KeyError
    assert kinds(model) == [nn.Linear, nn.ReLU, nn.Linear], "also after an error"


def test_small_models_and_gpus_stay_as_they_are(model, monkeypatch):
    monkeypatch.setattr(module, "use_onednn", lambda model: pytest.fail("used"))
    with fast_linears(model):
        assert kinds(model) == [nn.Linear, nn.ReLU, nn.Linear]
    monkeypatch.setattr(module, "MIN_PARAMETERS", 0)
    with fast_linears(SimpleNamespace(parameters=model.parameters, device=torch.device("meta"))):
        pass


def test_times_are_not_measured_on_it(monkeypatch):
    """Validation times whole prefills after the block of quality measurements."""
    from dynaxx.lab.validate import comparison, run

    inside, seen = [], {}

    class Block:
        def __init__(self, model):
            pass

        def __enter__(self):
            inside.append(1)

        def __exit__(self, *error):
            inside.pop()

    class Stop(Exception):
        pass

    def speed(self, ids, lengths, share):
        seen["speed"] = bool(inside)
        raise Stop

    monkeypatch.setattr(run, "fast_linears", Block)
    for name in ("text", "noise", "kinds", "retrieval", "repetition"):
        note = lambda self, *_, name=name, **__: seen.update({name: bool(inside)}) or ()
        monkeypatch.setattr(comparison.Comparison, name, note)
    monkeypatch.setattr(comparison.Comparison, "speed", speed)
    monkeypatch.setattr(comparison.Comparison, "applied", lambda self: Block(None))
    monkeypatch.setattr(run, "make_samples", lambda *_: [])
    tokenizer = lambda text, **_: {"input_ids": list(range(5000))}
    config = SimpleNamespace(max_position_embeddings=8192, get_text_config=lambda: config)
    fake = SimpleNamespace(config=config, training=False, eval=lambda: None, train=lambda mode: None)
    policy = SimpleNamespace(border=0, tolerances=Tolerances())
    monkeypatch.setattr(run, "has_sparse_rule", lambda policy: True)
    with pytest.raises(Stop):
        run.validate(fake, tokenizer, policy, "text.\n\n" * 4000)
    assert seen.pop("speed") is False
    assert len(seen) == 5
    assert all(seen.values())
