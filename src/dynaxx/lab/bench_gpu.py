"""Measure the GPU kernels beside their peers: correct first, then median times in one process, then useful TF/s.

Useful FLOPs are 4 * head_dim * q_heads * visible (query, key) pairs forward and 10 * ... backward; a dense baseline is
held against the same sparse work only where it says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dynaxx.layout import BlockLayout, to_block_mask
from dynaxx.ops.attention import sparse_attention
from dynaxx.ops.checks import check_inputs
from dynaxx.ops.dispatch import unsupported_reasons
from dynaxx.patterns import SlidingWindow

BACKENDS = ("hopper", "triton")
Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


@dataclass(frozen=True)
class Workload:
    """One shape: random causal blocks of a density, or a sliding window. bf16, batch 1, 32 / 8 heads of 128."""

    name: str
    seqlen: int
    density: float | None = None
    window: int | None = None
    block_size: int = 128

    def layout(self, device: torch.device, seed: int) -> BlockLayout:
        if self.window is not None:
            return SlidingWindow(self.window).layout(self.seqlen, block_size=self.block_size, device=device)
        return random_causal_layout(self.seqlen, self.density or 0.0, self.block_size, device, seed)


WORKLOADS = (
    Workload("random 10 %", 32768, density=0.1),
    Workload("random 30 %", 32768, density=0.3),
    Workload("random 20 %", 8192, density=0.2),
    Workload("window 1024", 32768, window=1024),
    Workload("window 4096", 32768, window=4096),
    Workload("random 10 %, blocks of 64", 32768, density=0.1, block_size=64),
)


def random_causal_layout(seqlen: int, density: float, block: int, device: torch.device, seed: int) -> BlockLayout:
    """The diagonal, and a share `density` of the blocks below it."""
    blocks = -(-seqlen // block)
    generator = torch.Generator().manual_seed(seed)
    chosen = (torch.rand(blocks, blocks, generator=generator) < density).tril(-1) | torch.eye(blocks, dtype=torch.bool)
    indices = torch.where(chosen, torch.arange(blocks), -1)
    return BlockLayout.from_block_indices(indices.view(1, 1, blocks, blocks), seqlen, block_size=block).to(device)


def run_gpu_suite(quick: bool = False, seed: int = 0) -> dict[str, Any]:
    """Check the GPU backends on random problems, then time them and their peers.

    Args:
        quick: two workloads, and no FlexAttention (it compiles for a minute).
        seed: of the random blocks and of the inputs.

    Returns:
        "device", "versions", "checks" (cases passed by backend), and "rows": one dict per workload and implementation
        with "ms" and "tflops" forward and backward, "density", and "skipped" where it did not run.

    Raises:
        RuntimeError: no GPU, or a check that failed: then there are no times.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("the GPU suite needs a CUDA GPU; none is visible to torch")
    device = torch.device("cuda", torch.cuda.current_device())
    checks = {name: check_backend(name, device, cases=4 if quick else 12, seed=seed) for name in BACKENDS}
    rows = []
    for workload in (WORKLOADS[0], WORKLOADS[3]) if quick else WORKLOADS:
        rows += time_workload(workload, device, seed, with_flex=not quick)
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "triton": _triton_version()},
        "shape": f"bf16, batch 1, {Q_HEADS}/{KV_HEADS} heads, head_dim {HEAD_DIM}, causal, median of do_bench",
        "checks": checks,
        "rows": rows,
    }


def check_backend(name: str, device: torch.device, *, cases: int, seed: int) -> int:
    """Random problems, forward and gradients, against fp64. Returns how many the backend served.

    Raises:
        RuntimeError: an error over its derived budget.
    """
    from dynaxx.testing import check_forward, check_gradients, random_case

    attend = lambda q, k, v, layout: sparse_attention(q, k, v, layout, return_lse=True, backend=name)
    served = 0
    for case_seed in range(seed, seed + cases):
        case = random_case(case_seed, dtype=torch.bfloat16, device=device, head_dims=(64, 128), block_sizes=(64, 128))
        if unsupported_reasons(name, check_inputs(case.q, case.k, case.v, case.layout)):
            continue
        for check in (check_forward, check_gradients):
            for report in check(attend, case.q, case.k, case.v, case.layout):
                if not report.ok:
                    raise RuntimeError(f"{name} is wrong, so it is not timed: {report}; {case.label}")
        served += 1
    return served


def time_workload(workload: Workload, device: torch.device, seed: int, *, with_flex: bool) -> list[dict[str, Any]]:
    """Rows of every implementation on one workload."""
    torch.manual_seed(seed)
    layout = workload.layout(device, seed)
    draw = lambda heads: torch.randn(
        1, workload.seqlen, heads, HEAD_DIM, device=device, dtype=torch.bfloat16, requires_grad=True
    )
    q, k, v = draw(Q_HEADS), draw(KV_HEADS), draw(KV_HEADS)
    flops = 4 * HEAD_DIM * Q_HEADS * int(layout.visible_pairs().sum())
    dense_flops = 2 * HEAD_DIM * Q_HEADS * workload.seqlen * (workload.seqlen + 1)
    common = {
        "workload": workload.name,
        "seqlen": workload.seqlen,
        "block_size": workload.block_size,
        "density": round(layout.density(), 4),
    }
    rows = []
    for name in BACKENDS:
        why = unsupported_reasons(name, check_inputs(q, k, v, layout))
        run = lambda name=name: sparse_attention(q, k, v, layout, backend=name)
        rows.append({**common, "implementation": name, **({"skipped": why} if why else _times(run, (q, k, v), flops))})
    peers: list[tuple[str, Callable[[], Callable[[], Tensor]], int]] = [
        ("sdpa cudnn, dense", lambda: _sdpa(q, k, v, "CUDNN_ATTENTION"), dense_flops),
        ("sdpa flash, dense", lambda: _sdpa(q, k, v, "FLASH_ATTENTION"), dense_flops),
    ]
    if with_flex:
        peers.append(("flex_attention", lambda: _flex(q, k, v, layout, workload), flops))
    for name, make, work in peers:
        try:
            rows.append({**common, "implementation": name, **_times(make(), (q, k, v), work)})
        except RuntimeError as error:  # a peer that this build or GPU lacks must not cost the other rows
            rows.append({**common, "implementation": name, "skipped": [str(error).splitlines()[0]]})
    return rows


def time_layout_build(workload: Workload, device: torch.device) -> float:
    """Milliseconds of wall time from nothing to a layout on the device, with no cache."""
    from dynaxx.patterns.base import _cached_layout

    _cached_layout.cache_clear()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    workload.layout(device, 0)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def _times(run: Callable[[], Any], inputs: tuple[Tensor, ...], flops: int) -> dict[str, float]:
    """Median milliseconds and TF/s, forward (without gradients) and backward alone."""
    from triton.testing import do_bench

    def forward() -> None:
        with torch.no_grad():
            run()

    forward_ms = do_bench(forward, return_mode="median")
    out = run()
    do = torch.randn_like(out)
    backward_ms = do_bench(lambda: torch.autograd.grad(out, inputs, do, retain_graph=True), return_mode="median")
    return {
        "forward_ms": round(forward_ms, 4),
        "forward_tflops": round(flops / forward_ms / 1e9, 1),
        "backward_ms": round(backward_ms, 4),
        "backward_tflops": round(2.5 * flops / backward_ms / 1e9, 1),
    }


def _sdpa(q: Tensor, k: Tensor, v: Tensor, backend: str) -> Callable[[], Tensor]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def run() -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
            )

    return run


def _flex(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, workload: Workload) -> Callable[[], Tensor]:
    """FlexAttention over the same blocks, masking its partial ones in closed form as its users do."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    torch.compiler.reset()  # every workload's mask_mod is another function: the cache would run full
    lists = to_block_mask(layout)
    window = workload.window

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = q_idx >= kv_idx
        return seen if window is None else seen & (q_idx - kv_idx < window)

    block_mask = BlockMask.from_kv_blocks(
        lists.kv_num_blocks,
        lists.kv_indices,
        lists.full_kv_num_blocks,
        lists.full_kv_indices,
        BLOCK_SIZE=layout.block_size,
        mask_mod=mask_mod,
        seq_lengths=(layout.seqlen_q, layout.seqlen_k),
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=block_mask, enable_gqa=True
    )


def _triton_version() -> str:
    import importlib.metadata

    return importlib.metadata.version("triton")
