# SPDX-License-Identifier: Apache-2.0
"""Every backend has the functions that its contract names, with the same parameters; the registry finds them."""

import inspect

import pytest
import torch

import dynaxx as dx
from dynaxx.kernels import registry
from dynaxx.kernels.attention.contract import AttentionKernels, AttentionProblem
from dynaxx.kernels.decode.contract import DecodeKernels
from dynaxx.kernels.selection.contract import SelectionKernels
from dynaxx.ops.explain import explain_decode, explain_selection
from dynaxx.trained import registry as trained_registry
from dynaxx.trained.nsa.kernels.contract import FusedBranches, Gating, NsaDecodeKernels, NsaKernels, Pooling
from dynaxx.trained.tokens.kernels.contract import IndexLossKernels

OPERATIONS = (
    (registry.ATTENTION, AttentionKernels),
    (registry.DECODE, DecodeKernels),
    (trained_registry.NSA, NsaKernels),
    (trained_registry.NSA_DECODE, NsaDecodeKernels),
    (registry.SELECTION, SelectionKernels),
    (trained_registry.INDEX_LOSS, IndexLossKernels),
)
PARTS = {"pooling": Pooling, "gating": Gating, "fused": FusedBranches}
EACH = [(operation, protocol, name) for operation, protocol in OPERATIONS for name in operation.backends]


def kernels_of(operation, backend):
    if backend in ("hopper", "triton"):
        pytest.importorskip("triton")
    return operation.kernels(backend)


def members(protocol):
    return {name: x for name, x in vars(protocol).items() if not name.startswith("_")}


def check(kernels, protocol):
    for name, member in members(protocol).items():
        assert hasattr(kernels, name), name
        if isinstance(member, property):
            part = getattr(kernels, name)
            if name in PARTS and part is not None:
                check(part, PARTS[name])
            continue
        wanted = [*inspect.signature(member).parameters][1:]
        assert [*inspect.signature(getattr(kernels, name)).parameters][: len(wanted)] == wanted, name


@pytest.mark.parametrize(("operation", "protocol", "backend"), EACH)
def test_backends_keep_the_contract(operation, protocol, backend):
    check(kernels_of(operation, backend), protocol)


def problem(**changes):
    given = {"device": torch.device("cpu"), "dtype": torch.float32, "batch": 1, "seqlen_q": 64, "seqlen_k": 64,
             "q_heads": 2, "kv_heads": 1, "head_dim": 16, "head_dim_v": 16, "block_size": (16, 16),
             "needs_grad": False}  # fmt: skip
    return AttentionProblem(**{**given, **changes})


def test_the_first_that_can_serve_is_chosen_and_every_refusal_has_its_reason():
    assert registry.ATTENTION.resolve(problem()) == "cpu"
    assert registry.ATTENTION.resolve(problem(dtype=torch.float64)) == "reference"
    with pytest.raises(dx.UnsupportedInputError, match="computes in fp32") as caught:
        registry.ATTENTION.resolve(problem(dtype=torch.float64), "cpu")
    assert [*caught.value.reasons] == ["cpu"]
    with pytest.raises(ValueError, match=r"`backend` must be 'auto' or one of .*, got 'cuda'"):
        trained_registry.NSA.resolve(problem(), "cuda")


def test_a_backend_that_does_not_import_says_so(monkeypatch):
    operation = registry.Operation("attention", {"new": registry.Backend("kernels.nowhere", "kernels.nowhere:reasons")})
    assert operation.reasons("new", problem()) == ["not available: No module named 'dynaxx.kernels.nowhere'"]
    with pytest.raises(ImportError):
        operation.kernels("new")


def test_explanations_of_decoding_and_selection():
    q, k = torch.randn(2, 1, 4, 16), torch.randn(2, 64, 2, 16)
    cache = dx.PagedCache(k, k, torch.tensor([60, 9], dtype=torch.int32), page_size=16)
    found = explain_decode(q, cache)
    assert found.chosen == "cpu"
    assert "runs on a GPU" in str(found)
    found = explain_selection(torch.randn(2, 64, 4, 16), k, dx.Sink(16) | dx.TopK(2), block_size=16)
    assert found.chosen == "torch"
    assert "runs on a GPU" in found.reasons["triton"][0]
    assert "TopK" in str(found)
