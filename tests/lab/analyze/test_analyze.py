# SPDX-License-Identifier: Apache-2.0
import base64
import importlib
import json
import sys
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dynaxx as dx
from dynaxx.lab.analyze import capture, maps
from dynaxx.lab.analyze.bertviz_view import write_bertviz
from dynaxx.lab.analyze.recommendation import BUDGETS, candidates
from dynaxx.lab.analyze.result import encode_heatmap
from dynaxx.lab.analyze.run import _analyze_layer, analyze
from dynaxx.lab.models import load_model
from dynaxx.lab.progress import SilentProgress
from tiny import TEXT, save_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load_model(save_tiny_model(tmp_path_factory.mktemp("tiny"), max_positions=2048))


def attention_of(q, k, **changes):
    given = {"layer": 0, "scale": q.shape[-1] ** -0.5, "mask": None, "window": None, "softcap": None}
    return capture.LayerAttention(q=q, k=k, **(given | changes))


def random_attention(seqlen, heads=1, seed=0, **changes):
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(seqlen, heads, 32, generator=generator) * 2 for _ in range(2))
    return attention_of(q, k, **changes)


def dense_map(attention, head=0):
    scores = attention.q[:, head].double() @ attention.k[:, head].double().T * attention.scale
    if attention.softcap:
        scores = (scores / attention.softcap).tanh() * attention.softcap
    seqlen = len(scores)
    visible = torch.ones(seqlen, seqlen).tril().bool() if attention.mask is None else attention.mask
    return scores.masked_fill(~visible, -torch.inf).softmax(-1)


def entropy(p):
    return float(-(p * p.clamp(min=1e-300).log()).sum(-1).mean())


@pytest.mark.parametrize(("seqlen", "block_size", "softcap"), [(300, 32, None), (129, 64, 5.0), (64, 64, None)])
def test_statistics_are_those_of_the_dense_map(seqlen, block_size, softcap):
    attention = random_attention(seqlen, softcap=softcap)
    found, p = maps.map_statistics(attention, 0, block_size=block_size, cells=16), dense_map(attention)
    distance = torch.arange(seqlen)[:, None] - torch.arange(seqlen)
    close = {"rtol": 1e-4, "atol": 1e-5}
    expected = torch.stack([p[distance == d].sum() for d in range(seqlen)]).float()
    torch.testing.assert_close(found.by_distance, expected, **close)
    far = p.clone()
    far[:, : maps.SINK_TOKENS] = 0
    torch.testing.assert_close(
        found.by_slash, torch.stack([far[distance == d].sum() for d in range(seqlen)]).float(), **close
    )
    far[distance < maps.LOCAL_TOKENS] = 0
    torch.testing.assert_close(found.by_vertical, far.sum(0).float(), **close)
    assert found.sink_mass == pytest.approx(float(p[:, : maps.SINK_TOKENS].sum()), rel=1e-4)
    assert found.entropy == pytest.approx(entropy(p), rel=1e-4)
    cell = -(-seqlen // 16)
    last_row = p[(len(found.heatmap) - 1) * cell :]
    expected = torch.stack([part.sum(1).mean() for part in last_row.split(cell, dim=1)])
    torch.testing.assert_close(found.heatmap[-1], expected.float(), **close)
    assert found.block_mass.sum() == pytest.approx(seqlen, rel=1e-4)
    assert found.rows == seqlen


@pytest.mark.parametrize(
    "pattern",
    [
        dx.SlidingWindow(50),
        dx.Sink(7) | dx.SlidingWindow(33),
        dx.Strided(21) | dx.SlidingWindow(3),
        dx.Causal(),
        dx.RandomBlocks(2),
    ],
)
@pytest.mark.parametrize("seqlen", [257, 192])
def test_the_mass_a_layout_shows_is_the_mass_under_its_dense_mask(pattern, seqlen):
    attention = random_attention(seqlen, heads=3)
    statistics = [maps.map_statistics(attention, head, block_size=32) for head in range(3)]
    layout = pattern.layout(seqlen, block_size=32)
    expected = torch.stack([(dense_map(attention, head) * layout.to_dense()[0, 0]).sum() for head in range(3)])
    torch.testing.assert_close(maps.visible_mass(attention, statistics, layout), expected.float(), rtol=1e-4, atol=1e-4)


def test_mass_of_a_layout_per_head():
    attention = random_attention(200, heads=2)
    rule = (dx.Sink(16) | dx.SlidingWindow(20)) | dx.TopK(0.3)
    layout = dx.select_blocks(attention.q[None], attention.k[None], rule, block_size=16)
    statistics = [maps.map_statistics(attention, head, block_size=16) for head in range(2)]
    expected = torch.stack([(dense_map(attention, head) * layout.to_dense()[0, head]).sum() for head in range(2)])
    torch.testing.assert_close(maps.visible_mass(attention, statistics, layout), expected.float(), rtol=1e-4, atol=1e-4)


def test_long_texts_are_sampled_by_whole_blocks(monkeypatch):
    attention = random_attention(520)
    monkeypatch.setattr(maps, "MAX_ROWS", 128)
    found = maps.map_statistics(attention, 0, block_size=32)
    blocks = maps.sampled_blocks(520, 32)
    p = dense_map(attention).float()
    rows = torch.isin(torch.arange(520) // 32, blocks)
    assert found.rows == int(rows.sum()) < 136
    assert float(found.by_distance.sum()) == pytest.approx(found.rows, rel=1e-4)
    layout = dx.SlidingWindow(70).layout(520, block_size=32)
    expected = float((p * layout.to_dense()[0, 0])[rows].sum())
    assert float(maps.visible_mass(attention, [found], layout)) == pytest.approx(expected, rel=1e-4)
    assert float(found.heatmap.sum(-1).min()) > 0.99, "every row of the heat map is of a sampled query"


# ---- heads whose answer is known ---------------------------------------------------------------------------------


def analyzed(q, k, **changes):
    with SilentProgress().task("") as task:
        (head,) = _analyze_layer(attention_of(q, k, **changes), [0], candidates(len(q), 32), 32, task)
    return head


def unit(seqlen, seed):
    x = torch.randn(seqlen, 1, 64, generator=torch.Generator().manual_seed(seed))
    return x / x.norm(dim=-1, keepdim=True)


def test_a_head_that_looks_at_itself_is_local():
    k = unit(1024, 0)
    head = analyzed(300 * k, k)
    assert head.local_mass > 0.95
    assert head.median_distance == 0
    assert head.recommended.kind == "local"
    assert head.recommended.attention == "Sink(4) | SlidingWindow(32)"
    assert head.recommended.recall > 0.95
    assert head.mass_by_distance.mass[0] > 0.95
    assert sum(head.mass_by_distance.mass) == pytest.approx(1, abs=1e-3)


def test_a_head_that_looks_at_the_first_token_is_a_sink():
    k, q = unit(512, 0), unit(512, 1)
    k[0], q[:] = 1.0, q * 0.1 + 1.0
    head = analyzed(q * 4, k)
    assert head.sink_mass > 0.9
    assert head.recommended.kind == "local"
    assert head.entropy < 1


def test_vertical_and_slash_lines_are_told_apart():
    heavy = torch.arange(32, 1024, 128)
    k = unit(1024, 0) * 0.1
    k[heavy] = 1.0
    vertical = analyzed(torch.ones(1024, 1, 64) * 2, k)
    assert vertical.vertical_mass > 0.5
    assert vertical.vertical_mass > 3 * vertical.slash_mass
    keys = unit(1024, 1)
    slash = analyzed(300 * keys.roll(200, 0), keys)
    assert slash.slash_mass > 0.6
    assert slash.slash_mass > 2 * slash.vertical_mass
    assert slash.median_distance == 200


def test_even_attention_is_broad_and_the_oracle_no_better_than_its_density():
    even = torch.zeros(1024, 1, 64)
    head = analyzed(even, even)
    assert head.recommended.kind == "broad"
    assert head.recommended.attention == "dense"
    assert "keep it dense" in head.recommended.reason
    assert head.entropy == pytest.approx(float(torch.arange(1, 1025).float().log().mean()), rel=1e-3)


def test_no_rule_of_whole_blocks_beats_the_oracle():
    attention = random_attention(640, seed=3)
    head = analyzed(attention.q, attention.k)
    for name in ("mean_pool", "min_max", "mean_query"):
        for density, recall in zip(head.density[name], head.recall[name], strict=True):
            grid = [(d, r) for d, r in zip(head.density["oracle"], head.recall["oracle"], strict=True) if d >= density]
            assert not grid or recall <= grid[0][1] + 1e-4


def test_densities_come_close_to_the_budgets():
    attention = random_attention(2048)
    head = analyzed(attention.q, attention.k)
    for name, densities in head.density.items():
        assert densities == pytest.approx(BUDGETS, abs=0.03), name


# ---- a model ----------------------------------------------------------------------------------------------------


def test_recall_of_a_window_is_the_mass_of_the_models_own_maps(tiny):
    model, tokenizer = tiny
    result = analyze(model, tokenizer, TEXT, tokens=200, block_size=16, seed=5)
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"][result.start :]
    ids = torch.tensor([(tokenizer("")["input_ids"] + ids)[:200]])
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            attentions = model(ids, output_attentions=True).attentions
    finally:
        model.set_attn_implementation("sdpa")
    assert len(result.heads) == 8
    for head in result.heads:
        p = attentions[head.layer][0, head.head].double()
        for index, attention in enumerate(result.rules["streaming"].attention):
            pattern = eval(attention, {"Sink": dx.Sink, "SlidingWindow": dx.SlidingWindow})
            layout = pattern.layout(200, block_size=16)
            mass = float((p * layout.to_dense()[0, 0]).sum()) / 200
            assert head.recall["streaming"][index] == pytest.approx(mass, abs=2e-4)
            assert head.density["streaming"][index] == pytest.approx(layout.density(), abs=1e-6)


def test_result_is_strict_json_and_says_what_it_is_of(tiny):
    result = analyze(*tiny, TEXT, tokens=160, layers=[1], heads=[3, 0], block_size=32)
    document = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert document["budgets"] == list(BUDGETS)
    assert [(head["layer"], head["head"]) for head in document["heads"]] == [(1, 0), (1, 3)]
    head = document["heads"][0]
    assert set(head["recall"]) == {"streaming", "mean_pool", "min_max", "mean_query", "oracle"}
    assert all(len(shares) == len(BUDGETS) for shares in head["recall"].values())
    assert len(head["mass_by_distance"]["edges"]) == len(head["mass_by_distance"]["mass"]) + 1
    assert head["heatmap"]["size"] <= 64
    assert document["summary"]["heads"] == 2
    assert "mean recall" in result.summary()


def test_heads_do_not_depend_on_which_others_are_looked_at(tiny):
    every = analyze(*tiny, TEXT, tokens=160, block_size=32)
    some = analyze(*tiny, TEXT, tokens=160, block_size=32, layers=[1], heads=[2])
    (twin,) = [head for head in every.heads if (head.layer, head.head) == (1, 2)]
    assert some.heads[0] == twin


@pytest.mark.parametrize("training", [False, True])
def test_the_model_is_left_as_it_was_also_after_an_error(tiny, training):
    model, tokenizer = tiny
    model.train(training)
    try:
        analyze(model, tokenizer, TEXT, tokens=64, block_size=16)

        def fail(attention):
            raise RuntimeError("stop")

        with pytest.raises(RuntimeError, match="stop"):
            capture.visit_attention(model, torch.zeros(1, 8, dtype=torch.long), fail)
        assert model.config._attn_implementation == "sdpa"
        assert model.training is training
        assert capture._visitor.get() is None
    finally:
        model.eval()


class _Largest(TorchDispatchMode):
    """Record the number of elements of the largest tensor."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(each, torch.Tensor):
                self.numel = max(self.numel, each.untyped_storage().nbytes() // max(1, each.element_size()))
        return made


def test_no_full_map_ever_exists(tiny):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a dispatch mode sees its own thread only
    try:
        with _Largest() as largest:
            analyze(*tiny, TEXT, tokens=2048, layers=[0], heads=[0], block_size=64)
    finally:
        torch.set_num_threads(threads)
    assert largest.numel < 2048 * 2048 / 4


def test_layers_with_a_window_of_their_own_are_left():
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = MistralForCausalLM(MistralConfig(**sizes, **heads, sliding_window=24)).eval()
    seen = []
    ids = torch.randint(64, (1, 100))
    capture.visit_attention(model, ids, seen.append)
    (attention,) = seen
    assert attention.window == 24
    found = maps.map_statistics(attention, 0, block_size=16)
    assert float(found.by_distance[24:].sum()) == 0
    torch.testing.assert_close(found.by_distance.sum(), torch.tensor(100.0))
    layout = dx.Causal().layout(100, block_size=16)
    every = [maps.map_statistics(attention, head, block_size=16) for head in range(2)]
    torch.testing.assert_close(maps.visible_mass(attention, every, layout), torch.full((2,), 100.0))
    head = analyzed(attention.q[:, :1], attention.k[:, :1], mask=attention.mask, window=24)
    assert head.recommended.kind == "windowed"


def test_a_softcapped_model_runs_as_it_does_eagerly():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, sliding_window=16, attn_logit_softcapping=1.0))
    model.eval().set_attn_implementation("eager")
    ids = torch.randint(64, (1, 60))
    seen, outs = [], []
    hook = model.base_model.register_forward_hook(lambda module, args, out: outs.append(out.last_hidden_state))
    model.base_model(ids)
    capture.visit_attention(model, ids, seen.append)
    hook.remove()
    assert [attention.softcap for attention in seen] == [1.0, 1.0]
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-5)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": 4096}, "2048 positions"),
        ({"tokens": 8}, "`tokens` must be from block_size"),
        ({"layers": [2]}, "`layers` must be from 0 to 1"),
        ({"heads": [-1]}, "`heads` must be from 0 to 3"),
        ({"layers": []}, "`layers` must be"),
        ({"block_size": 48}, "48"),
    ],
)
def test_wrong_settings_are_refused(tiny, changes, said):
    with pytest.raises(ValueError, match=said):
        analyze(*tiny, TEXT, **({"tokens": 128} | changes))


def test_too_little_text_is_refused(tiny):
    with pytest.raises(ValueError, match=r"at least 128 tokens, got \d+"):
        analyze(*tiny, "short", tokens=128)


def test_a_model_without_the_interface_is_refused():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64))
    model.base_model.h = torch.nn.ModuleList()  # no attention at all
    with pytest.raises(ValueError, match="AttentionInterface"):
        capture.visit_attention(model, torch.zeros(1, 4, dtype=torch.long), lambda attention: None)


def test_heatmap_codes():
    codes = encode_heatmap(torch.tensor([[0.0, 1e-9], [1e-5, 1.0]]))
    assert codes["size"] == 2
    assert list(base64.b64decode(codes["data"])) == [0, 1, 1, 255]


# ---- bertviz -----------------------------------------------------------------------------------------------------


def test_bertviz_gets_the_maps(tiny, tmp_path, monkeypatch):
    given = {}

    def head_view(**arguments):
        given.update(arguments)
        return types.SimpleNamespace(data="<div>view</div>")

    monkeypatch.setitem(sys.modules, "bertviz", types.SimpleNamespace(head_view=head_view))
    path = write_bertviz(*tiny, TEXT, tmp_path / "view.html", tokens=40)
    assert "<div>view</div>" in path.read_text()
    assert len(given["attention"]) == 2
    assert given["attention"][0].shape == (1, 4, 40, 40)
    torch.testing.assert_close(given["attention"][1].sum(-1), torch.ones(1, 4, 40).double(), atol=0.03, rtol=0)
    assert len(given["tokens"]) == 40
    assert given["html_action"] == "return"


def test_bertviz_missing_or_misused(tiny, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="from 2 to 128"):
        write_bertviz(*tiny, TEXT, tmp_path / "view.html", tokens=500)
    real = importlib.import_module

    def missing(name, *rest):
        if name == "bertviz":
            raise ModuleNotFoundError("No module named 'bertviz'", name="bertviz")
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ImportError, match="pip install bertviz"):
        write_bertviz(*tiny, TEXT, tmp_path / "view.html")
    assert not (tmp_path / "view.html").exists()
