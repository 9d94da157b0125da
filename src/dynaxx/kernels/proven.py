# SPDX-License-Identifier: Apache-2.0
"""List what was shown for each GPU and operation: measured, tested, compiled, or refused with the reason.

`tests/kernels/matrix.py` records what compiles. What ran is entered with the benchmark or the commit that shows it.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from dynaxx.kernels.device import FAMILIES, Gpu

FILE = Path(__file__).with_suffix(".json")
OPERATIONS = ("attention", "gradients", "decode", "selection", "native sparse attention", "tokens")
NEVER = "compiled, never run"


class Proof(NamedTuple):
    """State and origin of the evidence for one operation on one architecture."""

    state: str  # "measured", "tests passed", `NEVER`, "refused" or "unknown"
    reason: str  # where it was shown, or why it is refused; "" if there is nothing to say


def proof_of(architecture: str, operation: str) -> Proof:
    """Return what was shown for an operation of `OPERATIONS` on an architecture, such as "sm_89"."""
    record = _record()
    ran = record["ran"].get(architecture, {})
    if operation in ran:
        return Proof(*ran[operation])
    shapes: dict[str, Any] = record["compiled"].get(architecture, {}).get(operation, {})
    if not shapes:
        return Proof("unknown", "")
    shown = [f"{shape}{''.join(f' ({problem})' for problem in made['problems'])}" for shape, made in shapes.items()]
    fails = [any(" spills " not in problem for problem in made["problems"]) for made in shapes.values()]
    return Proof("refused" if all(fails) else NEVER, f"head_dim {'; '.join(shown)} (triton {record['triton']})")


def never_ran(gpu: Gpu, operation: str) -> str:
    """Return a sentence for GPUs on which the portable kernels of an operation never ran; "" for others."""
    proof = proof_of(gpu.architecture, operation)
    if gpu.vendor == "interpreter" or proof.state in ("measured", "tests passed"):
        return ""
    advice = "`dynaxx doctor --device cuda` checks them, `dynaxx.ops.autotune.autotune` measures tile sizes"
    return f"the developers never ran these kernels on {gpu} ({proof.state}): {advice}"


def all_proofs() -> dict[str, dict[str, Proof]]:
    """Return what was shown, by architecture on record and by operation."""
    record = _record()
    known = [each for each in FAMILIES if each in record["ran"] or each in record["compiled"]]
    return {each: {operation: proof_of(each, operation) for operation in OPERATIONS} for each in known}


def table() -> list[list[str]]:
    """Return the rows of the table of GPUs: a header, then one row per architecture."""
    rows = [[f"{FAMILIES[each]} ({each})", *(p.state for p in shown.values())] for each, shown in all_proofs().items()]
    return [["GPU", *OPERATIONS], *rows]


def reasons() -> list[str]:
    """Return a line for each entry of the table: where it was shown, what was compiled, or why it is refused."""
    return [
        f"{architecture}, {operation}: {proof.reason}"
        for architecture, shown in all_proofs().items()
        for operation, proof in shown.items()
        if proof.reason
    ]


@lru_cache(maxsize=1)
def _record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found
