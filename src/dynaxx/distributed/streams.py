# SPDX-License-Identifier: Apache-2.0
"""Order of a rank's exchanges and kernels on the streams of its GPU.

A call is a sequence of stages: some kv heads are exchanged, then their kernels run. Two buffers take turns.

    helper stream, first in line   exchange 0, blocks 0 | exchange 1, blocks 1 | exchange 2, blocks 2 | ...
    the caller's stream                                 | attention 0          |              | attention 2
    a second stream                                     |                      | attention 1  |

The kernels of neighbouring stages are on different streams, so that the programs of the next stage take the
multiprocessors that the last programs of a stage leave idle. An exchange starts when the last stage but one is done,
which read its buffer.

Copy engines need only short kernels beside them, for packing and signals. The kernels of the stages then leave a few
multiprocessors to these, and are all on the caller's stream: those of a second stream would occupy them.

NCCL's kernels wait for free multiprocessors. Without a high priority, they would wait until a stage has started all its
programs. In that case, and on a CPU, each exchange starts before the kernels of the stage before it, and all kernels
are on the caller's stream.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from dynaxx.kernels.schedule.waves import Sharing, share_multiprocessors

BESIDE_NCCL = Sharing(waves=8)  # its kernels take up to 32 multiprocessors
BESIDE_COPIES = Sharing(left=4)  # for signals, packing and selections
T = TypeVar("T")
U = TypeVar("U")
TRUE = ("1", "y", "yes", "t", "true", "on")


def exchanges_go_first(group: ProcessGroup) -> bool:
    """Return whether NCCL's kernels take free multiprocessors before programs that other kernels have not started.

    They do if the group's streams have a high priority: with TORCH_NCCL_HIGH_PRIORITY=1, or
    `ProcessGroupNCCL.Options(is_high_priority_stream=True)`.
    """
    if dist.get_backend(group) != "nccl":
        return False
    if os.environ.get("TORCH_NCCL_HIGH_PRIORITY", "").lower() in TRUE:
        return True
    options = getattr(group._get_backend(torch.device("cuda")), "options", None)
    return bool(getattr(options, "is_high_priority_stream", False))


class Lanes(NamedTuple):
    """The streams of one call on a GPU."""

    helper: torch.cuda.Stream  # for copies, exchanges and selections; of a high priority
    main: torch.cuda.Stream  # the caller's
    second: torch.cuda.Stream

    @classmethod
    @contextmanager
    def forked(cls, device: torch.device, early: Callable[[], None] | None = None) -> Iterator[Lanes]:
        """Let the other streams wait for what the caller launched so far, and the caller's for them at the end.

        Args:
            device: the GPU.
            early: function that launches kernels on the caller's stream, which the other streams do not wait for.
        """
        main = torch.cuda.current_stream(device)
        ready = main.record_event()
        if early is not None:
            early()
        lanes = cls(_stream(device.index, -1), main, _stream(device.index, 0))
        for other in (lanes.helper, lanes.second):
            other.wait_event(ready)
        try:
            yield lanes
        finally:
            torch.cuda.set_stream(main)
            for other in (lanes.helper, lanes.second):
                main.wait_stream(other)


@cache
def _stream(device: int, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=priority)


class Early(NamedTuple):
    """How the stages of a call run beside the kernels that `Stages.launch_early` launches."""

    apart: bool  # whether they write nothing that the stages write, so that the stages need not wait for them
    waits: bool = False  # whether their programs that have not started let those of the stages go first


class Stages(Generic[T]):
    """The stages of a call. Each method works on the current stream; `i` counts the stages.

    Attributes:
        count: number of stages.
        early: how the stages run beside the kernels of `launch_early`; None if it has none.
        last_alone: whether the kernels of the last stage also use the buffer of the stage before it.
        sharing: how the kernels share the multiprocessors with exchanges.
    """

    count: int
    early: Early | None = None
    last_alone: bool = False
    sharing: Sharing = BESIDE_NCCL

    def launch_early(self) -> None:
        """Launch kernels of the call that need no exchange. On streams, they come before the first exchange."""

    def start(self, i: int) -> None:
        """Start the exchange of a stage, in buffer number i % 2."""
        raise NotImplementedError

    def ahead(self, i: int) -> None:
        """Launch those kernels of a stage that need no exchange."""

    def ready(self, i: int) -> T:
        """Wait for the exchange of a stage, and return what its kernels need."""
        raise NotImplementedError

    def attend(self, i: int, gathered: T) -> None:
        """Launch the kernels of a stage."""
        raise NotImplementedError


def in_stages(stages: Stages[T], group: ProcessGroup, device: torch.device, *, known: bool) -> None:
    """Run stages so that exchanges overlap with kernels.

    Args:
        stages: the stages.
        group: the ranks.
        device: device of the tensors.
        known: whether an equal call has run before. A first call computes values that later stages and calls read
            without waiting, such as the order of a layout's rows, so its kernels are on one stream.
    """
    if known and device.type == "cuda" and exchanges_go_first(group):
        _on_streams(stages, device)
        return
    stages.start(0)
    if stages.early is not None:
        with share_multiprocessors(stages.sharing):
            stages.launch_early()
    for i in range(stages.count):
        more = i + 1 < stages.count
        if more:
            stages.start(i + 1)
        with share_multiprocessors(stages.sharing if more else None):
            stages.ahead(i)
            stages.attend(i, stages.ready(i))


def _on_streams(stages: Stages[T], device: torch.device) -> None:
    held: list[T] = []  # memory of the helper stream, which the other streams read until all have met
    done: list[torch.cuda.Event] = []
    early = stages.early
    first = stages.launch_early if early is not None else (lambda: stages.ahead(0))
    with share_multiprocessors(stages.sharing), Lanes.forked(device, first) as lanes:
        turns = (lanes.main, lanes.second) if early is None else (lanes.second, lanes.main)
        if stages.sharing.left:  # kernels of a second stream would occupy the multiprocessors left to copies
            turns = (lanes.main, lanes.main)
        for i in range(stages.count):
            torch.cuda.set_stream(lanes.helper)
            if i > 1:
                lanes.helper.wait_event(done[i - 2])
            stages.start(i)
            if early is not None and not i and not early.apart:
                lanes.second.wait_stream(lanes.main)
            lane = lanes.helper if early is not None and early.waits else turns[i % 2]
            if i:
                torch.cuda.set_stream(lane)
                stages.ahead(i)
            torch.cuda.set_stream(lanes.helper)
            held.append(stages.ready(i))
            prepared = lanes.helper.record_event()
            torch.cuda.set_stream(lane)
            lane.wait_event(prepared)
            if stages.last_alone and i and i + 1 == stages.count:
                lane.wait_event(done[i - 1])
            stages.attend(i, held[i])
            done.append(lane.record_event())
    del held


def in_returning_stages(
    count: int,
    start: Callable[[int], None],
    ready: Callable[[int], T],
    compute: Callable[[int, T], U],
    give_back: Callable[[int, U], Callable[[], None]],
) -> None:
    """Run the stages of a backward pass, which also send gradients back to their owners.

    All kernels are on the caller's stream: in the order of a second one they take as long.

    Args:
        count: number of stages.
        start: function that starts the exchange of a stage's keys and values.
        ready: function that waits for the exchange, and returns what the kernels of a stage need.
        compute: function that launches the kernels of a stage, and returns what goes back.
        give_back: function that starts to send it, and returns a function that waits for what other ranks send back,
            and adds it.
    """
    start(0)
    finish: Callable[[], None] | None = None
    for i in range(count):
        if i + 1 < count:
            start(i + 1)
        sent = compute(i, ready(i))
        following = give_back(i, sent)
        del sent
        if finish is not None:
            finish()
        finish = following
    assert finish is not None, "there is at least one stage"
    finish()
