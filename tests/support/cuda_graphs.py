# SPDX-License-Identifier: Apache-2.0
"""A check of attention in a CUDA graph, for every backend on a GPU."""

import torch


def check_replay(attend, q, k, v, layout):
    """Capture attend(q, k, v, layout), replay it for other queries, and compare with a call, bit by bit."""
    attend(q, k, v, layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(q, k, v, layout)
    q.copy_(torch.randn_like(q))
    graph.replay()
    again = attend(q, k, v, layout)
    assert torch.equal(out, again.out)
    assert torch.equal(lse, again.lse)
