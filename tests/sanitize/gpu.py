# SPDX-License-Identifier: Apache-2.0
"""Run a small set of the GPU kernels under NVIDIA's compute-sanitizer: `python tests/sanitize/gpu.py`.

memcheck looks at every access to memory, racecheck at the order of accesses to shared memory. Each tool must first
find an error that is planted in a small kernel. The Hopper kernels order shared memory by mbarriers; `ring.py`, a
correctly ordered ring, tells whether racecheck follows them. If racecheck reports the ring, hazards of `hopper` are
shown but do not fail the run. Hazards within Triton's own hand-over to other warps are counted apart; `handover.py` is
a control that does nothing else. Needs a GPU and `compute-sanitizer` (exits with 77 without them).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

import dynaxx as dx

KERNELS = Path(dx.__file__).parent / "kernels"
PLANTED = {
    "memcheck": 'extern "C" __global__ void planted(int *out) { out[threadIdx.x + (1 << 20)] = 1; }',
    "racecheck": """extern "C" __global__ void planted(int *out) {
        __shared__ int x[256]; x[threadIdx.x] = threadIdx.x; out[threadIdx.x] = x[255 - threadIdx.x]; }""",
}


PATTERN = dx.SlidingWindow(70) | dx.GlobalTokens(3) | dx.Dilated(2, 30)


def draw(*shape: int) -> torch.Tensor:
    """Return an input with gradients."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def blocks_of(block: int, seqlen_q: int, seqlen_k: int, backend: str, head_dim: int = 64) -> None:
    """Run forward and backward over partial, full and empty blocks, with gradients through lse."""
    layout = PATTERN.layout(seqlen_q, seqlen_k, causal=True, block_size=block, device="cuda")
    q, k, v = (draw(1, length, heads, head_dim) for length, heads in ((seqlen_q, 6), (seqlen_k, 2), (seqlen_k, 2)))
    out, lse = dx.sparse_attention(q, k, v, layout, return_lse=True, backend=backend)
    (out.float().sum() + lse[lse.isfinite()].sum()).backward()


def attention(backend: str) -> None:
    """Run forward and backward over blocks of each size, ragged ends and a packed batch."""
    blocks_of(64, 200, 333, backend)
    blocks_of(128, 333, 333, backend)
    ends = torch.tensor([0, 70, 70, 201], dtype=torch.int32)
    packed = dx.packed_layout(dx.SlidingWindow(50), ends, causal=True, block_size=64, device="cuda")
    q, k, v = draw(201, 4, 64), draw(201, 2, 64), draw(201, 2, 64)
    dx.sparse_attention(q, k, v, packed, backend=backend).float().sum().backward()
    if backend == "triton":
        layout = PATTERN.layout(150, causal=False, block_size=(16, 32), device="cuda")
        q, k, v = draw(1, 150, 3, 40), draw(1, 150, 1, 40), draw(1, 150, 1, 96)
        dx.sparse_attention(q, k, v, layout, softcap=3.0, backend=backend).float().sum().backward()


def hopper() -> None:
    """`attention`, the other head_dims, and a backward in one pass, which these few keys would not choose."""
    from dynaxx.kernels.attention.hopper import backward

    attention("hopper")
    for head_dim in (128, 256):
        blocks_of(128, 200, 333, "hopper", head_dim)
    backward.backward_in_one_pass = lambda *_: True
    for head_dim in (64, 128):
        blocks_of(128, 333, 333, "hopper", head_dim)


def selection() -> None:
    """Score, select and build a layout on the device."""
    q, k = (torch.randn(1, 300, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2))
    for rule in (dx.TopK(0.3), dx.TopP(0.7), dx.SlidingWindow(64) | dx.Threshold(1.0, of="uniform")):
        dx.select_blocks(q, k, rule, block_size=64)


def decode() -> None:
    """Summarize pages, select some, attend to them and to all."""
    k, v = (torch.randn(2, 320, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    cache = dx.PagedCache(k, v, torch.tensor([320, 77], dtype=torch.int32, device="cuda"), None, 32)
    cache = dx.summarize_pages(cache, backend="triton")
    q = torch.randn(2, 1, 8, 64, device="cuda", dtype=torch.bfloat16)
    dx.sparse_decode(q, cache, backend="triton")
    dx.sparse_decode(q, cache, dx.PageBudget(0.4), backend="triton")


CONTROLS = {"handover": "a hand-over alone", "ring": "an ordered ring", "unordered": "a ring without order"}

WORK = {
    "triton": lambda: attention("triton"),
    "hopper": hopper,
    "selection": selection,
    "decode": decode,
}


def run_here(names: list[str], planted: str | None) -> None:
    if planted == "handover":
        from handover import hand_over

        hand_over()
    elif planted in ("ring", "unordered"):
        from ring import pass_through_a_ring

        pass_through_a_ring(ordered=planted == "ring")
    elif planted:
        kernel = torch.cuda._compile_kernel(PLANTED[planted], "planted")
        kernel(grid=(1, 1, 1), block=(256, 1, 1), args=[torch.zeros(256, dtype=torch.int32, device="cuda")])
    for name in names:
        WORK[name]()
    torch.cuda.synchronize()
    print("ran", *names, flush=True)


def leave_out_torch() -> list[str]:
    """Return options that skip torch's own kernels, which are most of what runs, in this version's spelling."""
    known = subprocess.run(["compute-sanitizer", "--help"], capture_output=True, text=True).stdout
    for option in ("--kernel-name-exclude", "--kernel-regex-exclude"):
        if option in known:
            return [option, "kns=at6native"]
    return []


def start(tool: str, names: list[str], planted: str | None) -> subprocess.Popen[str]:
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "20", *leave_out_torch()]
    if tool == "memcheck":
        command += ["--padding", "512"]
    command += [sys.executable, __file__, "--inside", *names, *(["--planted", planted] if planted else [])]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # otherwise tensors share one allocation
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def errors_of(report: str) -> int | None:
    """Return the errors or hazards that a tool's last line counts; None if it counts nothing."""
    found = re.findall(r"ERROR SUMMARY: (\d+)|RACECHECK SUMMARY: (\d+) hazard", report)
    return int(found[-1][0] or found[-1][1]) if found else None


def handovers(report: str) -> int:
    """Count the reported hazards wholly in a `warp_specialize` statement or at the entry of its kernel."""
    hazards = re.split(r"========= Error: Race reported", report)[1:]
    places = [re.findall(r"at (\w+)\+0x\w+ in (\w+\.py):(\d+)", hazard) for hazard in hazards]
    return sum(
        bool(each) and all(_hands_over(kernel, file, int(line)) for kernel, file, line in each) for each in places
    )


def _hands_over(kernel: str, file: str, line: int) -> bool:
    sources = (path.read_text() for path in [*KERNELS.rglob(file), *Path(__file__).parent.glob(file)])
    lines = next((text.splitlines() for text in sources if f"def {kernel}(" in text), [])
    return any("warp_specialize" in each or f"def {kernel}(" in each for each in lines[line - 1 : line + 1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inside", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--planted", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="*", choices=list(WORK), default=list(WORK))
    parser.add_argument("--tools", nargs="*", choices=list(PLANTED), default=list(PLANTED))
    parser.add_argument("--seconds", type=float, default=600.0, help="give up on a tool after so many")
    args = parser.parse_args()
    if not torch.cuda.is_available() or shutil.which("compute-sanitizer") is None:
        print("skipped: needs a GPU and compute-sanitizer")
        return 77
    if args.inside is not None:
        run_here(args.inside, args.planted)
        return 0
    run_here(args.only, None)  # compile first, and report failures without a sanitizer
    runs: list[tuple[str, list[str], str | None]] = [(tool, [], tool) for tool in args.tools]
    runs += [("racecheck", [], control) for control in CONTROLS if "racecheck" in args.tools]
    runs += [(tool, [name], None) for tool in args.tools for name in args.only]
    started = [(*run, start(*run)) for run in runs]
    deadline, failed, judged = time.time() + args.seconds, False, True
    for tool, names, planted, process in started:
        try:
            report, _ = process.communicate(timeout=max(1.0, deadline - time.time()))
        except subprocess.TimeoutExpired:
            process.kill()
            report, _ = process.communicate()
        total, apart = errors_of(report), handovers(report)
        errors = (total or 0) - apart
        if total is None or ("ran" not in report and planted != tool):
            good, verdict = False, "no verdict (out of time, or died)"
        elif planted == tool or planted == "unordered":
            good, verdict = errors > 0, f"found {errors}"
        elif planted == "ring":
            judged, good = errors == 0, True
            verdict = "mbarriers are followed" if judged else f"{errors} errors: mbarriers are not followed"
        elif tool == "racecheck" and names == ["hopper"] and not judged:
            good, verdict = True, f"{errors} errors, not judged"
        else:
            good, verdict = errors == 0, f"{errors} errors"
        verdict += f", and {apart} where Triton hands over to other warps" if apart else ""
        failed |= not good
        what = CONTROLS.get(planted, "a planted error") if planted else "".join(names)
        print(f"{'ok  ' if good else 'FAIL'} {tool}, {what}: {verdict}", flush=True)
        if not good:
            print("\n".join(report.splitlines()[-30:]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
