# SPDX-License-Identifier: Apache-2.0
"""`SplitModules`: run the attention modules of `dynaxx.trained.nn` with the sequence split over ranks."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dynaxx.arguments import typed
from dynaxx.distributed.attention import sparse_attention
from dynaxx.distributed.gather import query_runs
from dynaxx.distributed.group import Mesh, group_of
from dynaxx.distributed.rules import staged_runs
from dynaxx.distributed.split import SequenceSplit
from dynaxx.layout import BLOCK_SIZES, BlockLayout, CuSeqlens
from dynaxx.patterns import Causal
from dynaxx.trained.nn import SparseAttention
from dynaxx.trained.nn.projection import ProjectedAttention


@typed
class SplitModules:
    """Make a model's attention modules attend to the tokens of all ranks; `remove` restores them.

    Args:
        model: a model with modules from `dynaxx.trained.nn`; changed in place.
        mesh: the ranks, as for `dynaxx.distributed.sparse_attention`.
        split: which rank owns which tokens of the next sequences. Assign `split` again when the length changes.

    Raises:
        ValueError: the model has no module from `dynaxx.trained.nn`.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, split: SequenceSplit) -> None:
        self.group, self.split = group_of(mesh), split
        self.modules = [module for module in model.modules() if isinstance(module, ProjectedAttention)]
        if not self.modules:
            raise ValueError("`model` must have attention modules from dynaxx.trained.nn, got none")
        for module in self.modules:
            vars(module)["attend"] = _Attend(module, self)
            vars(module)["attend_dense"] = _AttendDense(module, self)

    @property
    def rank(self) -> int:
        """Rank of this process among those that share the sequence."""
        return dist.get_rank(self.group)

    def remove(self) -> None:
        """Restore the modules, which then attend only to their own input. Further calls do nothing."""
        modules, self.modules = self.modules, []
        for module in modules:
            vars(module).pop("attend", None)
            vars(module).pop("attend_dense", None)


class _Attend:
    """Replacement for a module's `attend` while its sequence is split."""

    def __init__(self, module: ProjectedAttention, owner: SplitModules) -> None:
        self._module, self._owner = module, owner

    def __call__(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: CuSeqlens | None, cache: Any) -> Tensor:
        if cu_seqlens is not None or cache is not None:
            raise ValueError(
                "`cu_seqlens` and `cache` must be omitted while the sequence is split over ranks; call remove() first"
            )
        module, split = self._module, self._owner.split
        if isinstance(module, SparseAttention):
            layout = module.pattern.layout(split.seqlen, block_size=module.block_size, device=q.device)
            return self.over(layout, q, k, v)
        runs = query_runs(split, self._owner.rank)
        ((_, seen),) = staged_runs(k, v, runs, split, self._owner.group, stages=1)
        attend = type(module).attend
        outs = [
            attend(module, x[:, run.first : run.last], q[:, run.first : run.last], keys, values, None, None)
            for run, (keys, values) in zip(runs, seen, strict=True)
        ]
        return torch.cat(outs, 1)

    def over(self, layout: BlockLayout, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend over a layout of the whole sequence."""
        owner = self._owner
        out = sparse_attention(q, k, v, layout, owner.group, split=owner.split, scale=self._module.scale)
        return cast(Tensor, out)


class _AttendDense(_Attend):
    """Replacement for a module's `attend_dense` while its sequence is split."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: CuSeqlens | None) -> Tensor:  # type: ignore[override]
        if cu_seqlens is not None:
            raise ValueError("`cu_seqlens` must be omitted while the sequence is split over ranks; call remove() first")
        block = max(size for size in BLOCK_SIZES if self._owner.split.chunk % size == 0)
        return self.over(Causal().layout(self._owner.split.seqlen, block_size=block, device=q.device), q, k, v)
