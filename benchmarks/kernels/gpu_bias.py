# SPDX-License-Identifier: Apache-2.0
"""Time attention with a bias by position on a GPU: 16,384 tokens, a window of 1,024, beside FlexAttention's score_mod.

    python benchmarks/kernels/gpu_bias.py --json gpu_bias.json

32 q heads over 8 kv heads of 128, bf16, causal, blocks of 128. Outputs are compared with FlexAttention's first. Times
are the median and the largest of 15 calls in turns; those of a backward include that of the forward.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dynaxx as dx
from dynaxx.lab.machine import need_gpu
from dynaxx.layout import to_block_mask

TOKENS, WINDOW, ROUNDS = 16384, 1024, 15


def flex(q: Tensor, k: Tensor, v: Tensor, layout: dx.BlockLayout, numbers: Tensor, kind: str) -> Any:
    """Return a call of FlexAttention with the slopes of ALiBi, or with a table of a bias per head and distance."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j < WINDOW)

    def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - numbers[h] * (i - j)

    def table(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + numbers[h, (i - j).clamp(0, WINDOW - 1)]

    lists = to_block_mask(layout)
    full = (lists.full_kv_num_blocks, lists.full_kv_indices)
    mask = BlockMask.from_kv_blocks(
        lists.kv_num_blocks, lists.kv_indices, *full, BLOCK_SIZE=128, mask_mod=mask_mod, seq_lengths=(TOKENS, TOKENS)
    )
    score_mod = {"none": None, "alibi": alibi, "table": table}[kind]
    compiled = torch.compile(flex_attention, dynamic=False)
    run = lambda q, k, v: compiled(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), score_mod=score_mod, block_mask=mask, enable_gqa=True
    ).transpose(1, 2)
    return run


def milliseconds(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    need_gpu()
    layout = dx.SlidingWindow(WINDOW).layout(TOKENS, block_size=128, device="cuda")
    draw = lambda heads: torch.randn(1, TOKENS, heads, 128, device="cuda", dtype=torch.bfloat16).requires_grad_()
    q, k, v, do = draw(32), draw(8), draw(8), draw(32).detach()
    slopes = 2.0 ** -torch.linspace(0.25, 8, 32, device="cuda", dtype=torch.float32)
    t5 = torch.randn(32, 32, device="cuda", dtype=torch.float32)
    ahead = -torch.arange(WINDOW, device="cuda", dtype=torch.float32)
    by_distance = dx.T5Bias(t5, bidirectional=False).by_distance(ahead)[0].contiguous()
    trained = {"slopes": slopes.clone().requires_grad_(), "t5": t5.clone().requires_grad_()}
    attend = lambda bias=None, backend="auto": dx.sparse_attention(q, k, v, layout, position_bias=bias, backend=backend)
    calls: dict[str, tuple[Callable[[], Tensor], tuple[Tensor, ...]]] = {
        "no bias, Hopper kernels": (attend, ()),
        "no bias, portable kernels": (lambda: attend(backend="triton"), ()),
        "ALiBi": (lambda: attend(dx.Alibi(slopes)), ()),
        "ALiBi, gradients of slopes": (lambda: attend(dx.Alibi(trained["slopes"])), (trained["slopes"],)),
        "T5": (lambda: attend(dx.T5Bias(t5, bidirectional=False)), ()),
        "T5, gradients of the table": (
            lambda: attend(dx.T5Bias(trained["t5"], bidirectional=False)), (trained["t5"],)
        ),
    }  # fmt: skip
    refused = {}
    for kind, numbers, ours in (("alibi", slopes, "ALiBi"), ("table", by_distance, "T5")):
        try:
            run = flex(q, k, v, layout, numbers, kind)
            error = (run(q, k, v) - calls[ours][0]()).abs().max().item()
            assert error < 0.05, (kind, error)
            calls[f"FlexAttention, {ours}"] = (lambda run=run: run(q, k, v), ())
        except Exception as error:  # said in the result
            refused[f"FlexAttention, {ours}"] = f"{type(error).__name__}: {error}"[:300]
    times: dict[str, dict[str, list[float]]] = {name: {"forward": [], "backward": []} for name in calls}
    for i in range(ROUNDS + 3):
        for name, (call, others) in calls.items():
            with torch.no_grad():
                forward = milliseconds(call)
            both = milliseconds(lambda call=call, others=others: torch.autograd.grad(call(), (q, k, v, *others), do))
            if i >= 3:
                times[name]["forward"].append(forward)
                times[name]["backward"].append(both)
    rows: list[dict[str, Any]] = []
    for name, found in times.items():
        row = {"bias": name}
        for what, each in found.items():
            row |= {f"{what}, ms": round(statistics.median(each), 3), f"{what}, largest": round(max(each), 3)}
        rows.append(row)
        print(row, flush=True)
    print(refused)
    if args.json:
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "refused": refused}
        args.json.write_text(json.dumps({**facts, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
