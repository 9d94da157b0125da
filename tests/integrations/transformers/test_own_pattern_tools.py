# SPDX-License-Identifier: Apache-2.0
"""`dx.apply(model)` beside other tools: LoRA of peft, FSDP2, pipelines, and a smaller model that guesses tokens."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dynaxx as dx
from dynaxx.integrations.transformers.calls import own_planning
from families import family_named, older_transformers
from tiny import save_tiny_model

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def short_border(monkeypatch):
    """Lower the border, because the prompts of tests are short."""
    monkeypatch.setitem(own_planning.BORDERS, "cpu", dict.fromkeys(("causal", "masked", "eager"), 32))


def ids_of(batch, seqlen, seed=1):
    return torch.randint(3, 64, (batch, seqlen), generator=torch.Generator().manual_seed(seed))


def gradients(model, ids):
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    full = lambda grad: grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return {name: full(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        torch.testing.assert_close(found[name], want, atol=2e-4 * float(want.abs().max()) + 1e-7, rtol=1e-3, msg=name)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads the older name
@pytest.mark.parametrize("name", ["Gemma 3", "gpt-oss"])
@pytest.mark.parametrize("first", ["peft", "dynaxx"])
def test_lora(name, first):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], init_lora_weights=False)
    model, ids = family_named(name).build().train(), ids_of(2, 64)
    torch.manual_seed(0)
    wanted = gradients(peft.get_peft_model(copy.deepcopy(model), config), ids)
    assert wanted
    assert all("lora" in each for each in wanted)
    torch.manual_seed(0)
    if first == "peft":
        model = peft.get_peft_model(model, config)
        handle = dx.apply(model)
    else:
        handle = dx.apply(model)
        model = peft.get_peft_model(model, config)
    with handle:
        same(gradients(model, ids), wanted)
        assert handle.stats()["own_pattern_calls"] == 2
        assert not handle.stats()["dense_calls"]


@pytest.mark.parametrize("before", [True, False])
def test_fully_sharded(before):
    """FSDP2 on a mesh of one rank works before and after `dx.apply`."""
    model, ids = family_named("Gemma 3").build().train(), ids_of(2, 64)
    wanted = gradients(model, ids)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        handle = dx.apply(model) if before else None
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with handle or dx.apply(model) as handle:
            same(gradients(model, ids), wanted)
            assert handle.stats()["own_pattern_calls"] == 2
    finally:
        dist.destroy_process_group()


@older_transformers
def test_a_smaller_model_guesses():
    model, small, ids = family_named("Gemma 3").build(), family_named("Gemma 3").build(), ids_of(1, 60)
    settings = {"max_new_tokens": 8, "do_sample": False, "assistant_model": small}
    wanted = model.generate(ids, **settings)
    with dx.apply(model) as handle, dx.apply(small):
        assert torch.equal(model.generate(ids, **settings), wanted)
        assert handle.stats()["own_pattern_calls"] >= 2


def test_pipeline(tmp_path):
    folder = str(save_tiny_model(tmp_path))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    generate = transformers.pipeline(
        "text-generation", model=model, tokenizer=transformers.AutoTokenizer.from_pretrained(folder), device="cpu"
    )
    prompt = "The quick brown fox jumps over the lazy dog. " * 6
    settings = {"max_new_tokens": 6, "do_sample": False}
    wanted = generate(prompt, **settings)
    with dx.apply(model) as handle:
        assert generate(prompt, **settings) == wanted
        assert handle.stats()["own_pattern_calls"] == 2
