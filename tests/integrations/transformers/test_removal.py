# SPDX-License-Identifier: Apache-2.0
"""A handle is removed whatever happened to its model: changed structures, copies, pickles, tracing, running passes."""

import copy
import logging
import pickle
import sys
import threading
import time
import warnings
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from small_models import close, llama, logits, policy_for, tokens

import dynaxx as dx
from dynaxx.integrations.transformers.next_token import comparing
from dynaxx.policy import Guard

transformers = pytest.importorskip("transformers")
RULE = dx.Rule.of(dx.SlidingWindow(24))
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["sdpa", "eager"])


def built(implementation):
    model = llama()
    model.set_attn_implementation(implementation)
    return model


def applied(model, **options):
    return dx.apply(model, policy_for(model, RULE, **options))


def names(model):
    return {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}


def duplicate(model):
    model.model.layers.append(copy.deepcopy(model.model.layers[-1]))


def keep_a_copy(model):
    """Copy a layer beside the original, as peft's `modules_to_save` does."""
    model.model.layers[1].copy_of_attention = copy.deepcopy(model.model.layers[1].self_attn)


def drop(model):
    model.config.num_hidden_layers = 2
    model.model.layers = model.model.layers[:2]


def add_a_model(model):
    model.draft = built("eager")


@IMPLEMENTATIONS
@pytest.mark.parametrize("change", [duplicate, keep_a_copy, drop, add_a_model])
def test_structures_that_changed(implementation, change):
    model, other, ids = built(implementation), built(implementation), tokens(2, 90)
    handle = applied(model)
    logits(model, input_ids=ids)
    change(model)
    logits(model, input_ids=ids)
    handle.remove()
    change(other)
    assert names(model) == names(other)
    assert not any(hasattr(module, "dynaxx_layer") for module in model.modules())
    assert torch.equal(logits(model, input_ids=ids), logits(other, input_ids=ids))


@pytest.mark.parametrize(("implementation", "plain_name"), [("sdpa", False), ("eager", False), ("eager", True)])
def test_copies_have_their_own_handles(implementation, plain_name, monkeypatch):
    """Also where the name cannot say what was before: in versions of torch.compile that read plain names alone."""
    if plain_name:
        monkeypatch.setattr("dynaxx.integrations.transformers.decoder.COMPILERS_READ_NAMES", False)
    model, ids = built(implementation), tokens(2, 90)
    dense = logits(model, input_ids=ids)
    with applied(model) as handle:
        sparse = logits(model, input_ids=ids)
        other = copy.deepcopy(model)
        assert torch.equal(logits(other, input_ids=ids), dense)
        with applied(other) as second:
            assert second.before == implementation
            assert torch.equal(logits(other, input_ids=ids), sparse)
        assert names(other) == {implementation}
        assert torch.equal(logits(model, input_ids=ids), sparse)
        assert handle.stats()["sparse_calls"] == 6


@IMPLEMENTATIONS
def test_pickles_need_no_dynaxx_and_warn(implementation, caplog):
    if torch.__version__ < "2.13":
        pytest.skip("its compiler reads no names that pickle as others")
    model, ids = built(implementation), tokens(2, 90)
    dense = logits(model, input_ids=ids)
    with applied(model), caplog.at_level(logging.WARNING, "dynaxx"):
        stored = pickle.dumps(model)
    assert "is pickled with its original attention" in caplog.text
    assert b"dynaxx." not in stored
    loaded = pickle.loads(stored)
    assert names(loaded) == {implementation}
    assert torch.equal(logits(loaded, input_ids=ids), dense)


def test_worker_processes_keep_the_policy():
    """A process that `multiprocessing` spawns gets the model as it is under the handle."""
    model, ids = llama(), tokens(2, 90)
    with applied(model):
        sparse = logits(model, input_ids=ids)
        sent = ForkingPickler.dumps(model)
    there = pickle.loads(sent)
    for _ in range(2):
        assert torch.equal(logits(there, input_ids=ids), sparse)
    assert (logits(model, input_ids=ids) - sparse).abs().max() > 1e-2


@IMPLEMENTATIONS
def test_a_traced_model_has_its_original_attention(implementation):
    model, ids = built(implementation), tokens(2, 90)
    model.config.use_cache = False
    dense = logits(model, input_ids=ids)
    with applied(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model, (ids,), strict=False, check_trace=False)
    close(traced(ids)["logits"], dense)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_layers_attend_as_in_the_forward_pass_or_raise(use_reentrant):
    model, ids = llama().train(), tokens(2, 90)

    def gradients(between=lambda: None):
        model.zero_grad()
        loss = model(ids, labels=ids, use_cache=False).loss
        between()
        loss.backward()
        return [each.grad.clone() for each in model.parameters()]

    dense = gradients()
    with applied(model):
        sparse = gradients()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions have another name for it
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    close(gradients(), dense)
    with applied(model):
        close(gradients(), sparse)
    assert (sparse[1] - dense[1]).abs().max() > 1e-6
    handle = applied(model)
    with pytest.raises(RuntimeError, match="call backward"):
        gradients(handle.remove)
    close(gradients(), dense)
    assert not any(layer.self_attn._forward_pre_hooks for layer in model.model.layers)
    handles = []
    close(gradients(lambda: handles.append(applied(model))), dense)
    assert handles[0].stats()["dense_calls"] == {"outside of a forward pass": 3}
    handles[0].remove()


def test_running_passes_keep_their_policy_through_remove():
    model, ids = llama(), tokens(1, 90)
    dense = logits(model, input_ids=ids)
    reached, go_on, found = threading.Event(), threading.Event(), []

    def pause(module, *_):
        if threading.current_thread() is not threading.main_thread():
            reached.set()
            go_on.wait(30)

    hook = model.model.layers[1].register_forward_pre_hook(pause)
    handle = applied(model)
    sparse = logits(model, input_ids=ids)
    worker = threading.Thread(target=lambda: found.append(logits(model, input_ids=ids)))
    remover = threading.Thread(target=handle.remove)
    worker.start()
    assert reached.wait(30)
    remover.start()
    remover.join(0.2)
    assert remover.is_alive()
    go_on.set()
    remover.join(30)
    worker.join(30)
    hook.remove()
    assert torch.equal(found[0], sparse)
    assert torch.equal(logits(model, input_ids=ids), dense)


def test_remove_is_refused_within_a_pass_and_works_after_failed_ones():
    model, ids = llama(), tokens(1, 90)
    handle = applied(model)
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: handle.remove())
    with pytest.raises(RuntimeError, match="between forward passes"):
        logits(model, input_ids=ids)
    hook.remove()
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        logits(model, input_ids=ids)
    hook.remove()
    handle.remove()
    assert names(model) == {"sdpa"}


def test_remove_ends_a_comparison_that_is_about_to_start():
    """The guard's thread compares requests with the dense model by passes of the same model."""
    model, ids = llama(), tokens(1, 90)
    handle = applied(model, guard=Guard(kl_sample=1.0))
    reached = threading.Event()

    def pause(*_):
        if comparing():
            reached.set()
            time.sleep(0.3)

    hook = model.model.register_forward_pre_hook(pause, prepend=True)
    logits(model, input_ids=ids)
    assert reached.wait(30)
    remover = threading.Thread(target=handle.remove, daemon=True)
    remover.start()
    remover.join(30)
    hook.remove()
    assert not remover.is_alive()


def test_a_handle_removed_twice_leaves_a_later_one_alone():
    model, ids = llama(), tokens(1, 90)
    first = applied(model)
    sparse = logits(model, input_ids=ids)
    first.remove()
    second = applied(model)
    first.remove()
    assert second.active
    assert not first.active
    assert torch.equal(logits(model, input_ids=ids), sparse)
    second.remove()
    assert names(model) == {"sdpa"}


def test_each_pass_is_sparse_or_dense_as_a_whole_while_threads_apply_and_remove():
    model, ids = llama(), tokens(1, 90)
    dense = logits(model, input_ids=ids)
    with applied(model):
        sparse = logits(model, input_ids=ids)
    found, failures, until = [], [], time.monotonic() + 3.0

    def run():
        while time.monotonic() < until:
            found.append(logits(model, input_ids=ids))

    def change():
        while time.monotonic() < until:
            try:
                applied(model).remove()
            except ValueError as error:
                failures.extend([] if "policy already" in str(error) else [error])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # which makes races likely
    threads = [threading.Thread(target=each) for each in (run, run, change, change)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
    assert all(min((x - dense).abs().max(), (x - sparse).abs().max()) < 1e-4 for x in found)
    assert names(model) == {"sdpa"}
    assert torch.equal(logits(model, input_ids=ids), dense)
