# SPDX-License-Identifier: Apache-2.0
"""One rank dies while the others work; `ranks.py` runs this case."""

import os
import time

import pytest
import torch
from ranks import COLLECTIVE_SECONDS, Ranks

import dynaxx as dx
from dynaxx import distributed as dxd


def case_a_rank_is_killed_between_two_steps(ranks: Ranks):
    layout = dx.Causal().layout(256, block_size=32, device=ranks.device)
    split = dxd.sequence_split(layout, ranks.mesh)
    shape = (1, split.length(ranks.rank), 2, 16)
    own = [torch.randn(shape, device=ranks.device, requires_grad=True) for _ in range(3)]
    stages = 2 if "DYNAXX_COPY_ENGINES" in os.environ else None  # one stage does not use them
    attend = lambda: dxd.sparse_attention(*own, layout, ranks.mesh, split=split, stages=stages)
    out = attend()
    if ranks.rank == ranks.count - 1:
        os.kill(os.getpid(), 9)

    def go_on():
        out.sum().backward()
        for _ in range(3):  # a rank may finish its part of a step before it notices
            attend().sum().backward()
        if ranks.device == "cuda":
            torch.cuda.synchronize()  # NCCL's watchdog ends the process here

    start = time.monotonic()
    with pytest.raises(dxd.PeerError, match=rf"rank {ranks.rank} of {ranks.count} failed while .*another rank died"):
        go_on()
    connecting = 80 if stages else 0  # seconds: the backward pass is the first to use NCCL, which tries for a minute
    assert time.monotonic() - start < COLLECTIVE_SECONDS + 5 + connecting
