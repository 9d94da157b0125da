# SPDX-License-Identifier: Apache-2.0
"""Models in OpenVINO, dense or with a policy, match transformers within 1e-4. `make test-openvino` runs this."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dynaxx as dx
from dynaxx.engines.openvino.running import is_causal_mask
from dynaxx.errors import PolicyError, UnsupportedInputError
from dynaxx.integrations.transformers.apply_policy import model_facts
from dynaxx.policy import Guard, Rollout, to_spec

ov = pytest.importorskip("openvino")
pytest.importorskip("transformers")

# From torch.export and OpenVINO's converter.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]
TOLERANCE = 1e-4


def tiny(kv_heads: int = 2, layers: int = 2) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=kv_heads,
        head_dim=16,
        max_position_embeddings=4096,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).eval()


def policy(model: Any, rule: Any, layers: Any = "all", **fields: Any) -> dx.Policy:
    rules = () if rule is None else (dx.Rule(layers=layers, heads="all", attention=to_spec(rule)),)
    return dx.Policy(model=model_facts(model), block_size=16, rules=rules, **fields)


def logits(converted: Any, ids: torch.Tensor, precision: str = "f32") -> np.ndarray:
    from dynaxx.engines.openvino import cpu_config

    request = ov.Core().compile_model(converted, "CPU", cpu_config(precision)).create_infer_request()
    return np.array(request.infer({0: ids.numpy()})[0])


@torch.no_grad()
def expected(model: Any, ids: torch.Tensor, rules: dx.Policy | None = None) -> np.ndarray:
    if rules is None:
        return model(ids, logits_to_keep=1).logits.numpy()
    with dx.apply(model, rules):
        return model(ids, logits_to_keep=1).logits.numpy()


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_dense_and_sparse_are_those_of_transformers(kv_heads: int) -> None:
    from dynaxx.engines.openvino import insert_policy, to_openvino

    model = tiny(kv_heads)
    rules = policy(model, dx.Sink(16) | dx.SlidingWindow(32) | dx.TopK(0.3), dense_below=100)
    converted = to_openvino(model)
    assert model.config._attn_implementation == "sdpa"
    prompts = [torch.randint(0, 97, shape) for shape in ((1, 2), (1, 99), (2, 129), (3, 257))]
    for ids in prompts:
        np.testing.assert_allclose(logits(converted, ids), expected(model, ids), atol=TOLERANCE)
    handle = insert_policy(converted, rules)
    assert handle.layers == 2
    for ids in prompts:
        np.testing.assert_allclose(logits(converted, ids), expected(model, ids, rules), atol=TOLERANCE)
    assert handle.stats["sparse_calls"] == 4
    assert handle.stats["own_pattern_calls"] == 4
    assert not handle.stats["dense_calls"]


def test_one_layer_may_follow_a_rule_and_all_logits_be_kept() -> None:
    from dynaxx.engines.openvino import insert_policy, to_openvino

    model, ids = tiny(), torch.randint(0, 97, (1, 200))
    rules = policy(model, dx.SlidingWindow(48), layers=[1])
    converted = to_openvino(model, all_logits=True)
    insert_policy(converted, rules)
    found = logits(converted, ids)
    with torch.no_grad(), dx.apply(model, rules):
        np.testing.assert_allclose(found, model(ids).logits.numpy(), atol=TOLERANCE)


def test_bf16_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynaxx.engines.openvino import insert_policy, to_openvino

    model, ids = tiny(), torch.randint(0, 97, (1, 160))
    converted = to_openvino(model)
    insert_policy(converted, policy(model, dx.SlidingWindow(64)), precision="bf16")
    found, exact = logits(converted, ids, "bf16"), expected(model, ids, policy(model, dx.SlidingWindow(64)))
    assert np.abs(found - exact).max() < 0.05 * np.abs(exact).max()


def masked_model(model: Any) -> Any:
    """Convert a model in the usual way, so that transformers' mask is an input of attention."""

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids, attention_mask=attention_mask, use_cache=False, logits_to_keep=1).logits

    ids = torch.randint(0, 97, (2, 80))
    batch, seqlen = torch.export.Dim("batch"), torch.export.Dim("seqlen", min=2)
    shape = {0: batch, 1: seqlen}
    with torch.no_grad():
        program = torch.export.export(
            Logits().eval(), (ids, torch.ones_like(ids)), dynamic_shapes=(shape, shape), strict=False
        )
        return ov.convert_model(program)


def test_a_mask_is_read_and_padding_runs_dense() -> None:
    from dynaxx.engines.openvino import cpu_config, insert_policy

    model = tiny()
    rules = policy(model, dx.SlidingWindow(32))
    converted = masked_model(model)
    handle = insert_policy(converted, rules)
    request = ov.Core().compile_model(converted, "CPU", cpu_config()).create_infer_request()
    ids, mask = torch.randint(0, 97, (2, 120)), torch.ones(2, 120, dtype=torch.int64)
    found = np.array(request.infer([ids.numpy(), mask.numpy()])[0])
    np.testing.assert_allclose(found, expected(model, ids, rules), atol=TOLERANCE)
    assert handle.stats["sparse_calls"] == 2
    mask[0, :50] = 0
    found = np.array(request.infer([ids.numpy(), mask.numpy()])[0])
    with torch.no_grad():
        np.testing.assert_allclose(found, model(ids, attention_mask=mask, logits_to_keep=1).logits, atol=TOLERANCE)
    assert handle.stats["dense_calls"] == {"mask is not causal sequences": 2}


def test_the_kill_switch_and_failures_run_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynaxx.engines.openvino import cpu_config, insert_policy, running, to_openvino

    model, ids = tiny(), torch.randint(0, 97, (1, 150))
    converted = to_openvino(model)
    handle = insert_policy(converted, policy(model, dx.SlidingWindow(32)))
    request = ov.Core().compile_model(converted, "CPU", cpu_config()).create_infer_request()
    handle.kill_switch.engage()
    np.testing.assert_allclose(np.array(request.infer({0: ids.numpy()})[0]), expected(model, ids), atol=TOLERANCE)
    assert handle.stats["dense_calls"] == {"kill switch": 2}
    handle.kill_switch.release()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(running.cpu, "attention_forward", fail)
        np.testing.assert_allclose(np.array(request.infer({0: ids.numpy()})[0]), expected(model, ids), atol=TOLERANCE)
    assert handle.stats["dense_calls"]["kernel failed"] == 2


def test_unserved_models_are_refused() -> None:
    from dynaxx.engines.openvino import insert_policy, to_openvino

    model = tiny()
    converted = to_openvino(model)
    with pytest.raises(TypeError, match=r"openvino\.Model"):
        insert_policy(model, policy(model, dx.SlidingWindow(32)))
    with pytest.raises(PolicyError, match=r"model\.layers"):
        insert_policy(converted, policy(tiny(layers=3), dx.SlidingWindow(32)))
    with pytest.raises(PolicyError, match="kv_heads"):
        insert_policy(converted, policy(tiny(kv_heads=3), dx.SlidingWindow(32)))
    with pytest.raises(ValueError, match="precision"):
        insert_policy(converted, policy(model, None), precision="f16")
    refused = policy(model, dx.SlidingWindow(32), rollout=Rollout(share=0.5))
    with pytest.raises(UnsupportedInputError, match="rollout"):
        insert_policy(converted, refused)
    insert_policy(converted, policy(model, None))
    with pytest.raises(UnsupportedInputError, match="no ScaledDotProductAttention"):
        insert_policy(converted, policy(model, None))
    with pytest.raises(ValueError, match="eval mode"):
        to_openvino(tiny().train())


def test_short_prompts_run_in_the_dense_model() -> None:
    from dynaxx.engines.openvino import OpenVinoPrompts, to_openvino

    model = tiny()
    rules = policy(model, dx.Sink(16) | dx.SlidingWindow(32) | dx.TopK(0.3), dense_below=100)
    converted = to_openvino(model)
    prompts = OpenVinoPrompts(converted, rules)
    assert prompts.border == 100
    for seqlen, calls in ((99, 0), (100, 2), (1, 2), (250, 4)):
        ids = torch.randint(0, 97, (2, seqlen))
        np.testing.assert_allclose(prompts(ids), expected(model, ids, rules), atol=TOLERANCE)
        assert prompts.handle.stats["sparse_calls"] == calls
        assert prompts.handle.stats["own_pattern_calls"] == 0, "dynaxx computed a short prompt"
    np.testing.assert_allclose(logits(converted, ids), expected(model, ids), atol=TOLERANCE)  # it stayed dense


@torch.no_grad()
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_a_cache_generates_what_transformers_does(kv_heads: int, tmp_path: Path) -> None:
    from dynaxx.engines.openvino import OpenVinoGenerator, cpu_config, export_openvino, load_openvino

    model, ids = tiny(kv_heads), torch.randint(1, 97, (2, 300))
    rules = policy(model, dx.Sink(16) | dx.SlidingWindow(32) | dx.TopK(0.2), dense_below=100)
    mask = torch.ones_like(ids)
    for number, chosen in enumerate((None, rules)):
        made = export_openvino(model, tmp_path / str(number), chosen, cache=True, all_logits=True)
        loaded = load_openvino(made.folder)
        compiled = ov.Core().compile_model(loaded.model, "CPU", cpu_config("f32"))
        running = OpenVinoGenerator(compiled)
        with dx.apply(model, chosen or policy(model, None)):
            want = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None)
            whole = model(ids).logits.numpy()
            cache = model(ids[:, :170], use_cache=True).past_key_values
            parts = model(ids[:, 170:], past_key_values=cache).logits.numpy()
        found = np.stack(list(running.generate(ids, 8)), 1)
        np.testing.assert_array_equal(found, want[:, 300:].numpy())
        running.reset()
        np.testing.assert_allclose(running.step(ids), whole, atol=TOLERANCE)
        running.reset()  # in two parts, and with another batch size
        running.step(ids[:, :170])
        np.testing.assert_allclose(running.step(ids[:, 170:]), parts, atol=TOLERANCE)
        running.reset()
        np.testing.assert_allclose(running.step(ids[:1, :50]), whole[:1, :50], atol=TOLERANCE)
        if loaded.handle is not None:
            stats = loaded.handle.stats
            assert stats["sparse_calls"] == 2 * 4, stats  # each layer, four prompts of 100 keys and more
            assert stats["own_pattern_calls"] == 2 * (7 + 1), stats  # tokens one by one, and the short prompt
    with pytest.raises(ValueError, match="one token or more"):
        running.step(ids[:, :0])
    with pytest.raises(UnsupportedInputError, match="no cache"):
        export_openvino(model, tmp_path / "portable", form="portable", cache=True)
    from dynaxx.engines.openvino import to_openvino

    without = ov.Core().compile_model(to_openvino(model), "CPU", cpu_config("f32"))
    with pytest.raises(ValueError, match="cache=True"):
        OpenVinoGenerator(without)


@torch.no_grad()
def test_prompts_of_several_lengths_get_what_each_gets_alone() -> None:
    """Padded on either side: the rules never see a padding token, and the cache of `step` stays."""
    from dynaxx.engines.openvino import OpenVinoGenerator, cpu_config, insert_policy, to_openvino

    model, mask = tiny(), torch.ones(4, 220, dtype=torch.int64)
    ids = torch.randint(1, 97, mask.shape)
    mask[0, :150] = mask[1, 90:] = mask[3, :150] = 0
    rules = policy(model, dx.Sink(16) | dx.SlidingWindow(32) | dx.TopK(0.2))
    converted = to_openvino(model, cache=True)
    insert_policy(converted, rules)
    running = OpenVinoGenerator(ov.Core().compile_model(converted, "CPU", cpu_config("f32")))
    running.step(ids[:1, :60])
    found = np.stack(list(running.generate(ids, 6, attention_mask=mask)), 1)
    with dx.apply(model, rules):
        for row, tokens in enumerate(found):
            alone, shown = ids[row][mask[row].bool()][None], int(mask[row].sum())
            want = model.generate(
                alone, attention_mask=torch.ones_like(alone), max_new_tokens=6, do_sample=False, eos_token_id=None
            )
            np.testing.assert_array_equal(tokens, want[0, shown:].numpy())
        whole = model(ids[:1, :61], logits_to_keep=1).logits.numpy()
    np.testing.assert_allclose(running.step(ids[:1, 60:61]), whole, atol=TOLERANCE)
    with pytest.raises(ValueError, match="`attention_mask` must have the shape"):
        next(running.generate(ids, 6, attention_mask=mask[:, :-1]))


@pytest.mark.parametrize(
    ("rule", "form", "fields"),
    [
        (dx.Sink(16) | dx.SlidingWindow(64), "portable", {}),
        (dx.Sink(16) | dx.SlidingWindow(64), "custom", {"dense_below": 100}),
        (dx.SlidingWindow(32) | dx.TopK(0.3), "custom", {}),
    ],
)
def test_exports_are_read_again(rule: Any, form: str, fields: dict[str, int], tmp_path: Path) -> None:
    from dynaxx.engines.openvino import export_openvino, load_openvino

    model = tiny()
    rules = policy(model, rule, **fields)
    written = export_openvino(model, tmp_path / "out", rules)
    assert written.form == form
    loaded = load_openvino(written.folder)
    assert (loaded.handle is None) == (form == "portable")
    for shape in ((1, 17), (1, 64), (1, 90), (2, 257)):
        ids = torch.randint(0, 97, shape)
        np.testing.assert_allclose(logits(loaded.model, ids), expected(model, ids, rules), atol=TOLERANCE)
    with pytest.raises(ValueError, match="already exists"):
        export_openvino(model, tmp_path / "out", rules)


def test_exports_refuse_what_they_cannot_hold(tmp_path: Path) -> None:
    from dynaxx.engines.openvino import export_openvino, load_openvino

    model = tiny()
    with pytest.raises(UnsupportedInputError, match="TopK"):
        export_openvino(model, tmp_path / "out", policy(model, dx.TopK(0.3)), form="portable")
    with pytest.raises(UnsupportedInputError, match="no border"):
        export_openvino(model, tmp_path / "out", policy(model, dx.SlidingWindow(32), dense_below=5), form="portable")
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError, match="dynaxx export --format openvino"):
        load_openvino(tmp_path)


def test_a_policy_as_tune_writes_it_runs(caplog: pytest.LogCaptureFixture) -> None:
    """A tuned policy has budgets by head, last queries that see everything, and a guard, which is left out with a
    warning.
    """
    from dynaxx.engines.openvino import cpu_config, insert_policy, to_openvino

    model = tiny()
    shares = (0.1, 0.3, 0.0, 0.5, 0.2, 1.0)
    tuned = policy(
        model, dx.Sink(32) | dx.LocalBlocks(4) | dx.LastQueries(64) | dx.TopK(shares, per="head"), guard=Guard()
    )
    converted = to_openvino(model)
    handle = insert_policy(converted, tuned)
    assert handle.policy.guard is None
    assert "guard does not run in OpenVINO" in caplog.text
    request = ov.Core().compile_model(converted, "CPU", cpu_config("f32")).create_infer_request()
    ids = torch.randint(0, 97, (1, 700))
    with torch.inference_mode():
        wanted = expected(model, ids, tuned.replace(guard=None))
    np.testing.assert_allclose(np.array(request.infer({0: ids.numpy()})[0]), wanted, atol=TOLERANCE)
    assert handle.stats["sparse_calls"] == 2


def test_the_example_of_the_guide_runs() -> None:
    page = Path(__file__).parents[2] / "docs" / "guides" / "openvino.md"
    (block,) = re.findall(r"```text\n(import openvino.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, str(page), "exec"), names)
    assert names["handle"].stats["sparse_calls"] == 2
    assert names["logits"].shape == (1, 1, 100)


def test_causal_masks_are_recognised() -> None:
    for seqlen_q, seqlen_k in ((1, 1), (7, 7), (5, 12), (1030, 1040)):
        causal = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(seqlen_k - seqlen_q)[None, None]
        added = torch.zeros(causal.shape).masked_fill(~causal, -torch.inf)
        for mask in (causal, added, added.clamp_min(-3e38), causal.expand(3, 1, -1, -1)):
            assert is_causal_mask(mask)
        wrong = causal.expand(3, 1, -1, -1).clone()
        wrong[2, :, -1, 0] = False
        for mask in (wrong, causal.expand(1, 2, -1, -1), *((~causal, torch.where(causal, 0.0, -1.0)) * (seqlen_q > 1))):
            assert not is_causal_mask(mask)


def attentions(masks: list[Any], *, causal: bool = False) -> Any:
    """Return a model of two attentions, each with its own queries, keys, values and mask; None: no mask."""
    ops, inputs, outputs = ov.opset13, [], []
    for mask in masks:
        qkv = [ops.parameter([-1, heads, -1, 16], ov.Type.f32) for heads in (6, 6, 6)]
        outputs.append(ops.scaled_dot_product_attention(*qkv, *([] if mask is None else [mask]), causal=causal))
        inputs += qkv
    parameters = {each.get_name(): each for each in masks if each is not None}
    return ov.Model(outputs, inputs + list(parameters.values()))


def attend(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).numpy()


@pytest.mark.parametrize("dtype", ["boolean", "f32"])
@pytest.mark.parametrize("rank", [2, 4])
def test_each_layer_reads_its_own_mask_in_each_pass(dtype: str, rank: int) -> None:
    """Steps with padded keys, window masks, prompts, and causal masks follow each other in two models in turns, in
    memory that OpenVINO uses again.
    """
    from dynaxx.engines.openvino import cpu_config, insert_policy

    torch.manual_seed(0)
    facts = model_facts(tiny(kv_heads=6))
    rules = dx.Policy(model=facts, rules=[dx.Rule.of(dx.SlidingWindow(10**6))])  # exact where the mask is causal
    parameter = lambda: ov.opset13.parameter([-1] * rank, getattr(ov.Type, dtype))
    requests, shared = [], parameter()
    for masks in ([parameter(), parameter()], [shared, shared]):
        model = attentions(masks)
        insert_policy(model, rules)
        requests.append(ov.Core().compile_model(model, "CPU", cpu_config()).create_infer_request())
    draw = np.random.default_rng(0)
    for _ in range(60):
        number, seqlen_q, seqlen_k = draw.integers(2), int(draw.choice([1, 1, 5, 33])), int(draw.integers(33, 200))
        batch = 1 if rank == 2 else int(draw.choice([1, 2]))
        masks = []
        for _ in range(2 - number):
            shown = torch.ones(batch, 1, seqlen_q, seqlen_k, dtype=torch.bool).tril(seqlen_k - seqlen_q)
            kind = draw.choice(["causal", "padding", "window", "other queries"])
            if kind == "padding":
                shown[-1, ..., : int(draw.integers(1, 30))] = False
            elif kind == "window":
                shown = shown.triu(seqlen_k - seqlen_q - 5)
            elif kind == "other queries":
                shown[..., int(draw.integers(0, seqlen_k - seqlen_q + 1))] = seqlen_k == 1
            masks.append(shown)
        calls = [[torch.randn(batch, 6, length, 16) for length in (seqlen_q, seqlen_k, seqlen_k)] for _ in range(2)]
        given = [m if dtype == "boolean" else torch.zeros(m.shape).masked_fill(~m, -torch.inf) for m in masks]
        given = [m[0, 0] if rank == 2 else m for m in given]
        found = requests[number].infer([x.numpy() for x in (*calls[0], *calls[1], *given)])
        for layer, call in enumerate(calls):
            np.testing.assert_allclose(found[layer], attend(*call, masks[layer % len(masks)]), atol=TOLERANCE)


def test_attentions_without_a_mask_are_openvinos() -> None:
    """OpenVINO's flag "causal" aligns the first query with the first key; without flag and mask all keys are seen."""
    from dynaxx.engines.openvino import cpu_config, insert_policy

    facts = model_facts(tiny(kv_heads=6))
    rules = dx.Policy(model=facts, rules=[dx.Rule.of(dx.SlidingWindow(10**6))])
    with pytest.raises(UnsupportedInputError, match=r"attentions \[0, 1\] have no mask and are not causal"):
        insert_policy(attentions([None, None]), rules)
    plain, inside = attentions([None, None], causal=True), attentions([None, None], causal=True)
    insert_policy(inside, rules)
    for lengths in ((40, 40), (1, 40), (7, 40), (40, 7)):
        calls = [torch.randn(2, 6, lengths[i > 0], 16).numpy() for i in (0, 1, 1)] * 2
        found, wanted = (ov.Core().compile_model(m, "CPU", cpu_config())(calls) for m in (inside, plain))
        for layer in range(2):
            np.testing.assert_allclose(found[layer], wanted[layer], atol=TOLERANCE)
