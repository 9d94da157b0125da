# SPDX-License-Identifier: Apache-2.0
"""Helpers that compare encoders under dynaxx with transformers' own code."""

import copy

import torch

from dynaxx.integrations.encoders import apply_to_encoder

SERVED = {"sparse_calls": 2, "dense_calls": {}}  # by two layers


@torch.no_grad()
def hidden(model, inputs):
    return model(**inputs).last_hidden_state


def assert_as_exact_as_transformers(model, inputs):
    """Check that dynaxx's error, against transformers in fp64, is at most twice that of transformers in fp32, and
    that removal restores the model.
    """
    own = hidden(model, inputs)
    with apply_to_encoder(model) as handle:
        ours = hidden(model, inputs)
        assert handle.stats() == SERVED
    assert torch.equal(hidden(model, inputs), own)
    exact = hidden(copy.deepcopy(model).double(), inputs)
    limit = 2 * ((own - exact).abs().max() + exact.abs().max() * torch.finfo(torch.float32).eps)
    assert not ours.isnan().any()
    assert (ours - exact).abs().max() <= limit
