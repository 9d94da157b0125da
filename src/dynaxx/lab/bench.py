# SPDX-License-Identifier: Apache-2.0
"""`dynaxx bench`: test sparse attention on this machine, then time it beside dense attention.

`benchmarks/suites` in the repository measures many more shapes, other dtypes, decoding and peers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

from dynaxx.kernels.registry import ATTENTION
from dynaxx.lab.results import plain
from dynaxx.ops.attention import sparse_attention
from dynaxx.ops.checks import check_inputs
from dynaxx.patterns import Full, LocalBlocks, Pattern, RandomBlocks, SlidingWindow
from dynaxx.testing import check_forward, check_gradients, make_qkv

HEADS, HEAD_DIM = 8, 64
CHECKED = 300  # tokens of the check, whose oracle is quadratic
SEQLEN = {"cpu": 4096, "cuda": 32768}
BLOCK = {"cpu": 64, "cuda": 128}


@dataclass(frozen=True)
class BenchRow:
    """One pattern and pass: median milliseconds of sparse attention, and of torch's causal SDPA."""

    pattern: str
    timed_pass: str  # "forward" or "backward"
    backend: str
    seqlen: int
    density: float
    ms: float
    sdpa_ms: float
    derived: ClassVar[tuple[str, ...]] = ("times_faster",)

    @property
    def times_faster(self) -> float:
        """SDPA's time over ours."""
        return self.sdpa_ms / self.ms

    def to_text(self) -> str:
        """Return a line for people."""
        return (
            f"{self.pattern:<14} {self.timed_pass:<8} density {self.density:5.1%}  {self.backend:<9} "
            f"{self.ms:9.2f} ms, SDPA {self.sdpa_ms:9.2f} ms, {self.times_faster:5.2f}x faster"
        )


def run_bench(
    device: torch.device | str = "cpu",
    *,
    seqlen: int | None = None,
    seed: int = 0,
    attend: Callable[..., Any] = sparse_attention,
    say: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """Check each pattern against fp64, forward and gradients, then time it beside torch's causal SDPA.

    Args:
        device: where to measure; fp32 on a CPU, bf16 on a GPU.
        seqlen: tokens; 4,096 on a CPU and 32,768 on a GPU by default.
        seed: seed of the inputs and of random blocks.
        attend: the function to measure, which takes the arguments of `sparse_attention`.
        say: receives each row as text.

    Returns:
        "device", "torch" and "rows" for JSON.

    Raises:
        RuntimeError: a result is wrong; then it has no time.
    """
    device = torch.device(device)
    seqlen = SEQLEN[device.type] if seqlen is None else seqlen
    blocks = -(-seqlen // BLOCK[device.type])
    patterns = {
        f"window {seqlen // 8}": SlidingWindow(seqlen // 8),
        "random 10 %": RandomBlocks(max(1, blocks // 20), seed=seed) | LocalBlocks(1),
        "full": Full(),
    }
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for pattern in patterns.values():
        _check(attend, pattern, device, dtype, seed)
    q, k, v = make_qkv(1, seqlen, seqlen, HEADS, HEADS, HEAD_DIM, dtype=dtype, device=device, seed=seed)
    q, k, v = leaves = tuple(x.requires_grad_() for x in (q, k, v))
    sdpa = _milliseconds(_attend_densely, leaves)
    rows = []
    for name, pattern in patterns.items():
        layout = pattern.layout(seqlen, block_size=BLOCK[device.type], device=device)
        problem = check_inputs(q, k, v, layout, softcap=None, needs_grad=True)
        ours = _milliseconds(lambda q, k, v, layout=layout: attend(q, k, v, layout), leaves)
        for timed_pass, ms in ours.items():
            backend, density = ATTENTION.resolve(problem, "auto"), layout.density()
            rows.append(BenchRow(name, timed_pass, backend, seqlen, density, ms, sdpa[timed_pass]))
            say(rows[-1].to_text())
    return {"device": str(device), "torch": torch.__version__, "rows": plain(rows)}


def _check(attend: Callable[..., Any], pattern: Pattern, device: torch.device, dtype: torch.dtype, seed: int) -> None:
    q, k, v = make_qkv(1, CHECKED, CHECKED, HEADS, HEADS, HEAD_DIM, dtype=dtype, device=device, seed=seed)
    layout = pattern.layout(CHECKED, block_size=BLOCK[device.type], device=device)
    with_lse = partial(attend, return_lse=True)
    for report in check_forward(with_lse, q, k, v, layout) + check_gradients(with_lse, q, k, v, layout):
        if not report.ok:
            raise RuntimeError(f"no times: {pattern!r} gives a wrong result: {report}")


def _attend_densely(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def _milliseconds(attend: Callable[..., Tensor], leaves: tuple[Tensor, ...]) -> dict[str, float]:
    """Return the median milliseconds of a forward without gradients, and of a backward."""
    out = attend(*leaves)
    do = torch.randn_like(out)
    runs = {
        "forward": lambda: attend(*(x.detach() for x in leaves)),
        "backward": lambda: torch.autograd.grad(out, leaves, do, retain_graph=True),
    }
    threads = torch.get_num_threads()
    timers = {name: Timer("run()", globals={"run": run}, num_threads=threads) for name, run in runs.items()}
    return {name: 1e3 * timer.blocked_autorange(min_run_time=0.3).median for name, timer in timers.items()}
