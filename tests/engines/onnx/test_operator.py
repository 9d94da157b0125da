# SPDX-License-Identifier: Apache-2.0
"""The operator's choices and results equal dynaxx's in torch, for each rule, block size, length and head grouping."""

import contextlib
import itertools

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from transformers import BertConfig, BertModel, ModernBertConfig, ModernBertModel

import dynaxx as dx
from dynaxx.engines.onnx import OnnxModel, export_onnx
from dynaxx.engines.onnx.plans import _plan, operator_plans
from dynaxx.engines.onnx.session import library_path
from dynaxx.engines.portable import PortableModel
from dynaxx.errors import UnsupportedInputError
from dynaxx.integrations.transformers import model_facts
from dynaxx.policy import Policy, Rule
from dynaxx.policy.plan import HeadGroup, LayerPlan
from tiny import llama, tokens

pytestmark = pytest.mark.slow  # the operator is compiled at first use: a minute

ALL = tuple(range(6))
SCORERS = (dx.MeanQuery(), dx.MeanPool(), dx.MinMax(), dx.MinMax(0.5))
RULES = (
    [HeadGroup(ALL, dx.SlidingWindow(100) | dx.Sink(5))],
    [HeadGroup(ALL, dx.Strided(70) | dx.SlidingWindow(70))],
    [HeadGroup((0, 1, 5), dx.SlidingWindow(100)), HeadGroup((2, 3, 4), dx.Causal())],
    *([HeadGroup(ALL, dx.Sink(4) | dx.SlidingWindow(65) | dx.TopK(0.25, scorer, per=per))]
      for scorer, per in itertools.product(SCORERS, ("head", "group"))),
    [HeadGroup(ALL, dx.TopK((0.1, 0.0, 1.0, 0.3, 0.5, 0.2), per="head"))],
    [HeadGroup(ALL, dx.TopK(3))],
    [HeadGroup(ALL, dx.LastQueries(70) | dx.LocalBlocks(2) | dx.TopK((0.1, 0.0, 1.0, 0.3, 0.5, 0.2), per="head"))],
    [HeadGroup((0, 1, 5), dx.LastQueries(40) | dx.SlidingWindow(9)),
     HeadGroup((2, 3, 4), dx.LastQueries(0) | dx.Sink(3))],
    [HeadGroup(ALL, dx.LocalBlocks(2) | dx.TopK(0.3, floor=10))],
    [HeadGroup((0, 1, 2), dx.LocalBlocks(2) | dx.TopK(0.3)), HeadGroup((3, 5), dx.SlidingWindow(70)),
     HeadGroup((4,), dx.TopK(2, dx.MinMax()))],
)  # fmt: skip


def operator(plan=(), sparse_from=0, always=0, scale=0.125, threads=2, **others):
    attributes = {
        "scale": scale,
        "sparse_from": sparse_from,
        "always": always,
        **({"plan": plan} if plan else {}),
        **others,
    }
    node = helper.make_node("SparseAttention", ["q", "k", "v"], ["out"], domain="dynaxx", **attributes)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * 4) for name in ("q", "k", "v", "out")]
    graph = helper.make_graph([node], "one", values[:3], values[3:])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("dynaxx", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(library_path()))
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def run(session, q, k, v):
    given = {name: x.transpose(1, 2).contiguous().numpy() for name, x in zip("qkv", (q, k, v), strict=True)}
    return torch.from_numpy(session.run(None, given)[0])


@pytest.mark.parametrize("block_size", [(64, 64), (32, 64), (128, 32)])
@pytest.mark.parametrize("head_dim", [64, 24])
@pytest.mark.parametrize("groups", RULES, ids=repr)
def test_it_computes_what_torch_does(groups, block_size, head_dim):
    torch.manual_seed(0)
    plan = LayerPlan(tuple(groups), 6, 2, block_size)
    session = operator(_plan(plan, 0).plan)
    for batch, seqlen_q, seqlen_k in ((1, 600, 600), (2, 333, 333), (1, 100, 700), (1, 2, 2), (1, 65, 65)):
        q = torch.randn(batch, seqlen_q, 6, head_dim) * 2
        k, v = torch.randn(batch, seqlen_k, 2, head_dim) * 1.5, torch.randn(batch, seqlen_k, 2, 40)
        want = dx.sparse_attention(q, k, v, plan.layout(q, k, scale=0.125), scale=0.125)
        torch.testing.assert_close(run(session, q, k, v), want, atol=1e-4, rtol=1e-4)


def dense(q, k, v):
    rows = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    mask = rows >= torch.arange(k.shape[1])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=0.125, enable_gqa=True)
    return out.transpose(1, 2)


@pytest.mark.parametrize("threads", [1, 3])
def test_short_prompts_and_steps_see_all_keys_and_windows_stay(threads):
    torch.manual_seed(0)
    window = LayerPlan((HeadGroup(ALL, dx.SlidingWindow(50)),), 6, 2, (64, 64))
    numbers = _plan(window, 0).plan
    for seqlen_q, seqlen_k in ((1, 1), (1, 300), (300, 300), (7, 77)):
        q, k, v = torch.randn(2, seqlen_q, 6, 16), torch.randn(2, seqlen_k, 2, 16), torch.randn(2, seqlen_k, 2, 16)
        found = run(operator(numbers, sparse_from=301, threads=threads), q, k, v)
        torch.testing.assert_close(found, dense(q, k, v), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(run(operator(threads=threads), q, k, v), found)
        kept = run(operator(numbers, sparse_from=10**6, always=1, threads=threads), q, k, v)
        want = dx.sparse_attention(q, k, v, window.layout(q, k), scale=0.125)
        torch.testing.assert_close(kept, want, atol=1e-5, rtol=1e-5)


def test_nothing_to_do_and_bad_inputs():
    q, k = torch.randn(1, 5, 6, 16), torch.randn(1, 9, 2, 16)
    session = operator()
    assert run(session, q[:, :0], k, k).shape == (1, 0, 6, 16)
    assert run(session, q[:0], k[:0], k[:0]).shape == (0, 5, 6, 16)
    for wrong in ((q, k[:, :3], k[:, :3]), (q, k[..., :8], k), (q[:, :, :5], k, k), (q, k, k[:, :4])):
        with pytest.raises(Exception, match="must fit each other"):
            run(session, *wrong)
    with pytest.raises(Exception, match="export the model again"):
        operator((64, 64, 1, 99))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("scale", float("nan"), "a finite number"),
        ("scale", 3, "a finite number"),
        ("sparse_from", -5, "an integer from 0 to"),
        ("sparse_from", 0.5, "an integer from 0 to"),
        ("always", 2, "an integer from 0 to 1"),
        ("causal", -1, "an integer from 0 to 1"),
        ("causal", "no", "an integer from 0 to 1"),
        ("tokens_first", [1], "an integer from 0 to 1"),
        ("plan", 3, "a list of integers"),
        ("plan", [1.0], "a list of integers"),
        ("plan", "all", "a list of integers"),
    ],
)
def test_attributes_of_other_values_or_types_are_refused(name, value, said):
    """A plan of another type was taken as none, so that all keys were seen."""
    with pytest.raises(Exception, match=rf"dynaxx::SparseAttention: `{name}` must be {said}"):
        operator(**{name: value})


@pytest.mark.parametrize("rules", [[dx.Sink(2)], [dx.TopK(0.5)], [dx.Sink(2), dx.TopK(1)]], ids=repr)
def test_each_head_must_be_in_one_group(rules):
    """Other lists wrote outside of memory, or left heads without a result."""
    q, k = torch.randn(1, 200, 4, 16), torch.randn(1, 200, 2, 16)
    lists = [(0, 1, 2, 3)] if len(rules) == 1 else [(0, 3), (1, 2)]
    groups = tuple(HeadGroup(heads, rule) for heads, rule in zip(lists, rules, strict=True))
    numbers = _plan(LayerPlan(groups, 4, 2, (64, 64)), 0).plan
    changed = lambda *heads: operator((*numbers[:3], len(heads), *heads, *numbers[4 + len(lists[0]) :]))
    run(changed(*lists[0]), q, k, k)
    for wrong in ((*lists[0], *range(4, 8)), lists[0][:1] if len(rules) == 1 else (0, 3, 4)):
        with pytest.raises(Exception, match=r"`plan` is for \d q heads, got 4"):
            run(changed(*wrong), q, k, k)
    for wrong in ((0, 0), (0, 1, 2, 9), (-1, 3), (0, 2**40), (3, 0), (1, 2, 3)):
        with pytest.raises(Exception, match="export the model again"):
            changed(*wrong)
    with pytest.raises(ValueError, match="must hold each of 4 q heads once"):
        LayerPlan(groups[:1] * 2, 4, 2, (64, 64))


@pytest.mark.parametrize("scorer", SCORERS, ids=repr)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_reach_the_output(scorer, value):
    q, k = torch.randn(1, 600, 6, 16), torch.randn(1, 600, 2, 16)
    session = operator(_plan(LayerPlan((HeadGroup(ALL, dx.TopK(1, scorer)),), 6, 2, (64, 64)), 0).plan)
    k[0, 130] = value
    found = run(session, q, k, k)
    assert not (found == 0).all(-1).any()
    if value != value:
        assert found[0, 200:].isnan().all()


def test_rules_that_it_does_not_have_are_refused_with_the_fix():
    model = llama()
    facts = model_facts(model)
    for rule, reason in (
        (dx.Sink(4) | dx.TopP(0.9), "has TopK with MeanQuery"),
        (dx.TopK(0.5, dx.MeanPool(16)), "must pool whole blocks"),
        (dx.GlobalContent((5,)) | dx.Sink(4), "depends on the request"),
    ):
        with pytest.raises(UnsupportedInputError, match=reason):
            operator_plans(model, Policy(model=facts, rules=[Rule.of(rule)]))
    decode = Policy(model=facts, rules=[Rule.of(dx.Sink(64) | dx.SlidingWindow(256), phase="decode")])
    with pytest.raises(UnsupportedInputError, match="decode rules"):
        operator_plans(model, decode)


def test_an_old_runtime_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(onnxruntime, "__version__", "1.16.3")
    with pytest.raises(ImportError, match=r"must be >= 1\.20, got 1\.16\.3"):
        OnnxModel(tmp_path)


@torch.no_grad()
def test_a_dynamic_policy_exported_equals_torch_and_generates_the_same(tmp_path):
    model, ids = llama(), tokens(2, 300)
    policy = Policy(model=model_facts(model), rules=[Rule.of(dx.Sink(4) | dx.LocalBlocks(1) | dx.TopK(0.3))])
    made = export_onnx(model, tmp_path / "out", policy, all_logits=True)
    assert (made.form, made.graphs) == ("custom", ("model",))
    ran = OnnxModel(made.folder)
    with dx.apply(model, policy):
        torch.testing.assert_close(torch.from_numpy(ran.step(ids.numpy())[0]), model(ids).logits, atol=1e-4, rtol=1e-4)
        mask = torch.ones_like(ids)
        want = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)[:, 300:]
    found = np.stack(list(ran.generate(ids.numpy(), 12)), 1)
    np.testing.assert_array_equal(found[:, : want.shape[1]], want.numpy())


@torch.no_grad()
def test_a_policy_as_tune_writes_it_equals_torch(tmp_path, caplog):
    """A tuned policy has budgets by head, last queries that see everything, and a guard, which is left out with a
    warning.
    """
    model, ids = llama(), tokens(1, 700)
    rule = dx.Sink(32) | dx.LocalBlocks(4) | dx.LastQueries(64) | dx.TopK((0.1, 0.3, 0.0, 0.5, 0.2, 1.0), per="head")
    tuned = Policy(model=model_facts(model), block_size=32, rules=[Rule.of(rule)], guard={})
    made = export_onnx(model, tmp_path / "out", tuned, all_logits=True)
    assert made.form == "custom"
    assert "guard does not run in ONNX Runtime" in caplog.text
    found = torch.from_numpy(OnnxModel(made.folder).step(ids.numpy())[0])
    with dx.apply(model, tuned.replace(guard=None)):
        torch.testing.assert_close(found, model(ids).logits, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_an_encoder_with_a_window_padding_and_layers_that_see_everything(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6}
    bert = BertModel(BertConfig(**sizes, vocab_size=64, max_position_embeddings=700), add_pooling_layer=False).eval()
    ids = tokens(5, 333)
    for number, window in enumerate((None, (130, 7), 20)):
        made = export_onnx(bert, tmp_path / str(number), form="custom", window=window)
        assert (made.form, made.graphs) == ("custom", ("model",))
        ran = OnnxModel(made.folder, threads=1 + number % 2)
        applied = contextlib.nullcontext() if window is None else dx.apply(bert, window=window)
        with applied:
            mask = torch.ones_like(ids)
            close(ran.encode(ids.numpy(), mask.numpy()), bert(ids, attention_mask=mask)[0], mask)
            mask[1, 150:], mask[2, :100], mask[3, :40], mask[3, 41:] = 0, 0, 0, 0
            close(ran.encode(ids.numpy(), mask.numpy()), bert(ids, attention_mask=mask)[0], mask)
            mask[4] = 0  # a sequence of padding alone: others keep their results
            close(ran.encode(ids.numpy(), mask.numpy()), bert(ids, attention_mask=mask)[0], mask)
            close(ran.encode(ids[:, :1].numpy()), bert(ids[:, :1])[0], torch.ones(5, 1))
    mask[0, 5] = 0
    with pytest.raises(Exception, match="mask has holes in sequence 0: hide tokens at the ends"):
        ran.encode(ids.numpy(), mask.numpy())
    with pytest.raises(UnsupportedInputError, match="a policy is for decoders"):
        operator_plans(bert, Policy(model=model_facts(llama()), rules=[]))
    with pytest.raises(UnsupportedInputError, match="`window` is for encoders"):
        operator_plans(llama(), None, 20)


def close(found, want, mask):
    assert np.isfinite(found).all()
    torch.testing.assert_close(torch.from_numpy(found)[mask.bool()], want[mask.bool()], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_an_encoder_whose_layers_have_windows_of_their_own(tmp_path):
    torch.manual_seed(0)
    config = ModernBertConfig(
        vocab_size=64, hidden_size=96, intermediate_size=64, num_hidden_layers=4, num_attention_heads=6,
        local_attention=40, global_attn_every_n_layers=2, pad_token_id=0,
    )  # fmt: skip
    model, ids = ModernBertModel(config).eval(), tokens(2, 200)
    model.set_attn_implementation("sdpa")
    mask = torch.ones_like(ids)
    mask[1, 120:] = 0
    close(PortableModel(model)(ids, [mask]).numpy(), model(ids, attention_mask=mask)[0], mask)
    ran = OnnxModel(export_onnx(model, tmp_path / "out", form="custom").folder)
    close(ran.encode(ids.numpy(), mask.numpy()), model(ids, attention_mask=mask)[0], mask)
