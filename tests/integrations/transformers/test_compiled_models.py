# SPDX-License-Identifier: Apache-2.0
"""Compiled models under a handle compile once, without a graph break, and behave like uncompiled ones in every call."""

import copy
import gc
import importlib
import inspect
import pickle

import pytest
import torch
import transformers
from functorch.compile import make_boxed_compiler
from small_models import SPARSE, close, llama, logits, policy_for, tokens
from torch._dynamo.backends.common import aot_autograd

import dynaxx as dx
from dynaxx.derivatives import is_exporting
from dynaxx.integrations.transformers import compiled as compiled_calls
from dynaxx.integrations.transformers import forward_context
from dynaxx.integrations.transformers.calls import interface, layer
from dynaxx.integrations.transformers.calls.own_planning import BORDERS
from dynaxx.integrations.transformers.decoder import with_cache
from dynaxx.integrations.transformers.masks import lazy
from dynaxx.integrations.transformers.masks.runs import MaskRun, read_window

LENGTHS = (160, 128, 96, 144, 100, 81, 90, 112)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class CountingBackend:
    """Run graphs without compilation, and count them."""

    graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph


def test_a_compiled_model_runs_sparse_at_every_length_with_one_compile():
    model, backend = llama(), CountingBackend()
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE))) as handle:
        compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
        for seqlen in LENGTHS:
            ids = tokens(2, seqlen)
            close(logits(compiled, input_ids=ids, use_cache=False), logits(model, input_ids=ids, use_cache=False))
        assert backend.graphs == 1
        stats = handle.stats()
        assert stats["sparse_calls"] == 2 * 3 * len(LENGTHS)
        assert not stats["dense_calls"]


def test_padded_rows_are_as_without_a_compiler():
    model, ids = llama(), tokens(2, 120)
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE))):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        arguments = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
        close(logits(compiled, **arguments)[mask.bool()], logits(model, **arguments)[mask.bool()])


@pytest.mark.parametrize("own_pattern", [pytest.param(False, marks=pytest.mark.slow), True])
def test_gradients_of_a_compiled_model_are_those_of_the_model(own_pattern):
    model, ids = llama().train(), tokens(2, 150)
    policy = None if own_pattern else policy_for(model, dx.Rule.of(SPARSE))
    with dx.apply(model, policy) as handle:
        model(ids, labels=ids).loss.backward()
        wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        compiled(ids, labels=ids).loss.backward()
        for name, parameter in model.named_parameters():
            close(parameter.grad, wanted[name])
        assert own_pattern or handle.stats()["sparse_calls"] == 6, "the backward pass computes no call again"
        assert len(compiled_calls.RECORDINGS) == 0


def test_generate_compiles_its_steps_and_the_prompt_runs_sparse():
    """With a static cache, transformers runs the prompt eagerly and every further token in compiled code."""
    model, ids = llama(), tokens(1, 100)
    arguments = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE))) as handle:
        wanted = model.generate(ids, disable_compile=True, **arguments)
        sparse = handle.stats()["sparse_calls"]
        config = transformers.CompileConfig(backend="eager", fullgraph=True, mode=None)
        config._compile_all_devices = True
        assert torch.equal(model.generate(ids, compile_config=config, **arguments), wanted)
        assert handle.stats()["sparse_calls"] == 2 * sparse > 0


def test_a_removed_handle_says_so_and_a_new_compile_is_dense():
    model, ids = llama(), tokens(1, 96)
    dense = logits(model, input_ids=ids, use_cache=False)
    handle = dx.apply(model, policy_for(model, dx.Rule.of(SPARSE)))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    logits(compiled, input_ids=ids, use_cache=False)
    handle.remove()
    close(logits(compiled, input_ids=ids, use_cache=False), dense)


def test_the_kill_switch_reaches_compiled_code():
    model, ids = llama(), tokens(1, 96)
    dense = logits(model, input_ids=ids, use_cache=False)
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE))) as handle:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        sparse = logits(compiled, input_ids=ids, use_cache=False)
        assert not torch.allclose(sparse, dense, atol=1e-3)
        handle.kill_switch.engage()
        close(logits(compiled, input_ids=ids, use_cache=False), dense)
        handle.kill_switch.release()
        close(logits(compiled, input_ids=ids, use_cache=False), sparse)


def mistral(window=40):
    config = transformers.MistralConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=window, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.MistralForCausalLM(config).eval()


@pytest.mark.parametrize("padded", [0, 70])
def test_windows_of_a_compiled_model_run_on_the_kernels(padded, monkeypatch):
    """A compiled model has plain masks, from which the window and left padding are read."""
    monkeypatch.setitem(BORDERS["cpu"], "masked", 64)
    model, ids = mistral(), tokens(2, 300)
    mask = torch.ones_like(ids)
    mask[0, :padded] = 0
    arguments = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    wanted = logits(model, **arguments)
    with dx.apply(model) as handle:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        close(logits(compiled, **arguments)[mask.bool()], wanted[mask.bool()])
        assert handle.stats()["own_pattern_calls"] == 2


@pytest.mark.parametrize("window", [1, 7, 40, 400])
@pytest.mark.parametrize("cached", [0, 33])
def test_a_window_is_read_from_a_mask(window, cached):
    q, k = torch.arange(cached, 130)[:, None], torch.arange(130)
    mask = (k <= q) & (k > q - window)
    pads = mask & (k >= 50)
    assert read_window(mask[None], window) == [
        [MaskRun(0, 130 - cached, 0 if not cached else max(0, cached - window + 1), 130, True)]
    ]
    own = [] if cached >= 50 else [MaskRun(0, 50 - cached, 0, 0, False)]
    assert read_window(pads[None], window) == [[*own, MaskRun(50 - cached, 130 - cached, 50, 130, True)]]
    for wrong in (mask | (k == 100), mask & (k != 60), (k > q - window).expand_as(mask), mask.roll(1, 1)):
        if not torch.equal(wrong, mask):
            assert read_window(wrong[None], window) is None
    assert read_window(mask[None], window + 1) is None or window >= 130
    assert read_window(mask.new_zeros(1, 5, 9), window) == [[MaskRun(0, 5, 0, 0, False)]]


def test_traced_code_asks_torch_nothing_that_compilers_answer_wrongly():
    """torch.compile of 2.11 answers `is_exporting` with True, and breaks the graph at an import."""
    assert not is_exporting()
    for module in (compiled_calls, lazy, interface, layer):
        assert "torch.compiler.is_exporting" not in inspect.getsource(module)
    for function in (compiled_calls.attend_compiled, interface.attention, lazy.mask_maker()):
        assert not [
            line for line in inspect.getsource(function).splitlines() if line.split()[:1] in (["import"], ["from"])
        ]


def graph_of(model, **arguments):
    """Return the graph that a compiler gets of a call, after dead code was removed."""
    found = []
    backend = aot_autograd(fw_compiler=make_boxed_compiler(lambda graph, inputs: found.append(graph) or graph.forward))
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(**arguments)
    (graph,) = found
    return graph.graph


def attention_calls(graph):
    return [node for node in graph.nodes if node.target is torch.ops.dynaxx.layer_attention.default]


def whole_masks(graph, seqlen):
    return [node for node in graph.nodes if tuple(getattr(node.meta.get("val"), "shape", ()))[-2:] == (seqlen, seqlen)]


@pytest.mark.parametrize(
    "arguments",
    [{"attention_mask": True}, *(pytest.param({"use_cache": use}, marks=pytest.mark.slow) for use in (False, True))],
)
def test_the_graph_of_a_causal_model_has_no_whole_mask_and_no_copies(arguments):
    model, ids = llama(), tokens(2, 160)
    arguments = {key: torch.ones_like(ids) if key == "attention_mask" else x for key, x in arguments.items()}
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE))):
        graph = graph_of(model, input_ids=ids, **arguments)
    calls = attention_calls(graph)
    assert len(calls) == 3
    assert not whole_masks(graph, 160)
    assert len({call.args[4] for call in calls}) == 1, "all layers share one padding mask"
    copies = (torch.ops.aten.clone.default, torch.ops.aten.contiguous.default, torch.ops.aten._to_copy.default)
    assert not [x for call in calls for x in call.args[:3] if x.target in copies]


def test_other_masks_are_computed_once():
    model, ids = mistral(), tokens(2, 300)
    with dx.apply(model):
        graph = graph_of(model, input_ids=ids, use_cache=False)
    (mask,) = {call.args[3] for call in attention_calls(graph)}
    assert mask.target is torch.ops.dynaxx.made_once.default


@pytest.mark.slow
def test_masks_are_read_once_per_pass(monkeypatch):
    reads = []
    causal_runs = forward_context.causal_runs
    monkeypatch.setattr(forward_context, "causal_runs", lambda *given: reads.append(given) or causal_runs(*given))
    monkeypatch.setattr(forward_context, "read_mask", None)
    model, ids = llama().train(), tokens(2, 120)
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE))):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        loss = compiled(ids, attention_mask=mask, labels=ids, use_cache=False).loss
        assert len(reads) == 1
        loss.backward()
        assert len(reads) == 1


@pytest.mark.slow
def test_a_graph_break_between_mask_and_layers_changes_nothing():
    model, ids = llama(), tokens(1, 120)
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE))) as handle:
        wanted = logits(model, input_ids=ids, use_cache=False)
        model.model.layers[1].register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
        close(logits(torch.compile(model, backend="eager"), input_ids=ids, use_cache=False), wanted)
        assert handle.stats()["sparse_calls"] == 6


@pytest.mark.slow
def test_chunks_of_a_prompt_run_over_a_cache():
    """The second chunk follows cached keys, in a cache that grows and in one of a fixed length."""
    model, ids = llama(), tokens(1, 200)
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE))) as handle, torch.no_grad():
        for make in (
            transformers.DynamicCache,
            lambda: transformers.StaticCache(config=model.config, max_cache_len=256),
        ):
            outs = []
            for run in (model, torch.compile(model, backend="eager", fullgraph=True)):
                cache = make()
                handle.reset_stats()
                outs.append([run(part, **with_cache(model, cache)).logits for part in ids.split(120, 1)])
                assert handle.stats()["sparse_calls"] == 6, handle.stats()
            close(torch.cat(outs[1], 1), torch.cat(outs[0], 1))


def test_other_models_do_not_make_a_model_compile_again():
    model, other, backend, ids = llama(), llama(), CountingBackend(), tokens(1, 120)
    policy = policy_for(model, dx.Rule.of(SPARSE))
    handle = dx.apply(other, policy)
    with dx.apply(model, policy):
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        logits(compiled, input_ids=ids, use_cache=False)
        handle.remove()
        del other, handle
        gc.collect()
        with dx.apply(llama(), policy):
            logits(compiled, input_ids=ids, use_cache=False)
    assert backend.graphs == 1


@pytest.mark.slow
def test_calls_that_are_certain_to_be_dense_are_traced():
    """They cost nothing then. A policy with another border is compiled once more, and nothing else is."""
    model, ids = llama(), tokens(1, 120)
    dense, backend = logits(model, input_ids=ids, use_cache=False), CountingBackend()
    policy = policy_for(model, dx.Rule.of(SPARSE))
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE), dense_below=121)) as handle:
        assert not attention_calls(graph_of(model, input_ids=ids, use_cache=False))
        torch.compiler.reset()
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        assert torch.equal(logits(compiled, input_ids=ids, use_cache=False), dense)
        handle.replace(policy)
        assert not torch.allclose(logits(compiled, input_ids=ids, use_cache=False), dense, atol=1e-3)
        handle.replace(policy_for(model, dx.Rule.of(dx.Sink(1) | dx.SlidingWindow(20))))
        logits(compiled, input_ids=ids, use_cache=False)
        assert backend.graphs == 2
        assert handle.stats()["sparse_calls"] == 6


def test_a_copy_of_a_model_is_compiled_dense():
    model, ids = llama(), tokens(1, 120)
    dense = logits(model, input_ids=ids, use_cache=False)
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE))) as handle:
        copied = copy.deepcopy(model)
        compiled = torch.compile(copied, backend="eager", fullgraph=True)
        close(logits(compiled, input_ids=ids, use_cache=False), dense)
        assert handle.stats()["sparse_calls"] == 0
        assert pickle.loads(pickle.dumps(model.model.layers[0].self_attn)).dynaxx_layer == 0
    assert not hasattr(model.model.layers[0].self_attn, "dynaxx_layer")


@pytest.mark.slow
def test_a_second_backward_pass_computes_the_calls_again():
    model, ids = llama().train(), tokens(2, 120)
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE))) as handle:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        with torch._functorch.config.patch(donated_buffer=False):
            loss = compiled(ids, labels=ids).loss
            loss.backward(retain_graph=True)
            wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
            assert handle.stats()["sparse_calls"] == 3
            loss.backward()
        assert handle.stats()["sparse_calls"] == 6
        for name, parameter in model.named_parameters():
            close(parameter.grad, 2 * wanted[name])


@pytest.mark.slow
def test_checkpointed_layers_of_a_compiled_model_have_the_same_gradients():
    model, ids = llama().train(), tokens(2, 120)
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE))):
        model(ids, labels=ids, use_cache=False).loss.backward()
        wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        name = "activation_checkpointing_enable"  # from transformers 5.24 on
        getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")()
        compiled = torch.compile(model, backend="aot_eager")
        compiled(ids, labels=ids, use_cache=False).loss.backward()
        for name, parameter in model.named_parameters():
            close(parameter.grad, wanted[name])


@pytest.mark.slow
def test_the_default_compiler_gives_the_same_logits_and_gradients():
    """It writes into memory of tensors that it has no more use for."""
    model, ids = llama().train(), tokens(2, 150)
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE))) as handle:
        wanted = model(ids, labels=ids)
        wanted.loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        for _ in range(2):
            found = torch.compile(model, fullgraph=True)(ids, labels=ids)
            close(found.logits, wanted.logits)
            found.loss.backward()
            for name, parameter in model.named_parameters():
                close(parameter.grad, grads[name])
            model.zero_grad()
        assert handle.stats()["sparse_calls"] == 9


@pytest.mark.slow
def test_a_model_that_is_compiled_layer_by_layer_runs_sparse():
    model, ids = llama(), tokens(2, 120)
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE))) as handle:
        wanted = logits(model, input_ids=ids, attention_mask=mask)
        handle.reset_stats()
        for each in model.model.layers:
            each.compile(backend="eager")
        close(logits(model, input_ids=ids, attention_mask=mask)[mask.bool()], wanted[mask.bool()])
        assert handle.stats()["sparse_calls"] == 3


def test_advice_of_inductor_on_a_gpu_fails_no_test(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    importlib.import_module("torch._inductor.compile_fx")._warn_tf32_disabled.__wrapped__()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_logits_and_gradients_of_a_compiled_model_on_a_gpu():
    """At several lengths, in fp32, with a static rule, which rounding does not change."""
    model, rule = llama().cuda().train(), dx.Rule.of(dx.Sink(4) | dx.SlidingWindow(40))
    with dx.apply(model, policy_for(model, rule)) as handle:
        compiled = torch.compile(model, fullgraph=True, dynamic=True)
        for seqlen in (300, 257, 512):
            ids = tokens(2, seqlen).cuda()
            found, grads = [], []
            for run in (model, compiled):
                found.append(run(ids, labels=ids, use_cache=False))
                found[-1].loss.backward()
                grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
                model.zero_grad()
            torch.testing.assert_close(found[1].logits, found[0].logits, atol=1e-3, rtol=1e-3)
            for name, grad in grads[0].items():
                largest = float(grad.abs().max())
                torch.testing.assert_close(grads[1][name], grad, atol=2e-3 * largest, rtol=2e-2)
        assert handle.stats()["sparse_calls"] == 2 * 3 * 3
        assert len(compiled_calls.RECORDINGS) == 0
