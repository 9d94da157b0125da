# SPDX-License-Identifier: Apache-2.0
"""Every public function accepts any argument or refuses it with a message of ours that names the argument."""

import random
import traceback
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map_only

import dynaxx as dx
from dynaxx import policy
from dynaxx.layout import from_block_mask, pack_layouts, to_block_mask
from dynaxx.layout.hide_keys import hide_keys
from dynaxx.layout.paging import ExactTokens, quantize_pages
from dynaxx.ops import column_sums
from dynaxx.ops.buckets import Bucket, attend_in_buckets, bucket_by_length
from dynaxx.patterns.base import Combined
from dynaxx.patterns.compressed import Compressed
from dynaxx.selection.packed import select_packed_blocks
from dynaxx.selection.pages import PagePlan
from dynaxx.settings import Configured, registered, settings_of
from dynaxx.testing import make_qkv
from dynaxx.trained import nn

PACKAGE = str(Path(dx.__file__).parent)
ENDS = torch.tensor([0, 40, 64], dtype=torch.int32)
SIZES = dx.trained.NsaSizes(8, 4, 16, 2, 1, 1, 16)
SCORER = dx.MeanPool()
WINDOW = dx.SlidingWindow(16)


def plain_policy():
    return dx.Policy(model={"model_type": "x", "layers": 1, "q_heads": 1, "kv_heads": 1, "head_dim": 8})


def keys():
    return torch.ones(2, 64, 2, 32)


def cache():
    made = dx.PagedCache(keys(), keys(), torch.tensor([64, 30], dtype=torch.int32), page_size=16)
    return dx.trained.compress_pages(dx.summarize_pages(made), SIZES)


def qkv():
    return make_qkv(1, 64, 64, 4, 2, 32)


def packed():
    return [x[0] for x in qkv()]


def layout(rule=WINDOW, tokens=64):
    return rule.layout(tokens, block_size=16)


def buckets():
    return [Bucket(10, dx.Full()), Bucket(None, WINDOW)]


def nsa_inputs():
    q, k, v = packed()
    compressed = tuple(dx.trained.compress(x, SIZES, cu_seqlens=ENDS) for x in (k, v))
    return q, k, v, compressed, torch.ones(64, 4, 3), SIZES


def module(kind, **more):
    return kind(32, 4, 2, **more)


QUERY = torch.ones(2, 1, 4, 32)
BLOCKED = {"causal": True, "block_size": 16}
SCALED = {"scale": None, "backend": "auto"}
ENDED = {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS}

# Function, positional arguments and keyword arguments; the test replaces every argument in turn.
CALLS = {
    "sparse_attention": lambda: (dx.sparse_attention, [*qkv(), layout()], {}),
    "packed sparse_attention": lambda: (
        dx.sparse_attention,
        [*packed(), dx.packed_layout(WINDOW, ENDS, block_size=16)],
        {**ENDED, **SCALED, "softcap": 3.0, "sinks": torch.ones(4), "position_bias": None, "return_lse": True},
    ),
    "explain": lambda: (dx.explain, [*qkv(), layout()], {"softcap": None, "backend": "auto"}),
    "packed explain": lambda: (
        dx.explain,
        [*packed(), dx.packed_layout(WINDOW, ENDS, block_size=16)],
        {"softcap": None, "backend": "auto"},
    ),
    "merge_states": lambda: (dx.merge_states, [[(qkv()[0], torch.ones(1, 4, 64))] * 2], {}),
    "select_blocks": lambda: (
        dx.select_blocks,
        [*qkv()[:2], WINDOW | dx.TopK(2)],
        {**BLOCKED, "scale": None, "memory_budget": None},
    ),
    "select_packed_blocks": lambda: (
        select_packed_blocks,
        [*packed()[:2], dx.TopK(2), ENDS, ENDS],
        {**BLOCKED, "scale": None, "memory_budget": None},
    ),
    "packed_layout": lambda: (dx.packed_layout, [WINDOW, ENDS, ENDS], {**BLOCKED, "device": "cpu"}),
    "pack_layouts": lambda: (
        pack_layouts,
        [[layout(tokens=40), layout(tokens=24)], ENDS, ENDS],
        {"block_size": 16},
    ),
    "attend_in_buckets": lambda: (
        attend_in_buckets,
        [[packed(), packed()], buckets()],
        {**BLOCKED, **SCALED, "softcap": None, "sinks": None},
    ),
    "bucket_by_length": lambda: (bucket_by_length, [[3, 30], buckets()], {}),
    "PagedCache": lambda: (
        dx.PagedCache,
        [keys(), keys(), torch.tensor([64, 30], dtype=torch.int32)],
        {name: None for name in ("page_table", "leftpad_k", "k_scale", "v_scale", "summaries", "exact", "compressed")}
        | {"page_size": 16},
    ),
    "PagedCache.contiguous": lambda: (
        dx.PagedCache.contiguous,
        [keys(), keys()],
        {"page_size": 16, "seqused_k": torch.tensor([64, 30], dtype=torch.int32), "leftpad_k": None},
    ),
    "PagedCache.quantized": lambda: (
        dx.PagedCache.quantized,
        [keys(), keys(), torch.int8],
        {"page_size": 16, "seqused_k": None, "leftpad_k": None, "sinks": 4, "window": 28},
    ),
    "quantize_pages": lambda: (quantize_pages, [keys(), torch.int8, 16], {}),
    "summarize_pages": lambda: (
        dx.summarize_pages,
        [dx.PagedCache.contiguous(keys(), keys(), page_size=16)],
        {"bound": None, "new_tokens": None, "dtype": None, "backend": "auto"},
    ),
    "PagePlan.of": lambda: (PagePlan.of, [WINDOW, 100], {"page_size": 16, "seqlen_q": 1, "device": "cpu"}),
    "PagePlan.pages": lambda: (
        PagePlan.of(WINDOW, 100).pages,
        [torch.tensor([64, 30], dtype=torch.int32), 2],
        {},
    ),
    "recall": lambda: (dx.recall, [*qkv()[:2], layout()], {"rows": 16, "seed": 0, "scale": None, "causal": True}),
    "PageBudget": lambda: (dx.PageBudget, [2, 1, 1, 1.0], {}),
    "ExactTokens": lambda: (ExactTokens, [keys()[:, :20].contiguous(), keys()[:, :20].contiguous(), 4], {}),
    "sparse_decode": lambda: (dx.sparse_decode, [QUERY, cache(), dx.PageBudget(2)], {**SCALED, "return_lse": False}),
    "select_pages": lambda: (dx.select_pages, [QUERY, cache(), dx.PageBudget(2)], SCALED),
    "nsa_decode": lambda: (
        dx.trained.nsa_decode,
        [QUERY, cache(), torch.ones(2, 1, 4, 3)],
        {**SCALED, "block_indices": None},
    ),
    "native_sparse_attention": lambda: (dx.trained.native_sparse_attention, [*nsa_inputs()], {**ENDED, **SCALED}),
    "selected_attention": lambda: (
        dx.trained.selected_attention,
        [*packed(), torch.zeros(64, 2, 1, dtype=torch.int32)],
        {**ENDED, **SCALED, "block_size": 16, "return_lse": True},
    ),
    "selected_attention of tokens": lambda: (
        dx.trained.selected_attention,
        [*packed(), torch.tensor([0, 3]).expand(64, 1, 2)],
        {**ENDED, **SCALED, "block_size": 1, "softcap": 3.0, "sinks": torch.ones(4), "return_lse": True},
    ),
    "index_tokens": lambda: (
        dx.trained.index_tokens,
        [torch.ones(64, 4, 8), torch.ones(64, 8), torch.ones(64, 4), dx.trained.TopKTokens(4)],
        {**ENDED, "precision": "fp32", "backend": "auto"},
    ),
    "index_decode": lambda: (
        dx.trained.index_decode,
        [
            torch.ones(2, 1, 4, 8),
            torch.ones(2, 64, 8),
            torch.ones(2, 1, 4),
            dx.trained.TopKTokens(4),
            torch.tensor([64, 9]).int(),
        ],
        {"page_table": torch.tensor([[0, 1], [1, -1]]).int(), "precision": "fp32"},
    ),
    "index_loss": lambda: (
        dx.trained.index_loss,
        [torch.ones(1, 64, 4, 8), torch.ones(1, 64, 8), torch.ones(1, 64, 4), *qkv()[:2]],
        {
            "block_indices": torch.tensor([0, 3]).expand(1, 64, 1, 2),
            "block_size": 1,
            "scale": None,
            "index_scale": None,
        },
    ),
    "selected_decode": lambda: (
        dx.trained.selected_decode,
        [QUERY, cache(), torch.tensor([0, 3]).expand(2, 1, 1, 2)],
        {**SCALED, "block_size": 1, "softcap": 3.0, "sinks": torch.ones(4), "return_lse": True},
    ),
    "TopKTokens": lambda: (dx.trained.TopKTokens, [8], {"block_size": 4}),
    "TopKTokens.select": lambda: (dx.trained.TopKTokens(8).select, [*packed()[:2]], {**ENDED, "scale": None}),
    "explain_selected": lambda: (
        dx.trained.explain_selected,
        [*qkv(), torch.zeros(1, 64, 2, 1, dtype=torch.int32)],
        {"block_size": 16, "backend": "auto"},
    ),
    "compress": lambda: (dx.trained.compress, [packed()[1], SIZES, torch.ones(8, 2)], {"cu_seqlens": ENDS}),
    "compression_windows": lambda: (dx.trained.compression_windows, [packed()[1], SIZES], {"cu_seqlens": ENDS}),
    "nsa_spans": lambda: (dx.trained.nsa_spans, [SIZES, ENDS, ENDS], {"device": "cpu"}),
    "NsaSizes": lambda: (dx.trained.NsaSizes, [8, 4, 16, 2, 1, 1, 16, "sum"], {}),
    "from_dense": lambda: (dx.BlockLayout.from_dense, [torch.ones(1, 1, 64, 64) > 0], {"block_size": 16}),
    "from_block_indices": lambda: (
        dx.BlockLayout.from_block_indices,
        [torch.tensor([[[[0, -1], [0, 1], [1, 2], [3, 0]]]]), 64, 64],
        BLOCKED,
    ),
    "stack_heads": lambda: (dx.BlockLayout.stack_heads, [[layout(), layout()]], {}),
    "stack_batch": lambda: (dx.BlockLayout.stack_batch, [[layout(), layout()]], {}),
    "hide_keys": lambda: (hide_keys, [layout(), torch.ones(1, 64) > 0], {}),
    "column_sums": lambda: (
        column_sums,
        [*qkv()[:2], layout()],
        {**SCALED, "softcap": None, "sinks": torch.ones(4), "position_bias": dx.Alibi(torch.ones(4))},
    ),
    "Alibi": lambda: (dx.Alibi, [torch.ones(2)], {}),
    "T5Bias": lambda: (dx.T5Bias, [torch.ones(32, 2), True, 128], {}),
    "head_slice": lambda: (dx.BlockLayout.stack_heads([layout(), layout()]).head_slice, [[0, 1]], {}),
    "to": lambda: (layout().to, ["cpu"], {}),
    "density": lambda: (layout().density, [True], {}),
    "PageBudget.of": lambda: (dx.PageBudget.of, [dx.TopK(2)], {}),
    "resolve a rule": lambda: (dx.GlobalContent((1, 2)).resolve, [torch.tensor([1, 5, 2])], {}),
    "select": lambda: (dx.TopK(2).select, [*qkv()[:2]], {**BLOCKED, "scale": None, "memory_budget": None}),
    "to_block_mask": lambda: (to_block_mask, [layout()], {}),
    "from_block_mask": lambda: (from_block_mask, [to_block_mask(layout())], {"chunk": 1024}),
    "layout": lambda: (WINDOW.layout, [64, 64], {**BLOCKED, "device": "cpu"}),
    "Compressed": lambda: (Compressed, [8, 4, 0], {}),
    "bigbird": lambda: (dx.bigbird, [4, 2, 2, 0], {}),
    "longformer": lambda: (dx.longformer, [4, 1], {}),
    "streaming": lambda: (dx.streaming, [4, 2], {}),
    "nn.SparseAttention": lambda: (nn.SparseAttention, [32, 4, 2], {"pattern": WINDOW, "block_size": 16}),
    "nn.NativeSparseAttention": lambda: (
        nn.NativeSparseAttention,
        [32, 4, 2],
        {"sizes": SIZES, "compression": "mlp", "gate_init": (0.5, 0.5, 0.5)},
    ),
    "nn.MixtureOfBlockAttention": lambda: (nn.MixtureOfBlockAttention, [32, 4, 2], {"block_size": 16, "top_k": 2}),
    "nn.SwitchableAttention": lambda: (nn.SwitchableAttention, [32, 4, 2], {"sizes": SIZES}),
    "nn.WeightedCompression": lambda: (nn.WeightedCompression, [8, 2, 8], {}),
    "nn.MlpCompression": lambda: (nn.MlpCompression, [8, 2, 8, 16], {}),
    "nn.LayerCache": lambda: (nn.LayerCache, [16], {"reselect_every": 1}),
    "nn.rotate": lambda: (nn.rotate, [qkv()[0], (torch.ones(64, 32), torch.ones(64, 32))], {}),
    "a module": lambda: (module(nn.SparseAttention, pattern=WINDOW, block_size=16), [torch.ones(1, 64, 32)], {}),
    "an NSA module": lambda: (module(nn.NativeSparseAttention, sizes=SIZES), [torch.ones(1, 64, 32)], {}),
    "apply": lambda: (dx.apply, [torch.nn.Linear(2, 2), plain_policy()], {"name": "x"}),
    "save_policy": lambda: (dx.save_policy, [plain_policy(), "/dev/null/policy.json"], {}),
    "load_policy": lambda: (dx.load_policy, ["no such file"], {}),
    "parse_policy": lambda: (policy.parse_policy, ["{}"], {}),
    "policy_digest": lambda: (policy.policy_digest, [plain_policy()], {}),
    "resolve": lambda: (policy.resolve, [plain_policy()], {}),
}


def settings(rule):
    drawn = rule.random(random.Random(2), 64)
    return rule, [getattr(drawn, name) for name in settings_of(rule)], {}


CALLS |= {rule.__name__: partial(settings, rule) for rule in registered(Configured) if not issubclass(rule, Combined)}
FAIL = ("apply", "save_policy", "load_policy", "parse_policy")  # these fail even with arguments of the right kind


class Odd:
    pass


class Standing(torch.Tensor):
    """A tensor that stands for another and has no memory, as distributed and fake ones."""

    @staticmethod
    def __new__(cls, x):
        made = torch.Tensor._make_wrapper_subclass(cls, x.shape, strides=x.stride(), dtype=x.dtype, device=x.device)
        made.x = x
        return made

    @classmethod
    def __torch_dispatch__(cls, call, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda each: each.x, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, call(*args, **kwargs))


ANYTHING = (
    *(None, 3, -1, 0, 3.5, float("nan"), float("inf"), True, 2**70, 1j, b"x", "x", ""),
    *([], [1, "a"], [None], (), (1, 2), (1.5, "a"), {}, {"a": 1}, range(3), Odd(), Odd, len),
    *(torch.zeros(()), torch.zeros(0), torch.zeros(2, 2), torch.tensor(3), np.zeros(3), torch.float32),
    *(WINDOW, dx.TopK(2), layout(), SIZES),
)
OTHER_TENSORS = (
    *(lambda x: x[0], lambda x: x[None], lambda x: x.flatten(), lambda x: x.mT if x.ndim > 1 else x),
    *(torch.Tensor.int, torch.Tensor.bool, torch.Tensor.double, lambda x: x.to(torch.complex64)),
    *(Standing, lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype), lambda x: x.to(torch.float8_e4m3fn)),
    *(lambda x: x.to("meta"), torch.Tensor.to_sparse, torch.Tensor.tolist, torch.Tensor.numpy, lambda x: x + 10**6),
    *(lambda x, form=form: torch.nested.nested_tensor([x], layout=form) for form in (torch.strided, torch.jagged)),
    *(lambda x, d=d: x.narrow(d, 0, 0) if d < x.ndim else x for d in range(4)),
    *(lambda x, d=d: torch.cat([x, x], d) if d < x.ndim else x for d in range(4)),
)


def instead_of(value):
    """Return values of other kinds than a valid one."""
    yield from ANYTHING
    if isinstance(value, torch.Tensor):
        yield from (change(value) for change in OTHER_TENSORS)
    elif isinstance(value, list | tuple) and value:
        yield from (value[:0], value[:1], [*value, None], [value], [3, *value])
        if isinstance(value[0], torch.Tensor):
            yield from ([change(value[0]), *value[1:]] for change in OTHER_TENSORS)


def complaint(call, args, kwargs):
    """Return what was wrong with how a call failed; None if it succeeded or refused with a clear message."""
    try:
        call(*args, **kwargs)
    except (TypeError, ValueError, NotImplementedError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if last.filename.startswith(PACKAGE) and "raise" in (last.line or ""):
            return None
        return f"{type(error).__name__} of another's: {error}, at {last.filename}:{last.lineno}"
    except OSError as error:
        return None if error.filename else f"an error that names no file: {error}"
    except RuntimeError as error:
        return None if "same dtype" in str(error) else f"RuntimeError: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_any_argument_is_served_or_refused_in_words(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some functions take a string as a path
    call, args, kwargs = CALLS[name]()
    if name not in FAIL:
        call(*args, **kwargs)
    wrong = []
    for at in [*range(len(args)), *kwargs]:
        for bad in instead_of(args[at] if isinstance(at, int) else kwargs[at]):
            call, given, named = CALLS[name]()
            given, named = [*given], dict(named)
            (given if isinstance(at, int) else named)[at] = bad
            if found := complaint(call, given, named):
                wrong.append(f"argument {at} as {str(bad)[:60]!r}: {found[:300]}")
    assert not wrong, "\n".join(wrong[:20])


def test_an_error_of_a_function_itself_stays_as_it_is():
    with pytest.raises(ValueError, match="`q` must be") as caught:
        dx.sparse_attention(qkv()[0][0], *qkv()[1:], layout())
    assert caught.value.__cause__ is None


def test_missing_arguments_raise_pythons_own_error():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'layout'"):
        dx.sparse_attention(*qkv())
