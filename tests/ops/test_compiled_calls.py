# SPDX-License-Identifier: Apache-2.0
"""Functions without an op of their own under torch.compile, and tensors without memory: right, or refused in words."""

import inspect
import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import dynaxx as dx
import dynaxx.integrations.flash_attn
import dynaxx.trained.nn
from dynaxx.integrations.flash_attn import flash_attn_with_kvcache
from interpreter import DEVICE

MARK = "_torchdynamo_disable"
ALONE = "DYNAXX_TEST_COMPILED_CALLS"
SEQLEN = 100
SIZES = dx.trained.NsaSizes(8, 4, 16, 3, 1, 1, 24)
CHOICE = dx.trained.TopKTokens(8)
MODULE = dynaxx.trained.nn.MixtureOfBlockAttention(64, 4, 2, block_size=16, top_k=2).to(DEVICE)
RULE = dx.Sink(1) | dx.TopK(2)


def inputs():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, SEQLEN, heads, 16) for heads in (4, 2, 2))
    index = torch.randn(1, SEQLEN, 3, 8), torch.randn(1, SEQLEN, 8), torch.randn(1, SEQLEN, 3)
    return tuple(x.to(DEVICE) for x in (q, k, v, *index))


def last(x):
    return x[:, -1:].contiguous()


def used_blocks(layout):
    """Return the blocks of all rows. On a GPU there are slots past the last row, whose values mean nothing."""
    return layout.kv_indices[: int(layout.kv_indptr.max())]


def selected(size):
    blocks = torch.randint(0, SEQLEN // 16, (1, SEQLEN, 2, 1), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return lambda q, k, v, *_: dx.trained.selected_attention(q, k, v, blocks, block_size=size)


CALLS = {
    "TopKTokens": lambda q, k, *_: CHOICE.select(q, k),
    "index_tokens": lambda q, k, v, *index: dx.trained.index_tokens(*index, CHOICE),
    "index_loss": lambda q, k, v, *index: dx.trained.index_loss(*index, q, k).loss,
    "select_blocks": lambda q, k, *_: used_blocks(dx.select_blocks(q, k, RULE, block_size=16)),
    "selected blocks": selected(16),
    "selected tokens": selected(1),
    "native": lambda q, k, v, *_: dx.trained.native_sparse_attention(
        q,
        k,
        v,
        (dx.trained.compress(k, SIZES), dx.trained.compress(v, SIZES)),
        torch.ones(1, SEQLEN, 4, 3, device=DEVICE),
        SIZES,
    ),
    "decode": lambda q, k, v, *_: dx.sparse_decode(
        last(q), dx.summarize_pages(dx.PagedCache.contiguous(k, v, page_size=16)), dx.PageBudget(2)
    ),
    "recall": lambda q, k, *_: dx.recall(q, k, dx.Causal().layout(SEQLEN, block_size=16, device=DEVICE)).per_head,
    "module": lambda q, *_: MODULE(q.flatten(2)),
    "kvcache": lambda q, k, v, *_: flash_attn_with_kvcache(last(q), k[:, :96].contiguous(), v[:, :96].contiguous()),
}


@pytest.mark.slow
def test_compiled_calls_in_a_process_of_their_own():
    """Tracing takes ten times as long in a process that has run many other tests."""
    arguments = [
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        __file__,
        "-k",
        "test_a_compiled_call_gives",
    ]
    done = subprocess.run(
        [sys.executable, *arguments], env={**os.environ, ALONE: "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "." * len(CALLS) in done.stdout


@pytest.mark.skipif(ALONE not in os.environ, reason="runs in a process of its own")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_call_gives_what_an_eager_one_gives(name):
    """The compiler must not split a function between taking a tensor's address and the call that reads it."""
    torch._dynamo.reset()
    found = torch.compile(CALLS[name], backend="aot_eager")(*inputs())
    torch.testing.assert_close(found, CALLS[name](*inputs()), atol=1e-6, rtol=1e-5)


TRACED = {"sparse_attention", "merge_states", "index_decode", "selected_decode", "longformer", "bigbird", "streaming"}
OPERATIONS = (dx, dx.trained, dynaxx.trained.nn, dynaxx.integrations.flash_attn)


@pytest.mark.parametrize("name", CALLS)
def test_one_graph_is_refused_in_words(name):
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="or compile without fullgraph"):
        torch.compile(CALLS[name], backend="eager", fullgraph=True)(*inputs())


def test_every_public_operation_is_traced_or_says_why_not():
    public = {name: getattr(room, name) for room in OPERATIONS for name in room.__all__}
    silent = {name for name, each in public.items() if inspect.isfunction(each) and not each.__dict__.get(MARK)}
    assert silent == TRACED | {"rotate", "apply", "load_policy", "save_policy"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("kvcache", "module")])
def test_tensors_without_memory_are_refused(name):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for given in ([mode.from_tensor(x) for x in inputs()], inputs()):
            with pytest.raises(NotImplementedError, match="needs tensors with memory of their own, got FakeTensor"):
                CALLS[name](*given)
    with pytest.raises(NotImplementedError, match="needs tensors with memory of their own, got ProxyTorchDispatchMode"):
        make_fx(CALLS[name])(*inputs())


@pytest.mark.parametrize("transform", [torch.func.vmap, lambda call: torch.func.grad(lambda *x: call(*x).sum())])
@pytest.mark.parametrize("name", ["TopKTokens", "index_tokens", "kvcache"])
def test_transforms_are_refused(name, transform):
    given = [x[None] for x in inputs()] if transform is torch.func.vmap else inputs()
    with pytest.raises(NotImplementedError, match="has no rules for torch"):
        transform(CALLS[name])(*given)


@pytest.mark.filterwarnings("ignore")
def test_layouts_that_are_cached_under_a_mode_are_real():
    with FakeTensorMode(allow_non_fake_inputs=True):
        dx.SlidingWindow(9).layout(77, block_size=16)
        dx.trained.nsa_spans(SIZES, (0, 77))
    assert type(dx.SlidingWindow(9).layout(77, block_size=16).kv_indices) is torch.Tensor
    assert type(dx.trained.nsa_spans(SIZES, (0, 77)).last_key) is torch.Tensor


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_layout_within_one_graph_is_refused_in_words(is_cached):
    rule = dx.SlidingWindow(11 + is_cached)
    if is_cached:
        rule.layout(SEQLEN, block_size=16, device=DEVICE)
    attend = lambda q, k, v: dx.sparse_attention(q, k, v, rule.layout(SEQLEN, block_size=16, device=DEVICE))
    q, k, v, *_ = inputs()
    torch._dynamo.reset()
    with pytest.raises(Exception, match="pass its result, such as a layout, as an argument"):
        torch.compile(attend, backend="eager", fullgraph=True)(q, k, v)
    torch.testing.assert_close(torch.compile(attend, backend="eager")(q, k, v), attend(q, k, v))
