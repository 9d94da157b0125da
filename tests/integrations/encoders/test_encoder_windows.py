# SPDX-License-Identifier: Apache-2.0
"""`dynaxx.apply` on encoders that use AttentionInterface: their own pattern, or a requested window."""

import copy
import warnings

import pytest
import torch

import dynaxx as dx
from dynaxx.integrations.transformers.calls import own_planning
from dynaxx.testing import oracle_attention

transformers = pytest.importorskip("transformers")
SMALL = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def short_border(monkeypatch):
    monkeypatch.setitem(own_planning.BORDERS, "cpu", dict.fromkeys(("causal", "masked", "eager"), 32))


def modernbert():
    torch.manual_seed(0)
    config = transformers.ModernBertConfig(
        **SMALL, num_hidden_layers=4, local_attention=32, global_attn_every_n_layers=3
    )
    return transformers.ModernBertModel(config).eval()


def bert():
    torch.manual_seed(0)
    names = {name: SMALL[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    return transformers.BertModel(transformers.BertConfig(**names, num_hidden_layers=2, initializer_range=0.2)).eval()


def distilbert():
    """Return an encoder whose attention modules have no `layer_idx`."""
    torch.manual_seed(0)
    config = transformers.DistilBertConfig(vocab_size=64, dim=64, hidden_dim=64, n_layers=2, n_heads=4, dropout=0.0,
                                           attention_dropout=0.0, initializer_range=0.2)  # fmt: skip
    return transformers.DistilBertModel(config).eval()


def albert():
    """Return an encoder that calls one attention module in each of its layers."""
    torch.manual_seed(0)
    names = {name: SMALL[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    config = transformers.AlbertConfig(**names, embedding_size=64, num_hidden_layers=2, initializer_range=0.2)
    return transformers.AlbertModel(config).eval()


def batches():
    ids = torch.randint(3, 64, (3, 150), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 100:], mask[1, :20] = 0, 0
    return [{"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}]


def run(model, arguments):
    model.zero_grad()
    out = model(**arguments).last_hidden_state
    shown = arguments.get("attention_mask", torch.ones(out.shape[:2])).bool()
    (out[shown] * torch.linspace(-1, 1, out.shape[-1])).sum().backward()
    return {"out": out[shown].detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("make", [modernbert, bert, distilbert, albert])
@pytest.mark.parametrize("arguments", batches())
def test_own_pattern(make, arguments):
    model = make()
    wanted = run(model, arguments)
    with dx.apply(model) as handle:
        got = run(model, arguments)
        assert handle.stats()["own_pattern_calls"] == model.config.num_hidden_layers
    largest = max(float(x.abs().max()) for x in wanted.values())
    for name, want in wanted.items():
        torch.testing.assert_close(got[name], want, atol=2e-6 * largest, rtol=1e-3)


@pytest.mark.parametrize(("window", "sides"), [(9, (8, 8)), ((20, 3), (20, 3))])
@pytest.mark.parametrize("arguments", batches())
def test_a_window_by_request(window, sides, arguments):
    """BERT's attention with padding and a window equals the definition."""
    model, distance = bert(), torch.arange(150)[:, None] - torch.arange(150)
    band = (distance <= sides[0]) & (-distance <= sides[1])

    def oracle(module, q, k, v, mask, scaling=None, **_):
        shown = band[None, None].expand(q.shape[0], q.shape[1], -1, -1)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return oracle_attention(q, k, v, shown if mask is None else shown & mask, scaling)[0], None

    transformers.AttentionInterface.register("oracle", oracle)
    transformers.AttentionMaskInterface.register("oracle", transformers.masking_utils.sdpa_mask)
    with torch.no_grad():
        dense = model(**arguments).last_hidden_state
        model.set_attn_implementation("oracle")
        want = model(**arguments).last_hidden_state
        model.set_attn_implementation("sdpa")
        with dx.apply(model, window=window) as handle:
            got = model(**arguments).last_hidden_state
            assert handle.stats()["own_pattern_calls"] == 2
            short = {name: x[:, :4] for name, x in arguments.items()}
            model(**short)
            assert handle.stats()["dense_calls"] == {"too few queries to gain": 2}
    shown = arguments.get("attention_mask", torch.ones(3, 150)).bool()
    torch.testing.assert_close(got[shown], want[shown], atol=1e-4, rtol=1e-4)
    assert (got - dense)[shown].abs().max() > 1e-2


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_every_dense_call_keeps_the_window(implementation):
    """Dropout, weights, masks of pairs, the kill switch, copies, tracing and export attend in the window."""
    torch.manual_seed(0)
    names = {name: SMALL[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    config = transformers.BertConfig(**names, num_hidden_layers=2, initializer_range=0.2, hidden_dropout_prob=0.0,
                                     attention_probs_dropout_prob=0.3, attn_implementation=implementation)  # fmt: skip
    model, arguments = transformers.BertModel(config).eval(), batches()[1]
    ids, padding = arguments["input_ids"], arguments["attention_mask"]
    distance = torch.arange(150)[:, None] - torch.arange(150)
    shown = padding[:, None, None].bool().expand(-1, 1, 150, -1)
    lowest = torch.finfo(torch.float32).min
    given = lambda mask: mask if implementation == "sdpa" else torch.zeros(mask.shape).masked_fill(~mask, lowest)

    @torch.no_grad()
    def hidden(mask, model=model, **others):
        torch.manual_seed(1)  # of dropout
        return model(input_ids=ids, attention_mask=mask, **others)["last_hidden_state"][padding.bool()]

    in_window = given(shown & (distance.abs() <= 8))
    want = hidden(in_window)
    dropped = hidden(in_window, model.train())
    model.eval()
    with dx.apply(model, window=9) as handle:
        torch.testing.assert_close(hidden(padding), want, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(hidden(given(shown)), want)
        torch.testing.assert_close(hidden(given(shown), output_attentions=True), want)
        handle.kill_switch.engage()
        torch.testing.assert_close(hidden(padding), want)
        handle.kill_switch.release()
        torch.testing.assert_close(hidden(padding, copy.deepcopy(model)), want)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(model, (ids, padding), strict=False, check_trace=False)
        torch.testing.assert_close(traced(ids, padding)["last_hidden_state"][padding.bool()], want)
        exported = torch.export.export(model, (), arguments).module()
        torch.testing.assert_close(hidden(padding, exported), want)
        torch.testing.assert_close(hidden(padding, model.train()), dropped)
        assert handle.stats()["dense_calls"]["attention dropout"] == 2


def test_a_window_beside_layers_with_their_own_is_kept_by_dense_calls():
    """EmbeddingGemma's masks have no rule that dynaxx reads."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, head_dim=16, sliding_window=40, initializer_range=0.2, use_bidirectional_attention=True,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model = transformers.Gemma3TextModel(config).eval()
    near = (torch.arange(150)[:, None] - torch.arange(150)).abs() <= 8

    def in_window(module, q, k, v, mask, **others):
        if module.sliding_window is None:
            mask = near[None, None] if mask is None else mask & near
        return transformers.AttentionInterface()["sdpa"](module, q, k, v, mask, **others)

    transformers.AttentionInterface.register("in_window", in_window)
    transformers.AttentionMaskInterface.register("in_window", transformers.masking_utils.sdpa_mask)
    for arguments in batches():
        shown = arguments.get("attention_mask", torch.ones(3, 150)).bool()
        with torch.no_grad():
            model.set_attn_implementation("in_window")
            want = model(**arguments).last_hidden_state[shown]
            model.set_attn_implementation("sdpa")
            with dx.apply(model, window=9):
                torch.testing.assert_close(model(**arguments).last_hidden_state[shown], want)


def test_a_window_leaves_layers_with_their_own_alone():
    model, arguments = modernbert(), batches()[0]
    with torch.no_grad(), dx.apply(model, window=150) as handle:
        wide = model(**arguments).last_hidden_state
        handle.remove()
        torch.testing.assert_close(wide, model(**arguments).last_hidden_state, atol=1e-4, rtol=1e-4)


def test_images_are_served_too():
    torch.manual_seed(0)
    config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
                                    image_size=48, patch_size=4)  # fmt: skip
    model, images = transformers.ViTModel(config).eval(), torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        wanted = model(images).last_hidden_state
        with dx.apply(model) as handle:
            torch.testing.assert_close(model(images).last_hidden_state, wanted)
            assert handle.stats()["own_pattern_calls"] == 2
            assert not handle.stats()["dense_calls"]


def speech():
    """Yield encoders of speech and their inputs; those of encoder-decoders run alone."""
    torch.manual_seed(0)
    whisper = transformers.WhisperConfig(
        vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, pad_token_id=0,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=150,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    wav2vec2 = transformers.Wav2Vec2Config(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        conv_dim=(16, 16), conv_stride=(2, 2), conv_kernel=(3, 3), num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    )  # fmt: skip
    model = transformers.WhisperModel(whisper).eval()
    with pytest.raises(dx.UnsupportedInputError, match=r"get_encoder\(\)"):
        dx.apply(model)
    yield model.get_encoder(), torch.randn(2, 8, 300)
    yield transformers.Wav2Vec2Model(wav2vec2).eval(), torch.randn(2, 800)


def test_speech_is_served_too():
    for model, sound in speech():
        with torch.no_grad():
            wanted = model(sound).last_hidden_state
            with dx.apply(model) as handle:
                torch.testing.assert_close(model(sound).last_hidden_state, wanted, atol=1e-4, rtol=1e-4)
                assert handle.stats()["own_pattern_calls"] == 2


def test_unserved_windows_are_refused():
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                                      num_attention_heads=4)  # fmt: skip
    llama = transformers.LlamaForCausalLM(config)
    with pytest.raises(dx.UnsupportedInputError, match="`window` is for encoders"):
        dx.apply(llama, window=16)
    with pytest.raises(ValueError, match="`window` must be >= 1"):
        dx.apply(bert(), window=0)
    with pytest.raises(ValueError, match="`own_pattern` must be True"):
        dx.apply(llama, own_pattern=False)
    policy = dx.Policy(model={"model_type": "bert", "layers": 2, "q_heads": 4, "kv_heads": 4, "head_dim": 16},
                       rules=(dx.Rule.of(dx.SlidingWindow(9)),))  # fmt: skip
    with pytest.raises(dx.UnsupportedInputError, match="is not causal"):
        dx.apply(bert(), policy)
    assert llama.config._attn_implementation == "sdpa"
