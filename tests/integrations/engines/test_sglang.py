# SPDX-License-Identifier: Apache-2.0
"""The SGLang plugin with stand-ins for the parts of SGLang that it uses. It has never run in SGLang itself."""

import ast
import enum
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import dynaxx as dx
from dynaxx.errors import PolicyError, UnsupportedInputError
from dynaxx.integrations import sglang as plugin
from dynaxx.integrations.sglang import engine as sglang_engine
from dynaxx.policy import ModelFacts
from dynaxx.testing import oracle_attention

FACTS = ModelFacts(model_type="llama", layers=3, q_heads=6, kv_heads=2, head_dim=16)
SPARSE = dx.Rule.of(dx.Sink(16) | dx.SlidingWindow(24) | dx.TopK(0.1), layers=[0, 2])
EVERYTHING = dx.Rule.of(dx.SlidingWindow(24) | dx.TopK(1.0))
DECODE = dx.Rule.of(dx.Sink(16) | dx.TopK(2, dx.MinMax()), phase="decode", block_size=16)
DECODE_EVERYTHING = dx.Rule.of(dx.TopK(1.0), phase="decode", block_size=16)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
SCALE = 0.2


class ForwardMode(enum.IntEnum):
    EXTEND = 1
    DECODE = 2
    MIXED = 3
    TARGET_VERIFY = 4

    def is_decode(self):
        return self is ForwardMode.DECODE


class Pool:
    """SGLang's cache: k and v by slot, for every layer."""

    def __init__(self, slots):
        self.k = [torch.full((slots, 2, 16), torch.nan) for _ in range(3)]
        self.v = [torch.full((slots, 2, 16), torch.nan) for _ in range(3)]
        self.stored = 0

    def get_kv_buffer(self, layer):
        return self.k[layer], self.v[layer]

    def set_kv_buffer(self, layer, where, k, v):
        self.k[layer.layer_id][where.loc], self.v[layer.layer_id][where.loc] = k, v
        self.stored += 1


class WriteLoc(SimpleNamespace):
    @classmethod
    def for_batch(cls, batch):
        return cls(loc=batch.out_cache_loc)


class FlashAttention:
    """Dense attention with the calls of SGLang's backend; it counts them."""

    needs_cpu_seq_lens = False

    def __init__(self, runner):
        self.runner, self.calls = runner, []

    def forward_extend(self, q, k, v, layer, batch, save_kv_cache=True, sinks=None, q_rope=None):
        self.calls.append(("extend", layer.layer_id))
        return self.attend(q, k, v, layer, batch, save_kv_cache)

    def forward_decode(self, q, k, v, layer, batch, save_kv_cache=True, sinks=None, q_rope=None):
        self.calls.append(("decode", layer.layer_id))
        return self.attend(q, k, v, layer, batch, save_kv_cache)

    def attend(self, q, k, v, layer, batch, save):
        if save:
            self.runner.token_to_kv_pool.set_kv_buffer(layer, WriteLoc.for_batch(batch), k, v)
        return dense(self.runner, q, layer, batch)


def dense(runner, q, layer, batch):
    out, at = torch.zeros_like(q).view(-1, 6, 16), 0
    for row, (new, total) in enumerate(zip(batch.new, batch.totals, strict=True)):
        slots = runner.req_to_token_pool.req_to_token[batch.req_pool_indices[row], :total].long()
        k, v = (x[layer.layer_id][slots][None] for x in (runner.token_to_kv_pool.k, runner.token_to_kv_pool.v))
        queries = q.view(-1, 6, 16)[None, at : at + new]
        mask = torch.ones(new, total, dtype=torch.bool).tril(total - new)
        out[at : at + new] = oracle_attention(queries, k, v, mask, scale=SCALE)[0][0]
        at += new
    return out.flatten(1)


@pytest.fixture
def sglang(monkeypatch):
    """Put stand-ins for SGLang's modules in place; return what the plugin registered there."""
    found = SimpleNamespace(backends={}, choices=["triton"], parallel=SimpleNamespace(attn_tp_rank=0, attn_tp_size=1))
    found.graphs = False
    register = lambda name: lambda create: found.backends.setdefault(name, create)
    phases = SimpleNamespace(DECODE="decode"), SimpleNamespace(DISABLED="disabled")
    contents = {
        "arg_groups.choices": {"add_attention_backend_choices": found.choices.extend},
        "layers.attention.attention_registry": {"register_attention_backend": register},
        "layers.attention.flashattention_backend": {"FlashAttentionBackend": FlashAttention},
        "mem_cache.memory_pool": {"KVWriteLoc": WriteLoc},
        "model_executor.cuda_graph_config": {
            "Phase": phases[0], "Backend": phases[1], "check_cuda_graph_backend": lambda *_: not found.graphs,
        },
        "model_executor.forward_batch_info": {"ForwardMode": ForwardMode},
        "runtime_context": {"get_parallel": lambda: found.parallel},
    }  # fmt: skip
    for name, content in contents.items():
        module = ModuleType(f"sglang.srt.{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        parent = module.__name__
        while parent := parent.rpartition(".")[0]:
            monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent) or ModuleType(parent))
    monkeypatch.delitem(sys.modules, "dynaxx.integrations.sglang.backend", raising=False)
    monkeypatch.setattr(sglang_engine, "_current", None)
    yield found
    sys.modules.pop("dynaxx.integrations.sglang.backend", None)


def set_policy(monkeypatch, folder, *rules, **fields):
    path = folder / "policy.json"
    dx.save_policy(dx.Policy(model=FACTS, rules=rules, **{"block_size": 16, **fields}), path)
    monkeypatch.setenv("DYNAXX_POLICY", str(path))


def runner_of(page_size=1, slots=4096, **changes):
    config = SimpleNamespace(model_type="llama", num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
                             head_dim=16, hidden_size=96)  # fmt: skip
    config.get_text_config = lambda decoder: config
    fields = {
        "model_config": SimpleNamespace(hf_text_config=config), "page_size": page_size, "use_mla_backend": False,
        "kv_cache_dtype": torch.float32, "server_args": SimpleNamespace(served_model_name="served"),
        "req_to_token_pool": SimpleNamespace(req_to_token=torch.zeros(9, 1024, dtype=torch.int32)),
        "token_to_kv_pool": Pool(slots),
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **changes})


class Batch:
    """A batch of SGLang: its requests have some keys in the cache, and new ones that the call brings."""

    def __init__(self, runner, rows, mode=ForwardMode.EXTEND, seed=0):
        draw = torch.Generator().manual_seed(seed)
        self.forward_mode, self.batch_size = mode, len(rows)
        self.new, self.totals = [new for new, _ in rows], [total for _, total in rows]
        self.req_pool_indices = torch.arange(1, len(rows) + 1)
        self.seq_lens = torch.tensor(self.totals)
        self.seq_lens_cpu = self.seq_lens.clone()
        self.extend_seq_lens_cpu = self.new
        self.extend_prefix_lens_cpu = [total - new for new, total in rows]
        size, table, slots = runner.page_size, runner.req_to_token_pool.req_to_token, []
        pages = torch.randperm(len(runner.token_to_kv_pool.k[0]) // size, generator=draw).tolist()
        for row, (new, total) in enumerate(rows):
            mine = [pages.pop() for _ in range(-(-total // size))]
            where = torch.tensor([page * size + at for page in mine for at in range(size)])[:total]
            table[row + 1, :total] = where.int()
            for layer in range(3):
                for x in (runner.token_to_kv_pool.k[layer], runner.token_to_kv_pool.v[layer]):
                    x[where[: total - new]] = torch.randn(total - new, 2, 16, generator=draw)
            slots.append(where[total - new :])
        self.out_cache_loc = torch.cat(slots)
        tokens = len(self.out_cache_loc)
        self.q = torch.randn(tokens, 96, generator=draw)
        self.k, self.v = (torch.randn(tokens, 2, 16, generator=draw) for _ in range(2))

    def run(self, backend, layer, **kwargs):
        call = backend.forward_decode if self.forward_mode.is_decode() else backend.forward_extend
        return call(self.q, self.k, self.v, layer, self, **kwargs)


def layer_of(index=0, **changes):
    fields = {
        "layer_id": index, "scaling": SCALE, "logit_cap": 0.0, "sliding_window_size": -1, "is_cross_attention": False,
        "attn_type": SimpleNamespace(value="decoder"), "qk_head_dim": 16, "v_head_dim": 16, "tp_q_head_num": 6,
        "tp_k_head_num": 2, "k_scale": None,
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **changes})


def backend_of(sglang, runner):
    plugin.register()
    return sglang.backends["dynaxx"](runner)


ROWS = ((40, 40), (17, 65), (3, 70), (128, 300), (1, 129))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED])
def test_at_density_one_outputs_are_sglangs_own(sglang, monkeypatch, tmp_path, telemetry, page_size, mode):
    set_policy(monkeypatch, tmp_path, EVERYTHING)
    runner = runner_of(page_size)
    backend, batch = backend_of(sglang, runner), Batch(runner, ROWS, mode)
    out = batch.run(backend, layer_of())
    torch.testing.assert_close(out, dense(runner, batch.q, layer_of(), batch), **CLOSE)
    assert plugin.status()["sparse_calls"] == 1
    assert backend.calls == [("extend", 0)]  # for the sequences with few queries


def test_a_batch_of_sparse_sequences_leaves_out_sglangs_attention_but_fills_the_cache(
    sglang, monkeypatch, tmp_path, telemetry
):
    set_policy(monkeypatch, tmp_path, SPARSE)
    runner = runner_of()
    backend, batch, pool = backend_of(sglang, runner), Batch(runner, ((128, 300), (200, 200))), runner.token_to_kv_pool
    out = batch.run(backend, layer_of())
    assert backend.calls == []
    assert torch.equal(pool.k[0][batch.out_cache_loc], batch.k)
    assert torch.equal(pool.v[0][batch.out_cache_loc], batch.v)
    plan, at = sglang_engine.current().deployed.plans[0], 0
    for row, (new, total) in enumerate(((128, 300), (200, 200))):
        slots = runner.req_to_token_pool.req_to_token[row + 1, :total].long()
        q, k, v = batch.q.view(-1, 6, 16)[None, at : at + new], pool.k[0][slots][None], pool.v[0][slots][None]
        want = dx.sparse_attention(q, k, v, plan.layout(q, k, scale=SCALE), scale=SCALE)
        torch.testing.assert_close(out.view(-1, 6, 16)[at : at + new], want[0], **CLOSE)
        at += new
    assert not torch.allclose(out, dense(runner, batch.q, layer_of(), batch), atol=1e-3)
    batch.run(backend, layer_of(2))  # a second layer of the step
    assert plugin.status()["sparse_layers"] == [0, 2]
    assert pool.stored == 2


@pytest.mark.parametrize("rule", [DECODE, DECODE_EVERYTHING])
def test_decoding_reads_the_pages_of_the_rule(sglang, monkeypatch, tmp_path, telemetry, rule):
    set_policy(monkeypatch, tmp_path, EVERYTHING, rule)
    runner = runner_of(page_size=16)
    backend = backend_of(sglang, runner)
    prompts = Batch(runner, ((100, 100), (200, 200)))
    prompts.run(backend, layer_of())
    batch = Batch(runner, ((1, 120), (1, 37), (1, 300)), ForwardMode.DECODE, seed=1)
    out, want = batch.run(backend, layer_of()), dense(runner, batch.q, layer_of(), batch)
    assert ("decode", 0) not in backend.calls
    same = [torch.allclose(out[row], want[row], atol=1e-4) for row in range(3)]
    assert same == ([True] * 3 if rule is DECODE_EVERYTHING else [False, True, False])  # 37 keys are three pages
    assert backend.needs_cpu_seq_lens


ELSEWHERE = {
    "a layer without a rule": (layer_of(1), {}),
    "a window": (layer_of(sliding_window_size=64), {}),
    "cross attention": (layer_of(is_cross_attention=True), {}),
    "an encoder": (layer_of(attn_type=SimpleNamespace(value="encoder_only")), {}),
    "scaled keys": (layer_of(k_scale=0.5), {}),
    "another argument": (layer_of(), {"q_rope": torch.zeros(1)}),
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_other_calls_stay_sglangs(sglang, monkeypatch, tmp_path, telemetry, case):
    layer, kwargs = ELSEWHERE[case]
    set_policy(monkeypatch, tmp_path, SPARSE)
    runner = runner_of()
    backend, batch = backend_of(sglang, runner), Batch(runner, ((200, 200),))
    batch.run(backend, layer, **kwargs)
    assert backend.calls == [("extend", layer.layer_id)]
    assert plugin.status()["active"] is False


def test_verification_of_drafts_and_decoding_without_a_rule_stay_sglangs(sglang, monkeypatch, tmp_path, telemetry):
    set_policy(monkeypatch, tmp_path, SPARSE)
    runner = runner_of()
    backend = backend_of(sglang, runner)
    Batch(runner, ((200, 200),), ForwardMode.TARGET_VERIFY).run(backend, layer_of())
    Batch(runner, ((1, 200),), ForwardMode.DECODE).run(backend, layer_of())
    assert backend.calls == [("extend", 0), ("decode", 0)]


def test_the_kill_switch_and_failing_kernels_run_dense(sglang, monkeypatch, tmp_path, telemetry):
    set_policy(monkeypatch, tmp_path, SPARSE)
    runner = runner_of()
    backend = backend_of(sglang, runner)
    plugin.switch(False)
    batch = Batch(runner, ((200, 200),))
    torch.testing.assert_close(batch.run(backend, layer_of()), dense(runner, batch.q, layer_of(), batch), **CLOSE)
    assert plugin.status()["dense_calls"] == {"kill switch": 1}
    plugin.switch(True)

    def broken(*args, **kwargs):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr("dynaxx.integrations.runtime.paged_layer.attend_in_place", broken)
    batch = Batch(runner, ((200, 200),), seed=2)
    torch.testing.assert_close(batch.run(backend, layer_of()), dense(runner, batch.q, layer_of(), batch), **CLOSE)
    assert plugin.status()["dense_calls"]["kernel failed"] == 1


REFUSED = {
    "mla": ({}, {"use_mla_backend": True}, {}, "latent attention"),
    "fp8": ({}, {"kv_cache_dtype": torch.float8_e4m3fn}, {}, "--kv-cache-dtype auto"),
    "two caches": ({}, {"kv_index_translator": object()}, {}, "separate caches"),
    "pages": ({"rules": (EVERYTHING, DECODE)}, {}, {}, "--page-size 16"),
    "graphs": ({"rules": (EVERYTHING, DECODE)}, {"page_size": 16}, {"graphs": True}, "--disable-cuda-graph"),
    "reuse": ({"reuse": 2}, {}, {}, "`reuse`"),
    "shared": ({"shared": ({"layer": 1, "source": 0, "heads": tuple(range(6))},)}, {}, {}, "remove `shared`"),
    "ranks": ({}, {}, {"parallel": SimpleNamespace(attn_tp_rank=0, attn_tp_size=4)}, "cannot be split over 4 ranks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unserved_models_are_refused_with_the_fix(sglang, monkeypatch, tmp_path, telemetry, case):
    policy, runner, engine, said = REFUSED[case]
    set_policy(monkeypatch, tmp_path, *policy.pop("rules", (EVERYTHING,)), **policy)
    vars(sglang).update(engine)
    with pytest.raises(UnsupportedInputError, match=said):
        backend_of(sglang, runner_of(**runner))


def test_a_policy_of_another_model_is_refused(sglang, monkeypatch, tmp_path, telemetry):
    set_policy(monkeypatch, tmp_path, EVERYTHING)
    runner = runner_of()
    runner.model_config.hf_text_config.num_hidden_layers = 4
    with pytest.raises(PolicyError, match="another model"):
        backend_of(sglang, runner)


def test_without_a_policy_nothing_is_registered(sglang, monkeypatch):
    monkeypatch.delenv("DYNAXX_POLICY", raising=False)
    plugin.register()
    assert sglang.backends == {}
    assert plugin.status() == {"active": False, "reason": "DYNAXX_POLICY is not set"}
    monkeypatch.setenv("DYNAXX_POLICY", "gone.json")
    with pytest.raises(FileNotFoundError, match=r"gone\.json"):
        plugin.register()


def test_the_names_are_registered_with_sglang(sglang, monkeypatch, tmp_path):
    set_policy(monkeypatch, tmp_path, EVERYTHING)
    plugin.register()
    assert sglang.choices == ["triton", "dynaxx", "dynaxx_triton"]
    assert set(sglang.backends) == {"dynaxx", "dynaxx_triton"}


NEEDED = {
    "arg_groups/choices.py": {"add_attention_backend_choices", "ATTENTION_BACKEND_CHOICES"},
    "layers/attention/attention_registry.py": {"register_attention_backend"},
    "layers/attention/flashattention_backend.py": {"FlashAttentionBackend", "forward_extend", "forward_decode"},
    "layers/attention/triton_backend.py": {"TritonAttnBackend", "forward_extend", "forward_decode"},
    "layers/radix_attention.py": {"RadixAttention", "tp_q_head_num", "tp_k_head_num", "sliding_window_size",
                                  "logit_cap", "scaling", "layer_id", "attn_type", "is_cross_attention", "k_scale"},
    "mem_cache/memory_pool.py": {"KVWriteLoc", "for_batch", "set_kv_buffer", "get_kv_buffer", "req_to_token"},
    "model_executor/cuda_graph_config.py": {"Phase", "Backend", "check_cuda_graph_backend"},
    "model_executor/forward_batch_info.py": {"ForwardMode", "extend_seq_lens_cpu", "extend_prefix_lens_cpu",
                                             "seq_lens_cpu", "req_pool_indices", "out_cache_loc", "attn_cp_metadata"},
    "runtime_context.py": {"get_parallel", "attn_tp_rank", "attn_tp_size"},
    "plugins/__init__.py": {"load_plugins", "GENERAL_PLUGINS_GROUP"},
}  # fmt: skip


def test_an_installed_sglang_has_the_names_that_the_plugin_uses():
    """Read SGLang's files, without importing them, since that needs a GPU."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        pytest.skip("SGLang is not installed")
    folder = Path(next(iter(found.submodule_search_locations))) / "srt"
    for file, names in NEEDED.items():
        tree = ast.parse((folder / file).read_text(encoding="utf-8"))
        seen = {getattr(node, key) for node in ast.walk(tree) for key in ("name", "id", "attr") if hasattr(node, key)}
        assert names <= seen, f"{file} lacks {names - seen}"
