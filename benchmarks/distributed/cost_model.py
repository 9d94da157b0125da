# SPDX-License-Identifier: Apache-2.0
"""Cost model of attention over a split sequence: work per rank, bytes per link, time and memory.

Time of a pass on one GPU = visited blocks x time per block
                          + bytes received / link
                          + bytes copied / memory speed
                          + a constant per call
                          - what the exchanges and copies of later stages hide behind the computation of earlier ones.
`benchmarks/distributed/distributed.py` measures the numbers of a machine. `benchmarks/distributed/distributed_model.py`
compares the model with the measurements and extrapolates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from dynaxx.arguments import typed

BYTES = 2  # bytes per element in bf16


@typed
@dataclass(frozen=True)
class Shape:
    """Heads and blocks of one attention call, in bf16.

    Args:
        q_heads: number of q heads.
        kv_heads: number of kv heads.
        head_dim: elements per head.
        block: tokens per block, of queries and of keys.
    """

    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block: int = 128

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all kv heads."""
        return 2 * self.kv_heads * self.head_dim * BYTES

    @property
    def query_bytes(self) -> int:
        """Bytes of one token's queries in all q heads."""
        return self.q_heads * self.head_dim * BYTES


@typed
@dataclass(frozen=True)
class Workload:
    """A causal pattern, described by the blocks that a row visits.

    Args:
        kind: "window": the last `amount` tokens. "random": a random share `amount` of the visible blocks. "top_k":
            `amount` blocks per row, at any position.
        amount: number of tokens, share, or number of blocks, depending on `kind`.
    """

    kind: Literal["window", "random", "top_k"]
    amount: float

    def visited_blocks(self, seqlen: int, block: int) -> float:
        """Return how many blocks all rows of one head visit."""
        rows = -(-seqlen // block)
        if self.kind == "random":
            return sum(math.ceil(self.amount * (row + 1)) for row in range(rows))
        per_row = math.ceil((self.amount - 1) / block) + 1 if self.kind == "window" else self.amount
        full = max(0, rows - int(per_row))
        return full * per_row + (rows - full) * (rows - full + 1) / 2

    def received_tokens(self, seqlen: int, ranks: int, block: int) -> float:
        """Return the largest number of tokens whose keys and values a rank receives, with the best split for `kind`.

        The result is exact for "window", and for "random" if each rank's rows visit nearly every block; otherwise it is
        an expected value.
        """
        if ranks == 1:
            return 0
        own = seqlen / ranks
        if self.kind == "window":
            return min(seqlen - own, math.ceil((self.amount - 1) / block) * block)
        rows = own / block
        density = self.amount if self.kind == "random" else min(1.0, 2 * self.amount / (seqlen / block))
        needed = 1 - (1 - density) ** (rows / 2)  # about half of a rank's rows come after a given block
        return (seqlen - own) * (1.0 if needed >= 0.8 else needed)


@typed
@dataclass(frozen=True)
class Machine:
    """Measured speeds of GPUs and links.

    Args:
        forward: (own tokens, seconds per visited block and q head), ascending; interpolated over the logarithm.
        backward: like `forward`, for a backward pass alone. It grows with the data that must stay in the L2 cache.
        link: bytes per second that a GPU receives from GPUs of its node while it sends as many.
        network: bytes per second that a GPU receives from other nodes while it sends as many.
        node: GPUs per node.
        copy: bytes per second that a GPU's memory reads and writes.
        call: constant seconds per pass, for example to start the exchange.
        beside: share of the time of an overlapped exchange that the computation loses, because both use the same
            multiprocessors.
        start: constant seconds of a call on the host before its first kernel, beyond those of one GPU.
    """

    forward: tuple[tuple[int, float], ...]
    backward: tuple[tuple[int, float], ...]
    link: float
    network: float
    node: int = 8
    copy: float = 2.5e12
    call: float = 1.5e-4
    beside: float = 0.5
    start: float = 0.0


@typed
@dataclass(frozen=True)
class Cost:
    """Predicted costs of a pass on the busiest GPU."""

    compute: float  # seconds
    exchange: float  # seconds
    other: float  # seconds for copies and for starting the exchange
    bytes_received: float
    memory: float  # bytes: inputs, results, gradients and buffers
    hidden: float = 0.0  # seconds of the exchange and the copies that run during the computation

    @property
    def seconds(self) -> float:
        """Total time."""
        return self.compute + self.exchange + self.other - self.hidden


@typed
def predict(
    workload: Workload,
    shape: Shape,
    machine: Machine,
    seqlen: int,
    ranks: int,
    *,
    backward: bool = False,
    imbalance: float = 1.0,
    by_heads: int = 1,
    stages: int = 1,
) -> Cost:
    """Predict the cost of a forward pass, or of a forward and a backward pass, on the busiest GPU.

    Args:
        workload: pattern of the attention.
        shape: heads and blocks of the attention.
        machine: speeds of GPUs and links.
        seqlen: tokens of the whole sequence.
        ranks: number of GPUs that share the sequence.
        backward: include the backward pass. Keys and values are then gathered twice, and their gradients return once.
        imbalance: work of the busiest GPU divided by the mean.
        by_heads: number of GPUs per node that split the heads of the same tokens, so that each receives only a part of
            the kv heads.
        stages: number of groups of kv heads, as for `dynaxx.distributed.sparse_attention`. All but the first are
            exchanged while the stage before is computed. A window's exchange runs while its inner rows are computed.

    Raises:
        ValueError: a size is below 1, or `by_heads` exceeds the number of kv heads or of GPUs per node.
    """
    if min(seqlen, ranks, by_heads, stages) < 1 or by_heads > min(shape.kv_heads, machine.node) or ranks % by_heads:
        raise ValueError(
            "`seqlen`, `ranks`, `by_heads` and `stages` must be >= 1, `by_heads` a divisor of `ranks` and at most "
            f"{min(shape.kv_heads, machine.node)}, got {seqlen}, {ranks}, {by_heads} and {stages}"
        )
    own = seqlen / ranks
    blocks = workload.visited_blocks(seqlen, shape.block) * shape.q_heads / ranks * imbalance
    per_block = between(machine.forward, own) + (between(machine.backward, own) if backward else 0.0)
    received = workload.received_tokens(seqlen, ranks // by_heads, shape.block) * shape.token_bytes / by_heads
    heads_bytes = 0.0 if by_heads == 1 else own * (2 * shape.query_bytes + shape.token_bytes) * (1 - 1 / by_heads)
    passes = 3 if backward else 1
    near = 1.0 if ranks <= machine.node else (machine.node / by_heads - 1) / max(1, ranks / by_heads - 1)
    exchange = received * (near / machine.link + (1 - near) / machine.network) + heads_bytes / machine.link
    copied = 2 * (own * shape.token_bytes + received) if workload.kind != "window" else 2 * received
    held = own * (2 * shape.query_bytes + shape.token_bytes) * (2 if backward else 1)
    buffers = (received + own * shape.token_bytes) * (2 if backward else 1) if workload.kind != "window" else received
    compute = blocks * per_block
    if ranks == 1:
        return Cost(compute=compute, exchange=0.0, other=0.0, bytes_received=0.0, memory=held)
    later = 1.0 if workload.kind == "window" else 1 - 1 / stages  # the inner rows of a window run beside the exchange
    copies = copied / machine.copy
    overlapped = passes * (exchange + copies) * later
    return Cost(
        compute=compute,
        exchange=passes * exchange,
        other=passes * (copies + machine.call) + machine.start,
        bytes_received=passes * received,
        memory=held + buffers * min(1.0, 2 / stages),
        hidden=min(overlapped * (1 - machine.beside), compute * later),
    )


def between(points: tuple[tuple[int, float], ...], tokens: float) -> float:
    """Interpolate the value at `tokens`: linear in the logarithm between measured points, constant beyond them."""
    if tokens <= points[0][0]:
        return points[0][1]
    for (a, low), (b, high) in pairwise(points):
        if tokens <= b:
            return low + (high - low) * math.log(tokens / a) / math.log(b / a)
    return points[-1][1]
