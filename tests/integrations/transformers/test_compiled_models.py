# SPDX-License-Identifier: Apache-2.0
"""Compiled models under a handle compile once, without a graph break, and behave like uncompiled ones in every call."""

import inspect

import pytest
import torch
import transformers
from small_models import SPARSE, close, llama, logits, policy_for, tokens

import dynaxx as dx
from dynaxx.integrations.transformers import compiled, decoder
from dynaxx.integrations.transformers.calls import interface, layer
from dynaxx.integrations.transformers.calls.border import BORDERS
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


@pytest.mark.parametrize("own_pattern", [False, True])
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
        assert own_pattern or handle.stats()["sparse_calls"] > 6


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
    assert not decoder.is_exporting()
    for module in (compiled, lazy, interface, layer):
        assert "torch.compiler.is_exporting" not in inspect.getsource(module)
    for function in (compiled.attend_compiled, interface.attention, lazy.mask_maker()):
        assert not [
            line for line in inspect.getsource(function).splitlines() if line.split()[:1] in (["import"], ["from"])
        ]
