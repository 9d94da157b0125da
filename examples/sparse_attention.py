# SPDX-License-Identifier: Apache-2.0
"""Attend sparsely in 20 lines: a pattern, blocks chosen from the data, and what each keeps.

Run it with `python examples/sparse_attention.py`.
"""

import torch

import dynaxx as dx

q = torch.randn(1, 4096, 8, 64)  # (batch, seqlen, heads, head_dim)
k, v = torch.randn(2, 1, 4096, 2, 64)  # two kv heads for eight q heads

rules = {
    "dense": dx.Causal(),
    "window and global tokens": dx.SlidingWindow(512) | dx.GlobalTokens(64),
    "window and the best tenth": dx.SlidingWindow(512) | dx.TopK(0.1),
}
for name, rule in rules.items():
    layout = dx.select_blocks(q, k, rule, block_size=64)
    out, lse = dx.sparse_attention(q, k, v, layout, return_lse=True)
    print(f"{name}: density {layout.density():.0%}, recall {dx.recall(q, k, layout).mean:.0%}, out {tuple(out.shape)}")
print(dx.explain(q, k, v, layout))
