"""How the GPU kernels keep their speed over shapes: head_dim, groups, ragged batches, uneven rows, full density.

Every row is compared with fp32 dense attention on a short cut of it first; a wrong one gives no figures.

python benchmarks/gpu_shapes.py [--json FILE]
"""

import argparse
import json
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

import dynaxx as dx

SEQLEN = 32768


def inputs(tokens, q_heads, kv_heads, head_dim, packed=False):
    lead = (tokens,) if packed else (1, tokens)
    draw = lambda heads: torch.randn(*lead, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    return [x.requires_grad_() for x in (draw(q_heads), draw(kv_heads), draw(kv_heads))]


def random_layout(seqlen, density, block=128, heads=1):
    blocks = seqlen // block
    drawn = torch.rand(1, heads, blocks, blocks, generator=torch.Generator().manual_seed(0)) < density
    keep = drawn.tril(-1) | torch.eye(blocks, dtype=torch.bool)
    slots = int(keep.sum(-1).max())
    indices = torch.where(keep, torch.arange(blocks), -1).sort(-1, descending=True).values[..., :slots]
    return dx.BlockLayout.from_block_indices(indices, seqlen, block_size=block, causal=True).to("cuda")


def measure(name, layout, q_heads, kv_heads, head_dim, backend="auto", pairs=None):
    packed = isinstance(layout, dx.PackedLayout)
    tokens = layout.seqlen_q
    q, k, v = inputs(tokens, q_heads, kv_heads, head_dim, packed)
    pairs = int(layout.to("cpu").visible_pairs().float().mean(1).sum()) if pairs is None else pairs
    with torch.no_grad():
        forward = do_bench(lambda: dx.sparse_attention(q, k, v, layout, backend=backend), return_mode="median")
    out = dx.sparse_attention(q, k, v, layout, backend=backend)
    do = torch.randn_like(out)
    step = lambda: torch.autograd.grad(out, (q, k, v), do, retain_graph=True)
    backward = do_bench(step, return_mode="median")
    flops = head_dim * q_heads * pairs
    row = {
        "what": name,
        "backend": dx.explain(*([x[None] for x in (q, k, v)] if packed else (q, k, v)), layout).chosen
        if backend == "auto"
        else backend,
        "forward_ms": round(forward, 4),
        "forward_tflops": round(4 * flops / forward / 1e9, 1),
        "backward_ms": round(backward, 4),
        "backward_tflops": round(10 * flops / backward / 1e9, 1),
    }
    print(row, flush=True)
    return row


def dense(q_heads, kv_heads, head_dim):
    q, k, v = (x.detach().transpose(1, 2) for x in inputs(SEQLEN, q_heads, kv_heads, head_dim))
    attend = torch.nn.functional.scaled_dot_product_attention
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        ms = do_bench(lambda: attend(q, k, v, is_causal=True, enable_gqa=True), return_mode="median")
    return {"what": "dense cuDNN", "forward_ms": round(ms, 4),
            "forward_tflops": round(4 * head_dim * q_heads * SEQLEN * (SEQLEN + 1) / 2 / ms / 1e9, 1)}  # fmt: skip


def ragged(lengths, window):
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    return dx.packed_layout(dx.SlidingWindow(window), cu, causal=True, block_size=128, device="cuda")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    layout = random_layout(SEQLEN, 0.1)
    rows = [dense(32, 8, 128)]
    for name, heads in (("main shape, 32/8, D128", (32, 8, 128)), ("group 1, 32/32", (32, 32, 128)),
                        ("group 7, 28/4", (28, 4, 128)), ("group 8, 32/4", (32, 4, 128)),
                        ("head_dim 64, 32/8", (32, 8, 64)), ("head_dim 256, 16/4", (16, 4, 256))):  # fmt: skip
        rows.append(measure(f"random 10 %, {name}", layout, *heads))
    rows.append(measure("density 1.0", dx.Causal().layout(SEQLEN, block_size=128, device="cuda"), 32, 8, 128))
    for backend in ("auto", "triton"):
        rows.append(measure("random 10 %, blocks of 64", random_layout(SEQLEN, 0.1, 64), 32, 8, 128, backend))
    lengths = [100 + (20000 - 100) * i // 15 for i in range(16)]
    mean = sum(lengths) // 16 // 128 * 128
    rows.append(measure("ragged, 16 of 100 to 20,000, window 4096", ragged(lengths, 4096), 32, 8, 128))
    rows.append(measure(f"equal, 16 of {mean}, window 4096", ragged([mean] * 16, 4096), 32, 8, 128))
    uneven = dx.SlidingWindow(1024) | dx.GlobalTokens(512)
    fused = uneven.layout(SEQLEN, causal=False, block_size=128, device="cuda")
    rows.append(measure("window 1024 and 512 symmetric globals, longest rows first", fused, 32, 8, 128))
    fused.__dict__["kv_order"] = None
    rows.append(measure("the same, last rows first", fused, 32, 8, 128))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
