# SPDX-License-Identifier: Apache-2.0
"""Portable kernels compile for GPUs that this machine lacks, and the record of what compiles says so."""

import json

import matrix
import pytest
import torch
import triton
from triton.backends import backends

from dynaxx.kernels.attention.triton import config
from dynaxx.kernels.device import CARDS, FAMILIES
from dynaxx.kernels.proven import FILE, OPERATIONS, all_proofs, never_ran, proof_of, reasons, table
from interpreter import INTERPRETED

RECORD = json.loads(FILE.read_text())
SHORT = (("sm_120", "attention", "128, blocks of 128"), ("sm_89", "decode", "128, bf16"),
         ("gfx942", "attention", "128, blocks of 128"))  # fmt: skip
each = [
    case if case in SHORT else pytest.param(*case, marks=pytest.mark.slow)
    for case in ((gpu, name, shape) for gpu in matrix.GPUS for name, shapes in matrix.CASES.items() for shape in shapes)
]


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled under the interpreter")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset")
@pytest.mark.parametrize(("architecture", "operation", "shape"), each)
def test_compiles(architecture, operation, shape):
    gpu = matrix.GPUS[architecture]
    if ("nvidia" if gpu.vendor == "nvidia" else "amd") not in backends:
        pytest.skip(f"this triton has no compiler for {gpu}")
    found = matrix.compile_case(gpu, operation, shape)["problems"]
    known = RECORD["compiled"].get(architecture, {}).get(operation, {}).get(shape, {"problems": []})["problems"]
    if triton.__version__ != RECORD["triton"]:  # whose registers are not known
        found, known = ([said for said in problems if " spills " not in said] for problems in (found, known))
    assert found == known


def test_the_record_names_what_is_compiled():
    for architecture, operations in RECORD["compiled"].items():
        assert architecture in FAMILIES
        for operation, shapes in operations.items():
            assert set(shapes) <= set(matrix.CASES[operation]), operation
    assert all(set(shown) <= set(OPERATIONS) for shown in RECORD["ran"].values())


def test_every_entry_that_is_refused_has_a_reason():
    proofs = [proof for shown in all_proofs().values() for proof in shown.values() if proof.state != "unknown"]
    assert {proof.state for proof in proofs} <= {
        "measured",
        "tests passed",
        "compiled, never run",
        "refused",
        "unknown",
    }
    assert all(proof.reason for proof in proofs)
    assert len(reasons()) == len(proofs)
    assert all(len(row) == len(table()[0]) for row in table())


def test_only_gpus_that_ran_are_called_proven():
    assert proof_of("sm_90", "attention").state == "measured"
    assert never_ran(CARDS["H200"], "attention") == ""
    assert proof_of("sm_75", "attention").state == "unknown"
    for card in ("A100", "L4", "MI300X", "B200"):
        assert "never ran" in never_ran(CARDS[card], "attention")


@pytest.mark.parametrize("name", CARDS)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256, 512])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_tiles_fit_any_gpu(name, head_dim, block):
    """Tiles divide their blocks, and resident and streamed tiles fit in shared memory."""
    gpu = CARDS[name]
    tma = gpu.has_tma and block >= config.TMA_BLOCK
    for choose in (config.forward_tiles, config.backward_dq_tiles, config.backward_dkv_tiles, config.backward_dv_tiles):
        tiles = choose(gpu, torch.bfloat16, head_dim, head_dim, (block, block), tma)
        stay, step = (tiles.block_m, tiles.block_n)[:: -1 if "dkv" in choose.__name__ or "dv" in choose.__name__ else 1]
        assert block % stay == 0
        assert block % step == 0 or (not tma and step % block == 0)
        if not gpu.has_wgmma:
            assert 2 * (stay * head_dim + 2 * step * head_dim) <= gpu.shared_memory, (choose.__name__, tiles)
        assert gpu.has_wgmma or tiles.max_registers is None
