# SPDX-License-Identifier: Apache-2.0
"""The compile matrix: every portable kernel at shapes of real models, for GPUs that this machine lacks.

After a change that is meant to alter kernels or tiles, record again what compiles:

    PYTHONPATH=src:tests/support:tests/kernels python tests/kernels/matrix.py [--gpu sm_89] [--operation decode]

The record is part of the package: `dynaxx doctor`, `explain` and the documentation read it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial

import torch
import triton
from fingerprints import attention, decode, indexer, nsa_selection, selected, selection, token_decode, tokens

from compiled import Compiled, compile_kernels
from dynaxx.kernels.device import CARDS, Gpu
from dynaxx.kernels.proven import FILE, OPERATIONS

# One card of each architecture but Hopper, for which `test_compiled.py` has the figures of each kernel.
GPUS = {card.architecture: card for card in reversed(CARDS.values()) if not card.has_wgmma}
SPILLED = 64  # bytes; few enough to lie outside of loops

# By operation and shape. The shapes are those of GPT-OSS (64), Llama 3 and Qwen 3 (128), Gemma (256), DeepSeek (576).
CASES: dict[str, dict[str, Callable[[], None]]] = {
    "attention": {
        f"{dim}, blocks of {block}": partial(attention, "triton", dim, block)
        for dim, block in ((64, 128), (128, 128), (128, 64), (256, 128), (512, 128))
    },
    "gradients": {
        f"{dim}, blocks of {block}": partial(attention, "triton", dim, block, backward=True)
        for dim, block in ((64, 128), (128, 128), (256, 128), (512, 128))
    },
    "decode": {
        "128, bf16": partial(decode, torch.bfloat16, head_dim=128),
        "128, int8": partial(decode, torch.int8, head_dim=128),
        "128, chosen pages": partial(decode, torch.bfloat16, choose=True, head_dim=128),
        "256, bf16": partial(decode, torch.bfloat16, head_dim=256),
    },
    "selection": {f"128, {scorer}": partial(selection, scorer, 128) for scorer in ("query", "tiles", "pool", "choice")},
    "native sparse attention": {
        "64, selected blocks": partial(selected, "triton", 4),
        "128, selected blocks": partial(selected, "triton", 16, head_dim=128),
        "128, choice of blocks": partial(nsa_selection, "triton", (32, 16, 64)),
    },
    "tokens": {
        "128": partial(tokens, "triton", 4, (128, 128), 1),
        "576": partial(tokens, "triton", 128, (576, 512), 1, kv_heads=1),
        "576, decode": partial(token_decode, (16, 1), (576, 512), torch.bfloat16),
        "128, indexer": partial(indexer, "triton", 16, 128, torch.float32, 4),
    },
}
assert tuple(CASES) == OPERATIONS


def problems(found: list[Compiled], gpu: Gpu) -> list[str]:
    """Return what keeps compiled kernels from running well on a GPU; empty if nothing does."""
    said = []
    for each in found:
        if each.shared > gpu.shared_memory:
            said.append(f"{each.name} needs {each.shared:,} bytes of shared memory, of {gpu.shared_memory:,}")
        if each.spilled > SPILLED:
            said.append(f"{each.name} spills {each.spilled:,} bytes")
        said += [f"{each.name}: {line}" for line in each.warnings]
    return list(dict.fromkeys(said))


def compile_case(gpu: Gpu, operation: str, shape: str) -> dict[str, object]:
    """Compile a case; return the worst figures of its kernels, and its problems."""
    try:
        found = compile_kernels(CASES[operation][shape], "", gpu)
    except Exception as error:  # whatever a compiler raises is the reason
        return {"problems": [f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"]}
    figures = {name: max(getattr(each, name) for each in found) for name in ("registers", "spilled", "shared")}
    return {**figures, "problems": problems(found, gpu)}


def main() -> None:
    """Record what compiles."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--gpu", action="append", choices=GPUS)
    parser.add_argument("--operation", action="append", choices=CASES)
    parser.add_argument("--shape", action="append", help="such as '128, bf16'; by default all of an operation")
    given = parser.parse_args()
    for architecture in given.gpu or GPUS:
        for operation in given.operation or CASES:
            for shape in given.shape or CASES[operation]:
                made = compile_case(GPUS[architecture], operation, shape)
                record = json.loads(FILE.read_text())
                record["triton"] = triton.__version__
                record["compiled"].setdefault(architecture, {}).setdefault(operation, {})[shape] = made
                FILE.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
                print(architecture, operation, shape, made, flush=True)


if __name__ == "__main__":
    main()
