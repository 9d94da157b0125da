# SPDX-License-Identifier: Apache-2.0
"""A prepared call gives the same bits as the call that it repeats, and refuses any other call."""

import itertools

import pytest
import torch

import dynaxx as dx
from dynaxx.ops.prepared import layer as prepared
from dynaxx.ops.prepared.layer import prepare_layout, prepare_rule, prepared_layout

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
RULES = {
    "hybrid": dx.SlidingWindow(128) | dx.Sink(64) | dx.TopK(0.2),
    "alone": dx.TopK(3, per="head"),
    "mass": dx.SlidingWindow(64) | dx.TopP(0.8),
    "threshold": dx.Threshold(0.3),
    "per head": dx.Sink(16) | dx.TopK((0.1, 0.2, 0.3, 0.4)),
    "means": dx.TopK(0.2, dx.MeanPool()),
}
BY_TORCH = ("means",)  # torch computes a part of their scores, so that they are not repeated
PATTERNS = {
    "causal": dx.Causal(),
    "window": dx.SlidingWindow(100),
    "global": dx.SlidingWindow(64) | dx.GlobalTokens((0, 700, 1100), symmetric=True),  # split rows
}


def drawn(seed=0, seqlen=1200, head_dim=64, dtype=torch.bfloat16, batch=1, device="cuda", heads=(4, 2)):
    gen = torch.Generator(device).manual_seed(seed)
    draw = lambda number: torch.randn(batch, number, seqlen, head_dim, generator=gen, device=device).to(dtype)
    return tuple(draw(number).transpose(1, 2) for number in (heads[0], heads[1], heads[1]))


def replays():
    """Return the number of prepared calls that have recordings."""
    from dynaxx.kernels.runtime import launch_cache

    nothing = (launch_cache.CALLED_ONCE, launch_cache.NOT_REPLAYABLE)
    whole = (prepared._attend, prepared._choose_and_attend)
    return sum(each not in nothing and call in whole for (call, *_), each in launch_cache.recordings.items())


def test_nothing_is_prepared_on_a_cpu():
    q, k, v = drawn(device="cpu", seqlen=256, dtype=torch.float32)
    layout = dx.select_blocks(q, k, RULES["hybrid"])
    assert prepare_rule(RULES["hybrid"], layout, q, k, v) is None
    assert prepare_layout(layout, q, k, v) is None
    assert prepared_layout(layout, q, k, v) is None


def test_calls_that_are_more_than_their_tensors_are_not_served(monkeypatch):
    monkeypatch.setattr(prepared, "_repeats", lambda *tensors: True)
    q, k, v = drawn(device="cpu", seqlen=256, dtype=torch.float32)
    layout = dx.Causal().layout(256)
    call = prepare_layout(layout, q, k, v)
    assert call is not None
    assert call.backend == "cpu" or call.backend == "reference"
    assert prepared_layout(layout, q, k, v) is call
    assert call.serves(q, k, v)
    assert not call.serves(q[:, :128], k, v)
    assert not call.serves(q.double(), k, v)
    assert not call.serves(q, k, v.double())
    assert not call.serves(q.to("meta"), k, v)
    assert not call.serves(q.clone().requires_grad_(), k, v)
    with torch.no_grad():
        assert call.serves(q.clone().requires_grad_(), k, v)
    assert not call.serves(torch.nn.Buffer(q).as_subclass(Sub), k, v)
    seen = []
    torch.func.vmap(lambda x: seen.append(call.serves(x, k, v)) or x)(q[None])
    assert seen == [False]
    layout.kv_indices.add_(0)
    assert prepared_layout(layout, q, k, v) is None


class Sub(torch.Tensor):
    pass


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("rule", "block", "head_dim"), [*itertools.product(RULES, (64, 128), (64, 128))])
def test_a_rule_repeated(rule, block, head_dim):
    name, rule, before = rule, RULES[rule], replays()
    for seed in range(5):
        q, k, v = drawn(seed, head_dim=head_dim)
        layout = dx.select_blocks(q, k, rule, block_size=block)
        out = dx.sparse_attention(q, k, v, layout)
        if seed == 0:
            call = prepare_rule(rule, layout, q, k, v)
        assert call.serves(q, k, v)
        found = call(q, k, v)
        assert found.is_contiguous()
        assert torch.equal(found, out)
    assert (replays() > before) == (name not in BY_TORCH)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("pattern", "dtype"), [*itertools.product(PATTERNS, (torch.bfloat16, torch.float16, torch.float32))]
)
def test_a_layout_repeated(pattern, dtype):
    layout, before = PATTERNS[pattern].layout(1200, block_size=128, device="cuda"), replays()
    for seed in range(4):
        q, k, v = drawn(seed, dtype=dtype, batch=2)
        out = dx.sparse_attention(q, k, v, layout, softcap=20.0)
        call = prepare_layout(layout, q, k, v, softcap=20.0)
        assert torch.equal(call(q, k, v), out)
    assert replays() == before + 1


@needs_gpu
@pytest.mark.gpu
def test_other_strides_and_addresses():
    rule = RULES["hybrid"]
    q, k, v = drawn()
    call = prepare_rule(rule, dx.select_blocks(q, k, rule), q, k, v)
    wide = torch.cat([x.flatten(2) for x in (q, k, v)], -1)
    parts = [x.unflatten(-1, (-1, 64)) for x in wide.split([256, 128, 128], -1)]
    shifted = [x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x) for x in (q, k, v)]  # addresses of 2 bytes
    for given in [parts, shifted, [x.contiguous() for x in (q, k, v)]] * 3:
        expected = dx.sparse_attention(*given, dx.select_blocks(*given[:2], rule))
        assert torch.equal(call(*given), expected)


@needs_gpu
@pytest.mark.gpu
def test_a_repeated_call_in_a_graph():
    rule, (q, k, v) = RULES["hybrid"], drawn()
    call = prepare_rule(rule, dx.select_blocks(q, k, rule), q, k, v)
    call(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(q, k, v)
    for seed in range(3):
        others = drawn(seed)
        for x, other in zip((q, k, v), others, strict=True):
            x.copy_(other)
        graph.replay()
        assert torch.equal(out, dx.sparse_attention(*others, dx.select_blocks(*others[:2], rule)))


@needs_gpu
@pytest.mark.gpu
def test_models_repeat_layers():
    from transformers import LlamaConfig, LlamaForCausalLM

    from dynaxx.integrations.transformers import repeats
    from dynaxx.integrations.transformers.apply_policy import model_facts
    from dynaxx.integrations.transformers.calls import layer as layers

    config = LlamaConfig(hidden_size=256, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=99, attn_implementation="sdpa")  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    rules = [dx.Rule.of(RULES["hybrid"], layers=[0, 1, 2]), dx.Rule.of(PATTERNS["window"], layers=[3])]
    policy = dx.Policy(model=model_facts(model), block_size=64, dense_below=0, rules=rules)
    served = []
    repeat, run = layers.Layer._repeat, repeats.RepeatedCall.__call__
    for length in (1000, 700, 1000):
        ids = torch.randint(0, 99, (2, length), device="cuda", generator=torch.Generator("cuda").manual_seed(length))
        outs = []
        for may in (False, True):

            def watched(*given, may=may):
                out, draws = repeat(*given) if may else (None, None)
                served.append(out is not None)
                return out, draws

            def watched_run(*given, may=may):
                out = run(*given) if may else None
                served.extend([True] if out is not None else [])  # otherwise the call is planned
                return out

            with pytest.MonkeyPatch.context() as patch, dx.apply(model, policy) as handle, torch.no_grad():
                patch.setattr(layers.Layer, "_repeat", watched)
                patch.setattr(repeats.RepeatedCall, "__call__", watched_run)
                handle.counts.probe.sample_rate = 0.0
                for _ in range(3):
                    outs.append(model(ids, logits_to_keep=1).logits)
                assert handle.stats()["sparse_calls"] == 12
        assert all(torch.equal(out, outs[0]) for out in outs)
        assert served[12:] == [False] + [True] * 11  # the layout of layer 3 was prepared under the first handle
        served.clear()


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("rule", [
    dx.Sink(64) | dx.SlidingWindow(128) | dx.TopK(0.1, dx.MinMax()),
    dx.SlidingWindow(32) | dx.TopK(3, dx.MeanPool()),
    dx.Sink(16) | dx.SlidingWindow(100),
], ids=["share", "count", "static"])  # fmt: skip
@pytest.mark.parametrize("batch", [1, 3])
def test_steps_of_a_growing_cache(rule, batch, monkeypatch):
    """Every step of a cache that grows beyond two pages equals the step that is not prepared."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from dynaxx.integrations.transformers import repeats
    from dynaxx.integrations.transformers.apply_policy import model_facts
    from dynaxx.integrations.transformers.calls import decode

    config = LlamaConfig(hidden_size=256, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=99, attn_implementation="sdpa")  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    rules = [dx.Rule.of(rule, phase="decode")]
    policy = dx.Policy(model=model_facts(model), block_size=64, dense_below=0, rules=rules)
    ids = torch.randint(0, 99, (batch, 500), device="cuda")
    repeated, repeat, served = decode.LayerSteps._repeat, repeats.repeat_step, []

    def watched(*given):
        out = repeated(*given)
        served.append(out is not None)
        return out

    def watched_repeat(*given):
        out = repeat(*given)
        served.append(out is not None)
        return out

    monkeypatch.setattr(repeats, "repeat_step", watched_repeat)

    found = []
    for function in (lambda *given: None, watched):
        monkeypatch.setattr(decode.LayerSteps, "_repeat", function)
        with dx.apply(model, policy) as handle, torch.no_grad():
            cache, token, logits = model(ids, use_cache=True).past_key_values, ids[:, :1], []
            for _ in range(150):
                logits.append(model(token, past_key_values=cache, use_cache=True).logits)
                token = logits[-1].argmax(-1)
            assert handle.stats()["sparse_calls"] == 450
        found.append(torch.cat(logits))
    assert torch.equal(*found)
    assert sum(served) > 400
