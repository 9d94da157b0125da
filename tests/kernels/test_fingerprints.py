# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled for sm_90 match the recorded fingerprints. See `fingerprints.py` for how to record them again."""

import json

import fingerprints
import pytest
from triton.backends import backends

from interpreter import INTERPRETED

KNOWN = json.loads(fingerprints.FILE.read_text()).get(fingerprints.VERSION, {})
INTERMEDIATE, MACHINE_CODE = KNOWN.get("intermediate", {}), KNOWN.get("machine code", {})
SHORT = ("triton forward 64/64", "triton backward 64/64", "triton selected 4", "triton decode bf16",
         "triton selection choice", "triton selection query")  # fmt: skip
RENEW = "if kernels are meant to differ: PYTHONPATH=src:tests/support python tests/kernels/fingerprints.py"
pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="nothing is compiled under the interpreter"),
    pytest.mark.skipif("nvidia" not in backends, reason="this triton has no compiler for NVIDIA's GPUs"),
    pytest.mark.skipif(not KNOWN, reason=f"nothing is on record for triton {fingerprints.VERSION}"),
]
slow = pytest.mark.slow
each = [
    name if name in SHORT else pytest.param(name, marks=slow) for name in fingerprints.CASES if name in INTERMEDIATE
]


@pytest.mark.parametrize("name", each)
def test_intermediate_code(name):
    assert fingerprints.intermediate(fingerprints.CASES[name]) == INTERMEDIATE[name], RENEW


@slow
@pytest.mark.parametrize("name", MACHINE_CODE)
def test_machine_code(name):
    assert fingerprints.machine_code(fingerprints.CASES[name]) == MACHINE_CODE[name], f"{RENEW} --machine-code"


def test_every_case_is_on_record():
    assert {*fingerprints.CASES} == {*INTERMEDIATE}, RENEW
