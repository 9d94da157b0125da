# SPDX-License-Identifier: Apache-2.0
"""Which library computes torch's matrix products and attention on this CPU, as oneDNN itself reports."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import torch

# Runs in a process of its own: oneDNN reads its environment once.
PROGRAM = """
import torch
x, w = torch.randn(64, 128), torch.randn(256, 128)
q = torch.randn(1, 4, 256, 64)
def say(name, run):
    print("row", name, flush=True)
    run()
with torch.inference_mode():
    for dtype in (torch.float32, torch.bfloat16):
        a, b, c = x.to(dtype), w.to(dtype), q.to(dtype)
        name = str(dtype).removeprefix("torch.")
        say(f"linear {name}", lambda: torch.nn.functional.linear(a, b))
        say(f"sdpa {name}", lambda: torch.nn.functional.scaled_dot_product_attention(c, c, c, is_causal=True))
    say("sparse CSR @ dense float32", lambda: (torch.eye(128).to_sparse_csr() @ torch.randn(128, 32)))
print("row end", flush=True)
"""


def libraries_of_torch() -> list[dict[str, Any]]:
    """Return, for linear layers, SDPA and a sparse product, which library ran, in fp32 and bf16."""
    environment = {**os.environ, "ONEDNN_VERBOSE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise RuntimeError(f"the libraries of torch could not be asked: {done.stderr.strip()[-500:]}")
    rows: list[dict[str, Any]] = []
    for line in done.stdout.splitlines():
        if line.startswith("row "):
            rows.append({"operation": line[4:], "library": _without_onednn(line), "onednn_kernel": ""})
        elif ",exec,cpu," in line and rows and not rows[-1]["onednn_kernel"]:
            parts = line.split(",")
            at = parts.index("exec")
            if parts[at + 2] in ("matmul", "inner_product"):
                rows[-1].update(library="oneDNN", onednn_kernel=parts[at + 3])
    return rows[:-1]


def facts_of_torch() -> dict[str, Any]:
    """Return what torch says about its own libraries and this processor."""
    return {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "mkl": torch.backends.mkl.is_available(),
        "onednn": torch.backends.mkldnn.is_available(),
        "amx": bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()),
        "avx512_bf16": bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()),
    }


def _without_onednn(row: str) -> str:
    """Say what torch has for an operation for which oneDNN reported nothing."""
    if "sdpa" in row:
        return "torch's own flash attention, no oneDNN primitive"
    return "MKL" if torch.backends.mkl.is_available() else "torch's own loops"
