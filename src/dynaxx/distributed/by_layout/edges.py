# SPDX-License-Identifier: Apache-2.0
"""Edge rows: the rows of a stage that visit blocks of other ranks."""

from __future__ import annotations

from torch import Tensor

from dynaxx.distributed.plan import Stage


def has_edges(stage: Stage) -> bool:
    """Return whether some rows visit blocks of other ranks."""
    return stage.rows is not None and bool(stage.rows.numel())


def edge_part(x: Tensor, stage: Stage, dim: int) -> Tensor:
    """Return the edge rows of x along a dimension, without a copy where they are neighbours."""
    assert stage.rows is not None, "called for stages with inner rows"
    run = stage.run
    return x.index_select(dim, stage.rows) if run is None else x.narrow(dim, run.start, run.stop - run.start)
