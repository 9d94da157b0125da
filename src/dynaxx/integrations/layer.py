"""One attention call of one layer: dense for a reason, or its sequences by their runs, each with its own layout."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from dynaxx.integrations.dense import dense_attention, dense_piece, dense_reason
from dynaxx.integrations.masks import Run
from dynaxx.integrations.passes import ARGUMENT, Pass
from dynaxx.ops import sparse_attention
from dynaxx.policy import LayerPlan

if TYPE_CHECKING:
    from dynaxx.integrations.handle import Handle

logger = logging.getLogger("dynaxx")


class Work(NamedTuple):
    """The sequences of a call, by batch entry."""

    runs: list[list[Run]]
    sparse: list[list[bool]]  # which of them are
    plans: list[list[LayerPlan]]  # what those do

    @property
    def alike(self) -> bool:
        """Whether all batch entries have the same, so that they can run as one."""
        return all(entry == part[0] for part in self for entry in part)


class Layer:
    """What one attention module does under a handle."""

    __slots__ = ("__weakref__", "dense", "handle", "index")

    def __init__(self, handle: Handle, index: int, module: nn.Module) -> None:
        self.handle = handle
        self.index = index
        self.dense = dense_attention(module)

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Attend, as `AttentionInterface` asks: q (B, Hq, Lq, D), k and v (B, Hk, Lk, D) to (B, Lq, Hq, D)."""
        current = kwargs.pop(ARGUMENT, None) or self.handle.unannounced_pass(self.index)
        work = self._work(current, module, q, k, mask, kwargs)
        if isinstance(work, str):
            self.handle.counts.dense(self.index, work)
            return self.dense(module, q, k, v, mask, **kwargs)
        out = self._run(q, k, v, mask, kwargs.get("scaling"), work)
        self.handle.counts.sparse(self.index)
        return out, None

    def _work(
        self, current: Pass, module: nn.Module, q: Tensor, k: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> str | Work:
        """Why the whole call is dense; or what to do."""
        plan = current.deployed.plans.get(self.index)
        if plan is None:
            return "no rule"
        (batch, q_heads, seqlen_q, _), seqlen_k = q.shape, k.shape[2]
        if seqlen_q == 1:
            return "decode"
        q_block = plan.block_size[0]
        if seqlen_q < q_block:
            return "fewer queries than one block"
        if q_heads != plan.q_heads:
            return "heads are sharded"
        switch = current.deployed.switches[self.index]
        if seqlen_k < switch.dense_below:
            switch.sparse(seqlen_k)
            return "below dense_below"
        reason = dense_reason(module, q, k, mask, kwargs)
        if reason is not None:
            return reason
        if mask is None:
            stop = min(seqlen_q, seqlen_k)  # a static cache is longer than what is in it
            runs = [[Run(0, seqlen_q, 0, stop, True)]] * batch
        else:
            found = current.runs(mask, batch)
            if found is None:
                return "mask is not causal sequences"
            runs = found
        sparse = [
            [run.causal and run.seqlen_q >= q_block and switch.sparse(run.seqlen_k) for run in entry] for entry in runs
        ]
        if not any(map(any, sparse)):
            return "below dense_below"
        if not plan.needs_tokens:
            return Work(runs, sparse, [[plan] * len(entry) for entry in runs])
        return current.tokens.missing(batch, seqlen_k, runs) or Work(
            runs, sparse, _resolved(plan, current, runs, sparse)
        )

    def _run(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, work: Work) -> Tensor:
        """(B, Lq, Hq, D), each sequence with its own layout."""
        if work.alike:
            return self._run_entry(q, k, v, mask, scale, work.runs[0], work.sparse[0], work.plans[0])
        at = lambda x, b: x[b : b + 1]
        return torch.cat(
            [
                self._run_entry(at(q, b), at(k, b), at(v, b), None if mask is None else at(mask, b), scale, *entry)
                for b, entry in enumerate(zip(*work, strict=True))
            ]
        )

    def _run_entry(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scale: float | None,
        runs: list[Run],
        sparse: list[bool],
        plans: list[LayerPlan],
    ) -> Tensor:
        pieces = []
        for run, is_sparse, plan in zip(runs, sparse, plans, strict=True):
            rows, keys = slice(run.q_start, run.q_stop), slice(run.k_start, run.k_stop)
            part = (q[:, :, rows], k[:, :, keys], v[:, :, keys])
            if is_sparse:
                pieces.append(self._sparse_piece(*part, scale, plan))
            else:
                pieces.append(dense_piece(*part, None if mask is None else mask[:, :, rows, keys], scale, run))
                reason = "padding or prefix" if not run.causal else "below dense_below"
                self.handle.counts.dense_sequences(self.index, reason, q.shape[0])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def _sparse_piece(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, plan: LayerPlan) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        layout = plan.layout(q, k, scale=scale)
        for watcher in self.handle.watchers:
            watcher(self.index, layout)
        out = sparse_attention(q, k, v, layout, scale=scale)
        assert isinstance(out, Tensor), "without return_lse there is one result"
        return out


def _resolved(plan: LayerPlan, current: Pass, runs: list[list[Run]], sparse: list[list[bool]]) -> list[list[LayerPlan]]:
    """The plan of each sequence, for the tokens it has."""
    return [
        [current.tokens.resolve(plan, b, run) if is_sparse else plan for run, is_sparse in zip(*entry, strict=True)]
        for b, entry in enumerate(zip(runs, sparse, strict=True))
    ]


LAYERS: weakref.WeakKeyDictionary[nn.Module, Layer] = weakref.WeakKeyDictionary()
_warned: set[str] = set()


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What `AttentionInterface` calls for every layer of every model with a policy."""
    if torch.compiler.is_compiling():
        if torch.compiler.is_dynamo_compiling() and (compiled := LAYERS.get(module)) is not None:
            compiled.handle.counts.compiled()
        return dense_attention(module)(module, query, key, value, attention_mask, **kwargs)
    layer = LAYERS.get(module)
    if layer is None:  # a copy of a model with a policy, or one that shares its config
        _warn_once(f"{type(module).__name__} asks for dynaxx attention but has no policy: it runs dense")
        kwargs.pop(ARGUMENT, None)
        return dense_attention(module)(module, query, key, value, attention_mask, **kwargs)
    return layer(module, query, key, value, attention_mask, **kwargs)


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)
