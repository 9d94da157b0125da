# SPDX-License-Identifier: Apache-2.0
"""Losses by chunks of logits are those of all logits at once."""

import pytest
import torch

pytest.importorskip("transformers")

from dynaxx.lab import perplexity
from tiny import llama, tokens


@pytest.mark.parametrize("length", [2, 16, 17, 18, 50])
@pytest.mark.parametrize("batch", [1, 3])
def test_losses_are_those_of_all_logits(monkeypatch, length, batch):
    monkeypatch.setattr(perplexity, "ROWS", 16)
    model, ids = llama(), tokens(batch, length)
    found = perplexity.token_losses(model, ids)
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits.double()
    expected = -logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_perplexity_is_the_exponential_of_the_mean_loss():
    assert perplexity.perplexity(torch.tensor([[0.0, 2.0]])) == pytest.approx(2.718281828)
