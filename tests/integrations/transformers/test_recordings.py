# SPDX-License-Identifier: Apache-2.0
"""Recordings give gradients from the tensors that the backward op gets, and live as long as their tickets."""

import pytest
import torch

import dynaxx as dx
from dynaxx.integrations.transformers.recordings import Recording, Recordings

SEQLEN = 50
LAYOUT = dx.SlidingWindow(20).layout(SEQLEN, block_size=16)


def attend(q, k, v, sinks=None):
    """Attend from (B, H, L, D) to (B, L, H, D), as a layer does."""
    return dx.sparse_attention(*(x.transpose(1, 2) for x in (q, k, v)), LAYOUT, sinks=sinks)


def separate():
    return [torch.randn(1, heads, SEQLEN, 16) for heads in (4, 2, 2)]


def tokens_first():
    return [torch.randn(1, SEQLEN, heads, 16).transpose(1, 2) for heads in (4, 2, 2)]


def columns_of_one():
    whole = torch.randn(1, SEQLEN, 8, 16).transpose(1, 2)
    return [whole[:, :4], whole[:, 4:6], whole[:, 6:]]


def parts_of_one():
    whole = torch.randn(8 * SEQLEN * 16)
    q, k, v = whole.split([heads * SEQLEN * 16 for heads in (4, 2, 2)])
    return [x.view(1, -1, SEQLEN, 16) for x in (q, k, v)]


def gradients_of(inputs, do):
    leaves = [x.clone().requires_grad_() for x in inputs]
    attend(*leaves).backward(do)
    return [x.grad for x in leaves]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("make", [separate, tokens_first, columns_of_one, parts_of_one])
def test_gradients_do_not_depend_on_what_the_memory_of_the_forward_op_holds_later(make, moved, sinks):
    torch.manual_seed(0)
    inputs, do = make(), torch.randn(1, SEQLEN, 4, 16)
    inputs += [torch.randn(4)] if sinks else []
    wanted = gradients_of(inputs, do)
    out, recording = Recording.of(attend, inputs)
    given = [x.clone(memory_format=torch.contiguous_format if moved else torch.preserve_format) for x in (*inputs, out)]
    torch.testing.assert_close(out, attend(*inputs))
    for x in (*inputs, out):
        x.untyped_storage().fill_(0xFF)  # the compiler reuses it
    torch.testing.assert_close(list(recording.gradients(do, given)), wanted)


def test_a_call_without_gradients_has_none():
    out, recording = Recording.of(lambda q: torch.zeros(3), [torch.randn(2)])
    assert recording.gradients(out, (torch.randn(2), out)) == (None,)


def test_a_recording_lives_as_long_as_its_ticket():
    recordings, inputs = Recordings(), separate()
    recording = lambda: Recording.of(attend, inputs)[1]
    ticket = recordings.keep(recording(), inputs[0].device)
    alias = ticket.detach()
    del ticket
    assert recordings.take(alias) is not None
    assert recordings.take(alias) is None, "it is used once"
    dropped = recordings.keep(recording(), inputs[0].device)
    del dropped
    kept = recordings.keep(recording(), inputs[0].device)
    assert len(recordings) == 1
    assert recordings.take(kept) is not None
    assert recordings.take(torch.empty(1, dtype=torch.uint8)) is None
