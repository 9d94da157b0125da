# SPDX-License-Identifier: Apache-2.0
"""ptxas compiles Hopper's kernels over tokens without serialized products, with work beside them; needs no GPU."""

import re
import subprocess
import tempfile
from collections import defaultdict

import pytest
import torch

pytest.importorskip("triton")
from triton import knobs
from triton.backends import backends

from compiled import compile_kernels, compiling
from dynaxx.kernels.attention.contract import SavedForward
from dynaxx.trained.tokens.spans import TokenSpans
from interpreter import INTERPRETED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(INTERPRETED, reason="nothing is compiled under the interpreter"),
    pytest.mark.skipif("nvidia" not in backends, reason="this triton has no compiler for NVIDIA's GPUs"),
]
TOKENS = 4096


def choose(heads, dim, dtype):
    """Return a call that launches an indexer."""
    from dynaxx.trained.tokens.kernels.hopper import choose

    q, k = torch.zeros(TOKENS, heads, dim).to(dtype), torch.zeros(TOKENS, dim).to(dtype)
    scale, spans = torch.ones(TOKENS) if dtype.itemsize == 1 else None, TokenSpans((0, TOKENS), (0, TOKENS))
    return lambda: choose.index_tokens(q, k, torch.zeros(TOKENS, heads), scale, spans, 2048)


def attend():
    """Launch the forward and the backward of grouped-query heads."""
    from dynaxx.trained.tokens.kernels.hopper import grouped_plan, operators

    q, k = torch.zeros(512, 8, 128, dtype=torch.bfloat16), torch.zeros(512, 2, 128, dtype=torch.bfloat16)
    plan = grouped_plan.prepare(torch.zeros(512, 1, 64, dtype=torch.int32), TokenSpans((0, 512), (0, 512)), q, k, k)
    out, lse = operators.forward(q, k, k, plan, 0.1)
    operators.backward(out, lse, SavedForward(q, k, k, out, lse), plan, 0.1)


CASES = {
    "4 heads": (choose(4, 64, torch.bfloat16), "index_hopper"),
    "64 heads": (choose(64, 128, torch.float8_e4m3fn), "index_heads"),
    "grouped": (attend, "token_grouped_kernel"),
    "grouped backward": (attend, "token_grouped_rows"),
    "grouped lists": (attend, "token_grouped_lists"),
}


@pytest.mark.parametrize(
    ("name", "spilled"), [("4 heads", 450), ("64 heads", 64), ("grouped", 64), ("grouped backward", 160)]
)
def test_products_are_not_serialized(name, spilled):
    start, kernel = CASES[name]
    (found,) = compile_kernels(start, kernel)
    assert not found.warnings
    if pytest.importorskip("triton").__version__.startswith("3.6"):  # what others spill is not on record
        assert found.spilled <= spilled  # outside the loops over keys, but for a few


@pytest.mark.parametrize(("name", "products", "work"), [("grouped", 2, 48)])
def test_work_lies_between_a_product_and_its_wait(name, products, work):
    """ptxas would like to wait first: `hold_before_wait` keeps the maxima of a softmax in front of the wait."""
    code = machine_code(*CASES[name])
    beside = [
        len(re.findall("FMNMX", part))
        for part in re.findall(r"GMMA[^;]*gsb0 *;(.*?)WARPGROUP.DEPBAR.LE gsb0, 0x0", code, re.S)
    ]
    assert sum(count >= work for count in beside) >= products, beside


def test_marks_lie_where_the_kernel_sets_them():
    """The table of marks is the first of what the kernel has in shared memory; other numbers lie behind it."""
    from dynaxx.trained.tokens.kernels.hopper.grouped_lists import RANGE

    code = compiled_code(*CASES["grouped lists"], "ptx")
    assert "red.shared.or.b32" in code
    assert all(int(place) >= 4 * RANGE.value for place in re.findall(r"global_smem\+(\d+)", code))


def machine_code(start, name):
    """Return the instructions of a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled_code(start, name, "cubin"))
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def compiled_code(start, name, kind):
    """Return what a kernel is compiled to: "ptx" or "cubin"."""
    found = []

    def compile_only(kernel, grid, arguments, named):
        if name in kernel.__name__:
            patch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
            found.append(kernel.warmup(*arguments, grid=grid, **named).asm[kind])

    with compiling(compile_only) as patch:
        start()
    return found[0]
