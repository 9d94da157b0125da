# SPDX-License-Identifier: Apache-2.0
"""`dx.apply(model, policy, mesh=mesh)`: each rank runs the whole model on its own tokens of one sequence.

Only attention looks at several tokens, so only the attention modules change, through an entry in the
`AttentionInterface` of transformers. `SplitHandle.shard` returns each rank's tokens.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from contextlib import AbstractContextManager
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dynaxx.distributed.group import Mesh, group_of, peer_errors
from dynaxx.distributed.split import SequenceSplit
from dynaxx.distributed.transformers.layer import SplitLayer, SplitModel, is_row_by_row
from dynaxx.errors import UnsupportedInputError
from dynaxx.integrations.transformers.calls.interface import name_before
from dynaxx.integrations.transformers.calls.own_pattern import BLOCK
from dynaxx.integrations.transformers.decoder import Decoder, implementation, window_of
from dynaxx.integrations.transformers.masks.lazy import LazyMask
from dynaxx.integrations.transformers.masks.rules import read_rule
from dynaxx.policy import KILL_SWITCH, KillSwitch, LayerPlan, Policy, resolve
from dynaxx.policy.rollout import Rollout, is_long

logger = logging.getLogger("dynaxx")

NAME = "dynaxx_sequence_parallel"
IGNORED = -100  # label of ignored tokens, as in transformers
GROWING_ROPE = {"dynamic", "longrope"}  # their angles depend on the longest position that a rank sees


class SplitHandle(SplitModel, AbstractContextManager["SplitHandle"]):
    """A model whose sequence is split over the ranks of a mesh. Also a context manager that removes it.

    Attributes:
        policy: the policy whose prefill rules run, or None if the model's own pattern runs.
        rank: this process's rank in the mesh.
        split: the tokens of each rank in the last sequence given to `shard`.
        kill_switch: `engage()` on any rank makes every rank run the model's own pattern, from the next `shard` on.
        counts: attention calls, "sparse" by the policy's rules and "own_pattern" by the model's own pattern.
    """

    def __init__(self, decoder: Decoder, policy: Policy | None, mesh: Mesh) -> None:
        self.policy, self.group = policy, group_of(mesh)
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._nccl = dist.get_backend(self.group) == "nccl"
        device = next(decoder.owner.parameters()).device
        if self._nccl and device.type != "cuda":
            raise ValueError(
                f"`model` must be on a GPU, since the ranks of `mesh` communicate through NCCL, got {device}"
            )
        plans = {} if policy is None else resolve(policy)
        reasons = _model_reasons(decoder) + ([] if policy is None else _policy_reasons(policy, plans, self.ranks))
        if reasons:
            raise UnsupportedInputError(
                f"{decoder.facts.model_type} with the sequence split over {self.ranks} ranks", {"transformers": reasons}
            )
        self.kill_switch = KillSwitch(KILL_SWITCH)
        self.counts: Counter[str] = Counter()
        self.before = name_before(next(iter(decoder.layers.values())))
        self.runs_rules = False
        self._split = None
        self._owner = weakref.ref(decoder.owner)
        self._modules = weakref.WeakSet(decoder.layers.values())
        self._plans = plans
        self.block = BLOCK["cpu" if device.type == "cpu" else "cuda"]
        self._chunk = lcm(self.block, *(size for plan in plans.values() for size in plan.block_size))
        self._windowed = not plans and all(window_of(module) for module in decoder.layers.values())
        for index, module in decoder.layers.items():
            LAYERS[module] = SplitLayer(self, index, plans.get(index))

    def shard(
        self, input_ids: Tensor, *, labels: Tensor | None = None, split: SequenceSplit | None = None
    ) -> dict[str, Any]:
        """Return the model's arguments for this rank's part of a batch: `model(**handle.shard(input_ids))`.

        Every rank must call it with the same batch before each forward pass. The ranks compare lengths and kill
        switches in one small exchange, so that all of them run the same attention.

        Args:
            input_ids: (batch, seqlen), without padding.
            labels: (batch, seqlen), -100 for ignored tokens. The model then returns this rank's part of the mean loss
                of the whole batch; the sum over the ranks is the loss. FSDP averages the gradients of the ranks, so
                multiply the loss by the number of ranks.
            split: the tokens of each rank. The default is one contiguous run per rank if every layer has a window, else
                zigzag, which gives each rank an early and a late run.

        Returns:
            `input_ids`, `position_ids`, `attention_mask`, `use_cache`, and the arguments of the loss if labels are
            given.

        Raises:
            ValueError: the batch is invalid, the sequence is too short to be split, or the ranks disagree.
            PeerError: another rank failed.
        """
        if input_ids.ndim != 2 or (labels is not None and labels.shape != input_ids.shape):
            shape = "" if labels is None else f" and labels {tuple(labels.shape)}"
            raise ValueError(
                f"`input_ids` must be (batch, seqlen), `labels` the same, got {tuple(input_ids.shape)}{shape}"
            )
        batch, seqlen = input_ids.shape
        if self._nccl and not input_ids.is_cuda:
            raise ValueError(f"`input_ids` must be on the GPU of the model, got {input_ids.device}")
        killed = self._agree(batch, seqlen, input_ids.device)
        if split is None:
            cut = SequenceSplit.contiguous if self._windowed else SequenceSplit.zigzag
            split = cut(seqlen, self.ranks, self._chunk)
        self._check(split, seqlen)
        policy = self.policy
        self.runs_rules = bool(
            policy is not None
            and not killed
            and is_long(seqlen, policy.dense_below, policy.sparse_from, before=False)
            and policy.rollout.covers_length(seqlen)
        )
        self._resolve(input_ids)
        self._split = split
        own = split.shard(input_ids, self.rank)
        positions = split.positions(self.rank, input_ids.device)[None].expand(batch, -1)
        found = {
            "input_ids": own,
            "position_ids": positions,
            # Without a mask, transformers interprets gaps in the positions as borders of documents.
            "attention_mask": torch.ones_like(own),
            "use_cache": False,
        }
        if labels is not None:
            following = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
            own_labels = split.shard(following, self.rank)
            count = (following != IGNORED).sum()
            found |= {"labels": own_labels, "shift_labels": own_labels, "num_items_in_batch": count}
        return found

    @torch.no_grad()
    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """Gather a result of all ranks in the order of the sequence, on every rank, without gradients.

        Args:
            x: this rank's part, such as logits (batch, own tokens, vocabulary).
            dim: the dimension of the tokens.
        """
        split = self.split
        split.check_tokens(x, split.length(self.rank), dim)
        longest = max(split.lengths)
        by_token = x.movedim(dim, 0)
        padded = by_token.new_zeros(longest, *by_token.shape[1:])
        padded[: len(by_token)] = by_token
        parts = [torch.empty_like(padded) for _ in range(self.ranks)]
        with peer_errors("gathering a result", self.group):
            dist.all_gather(parts, padded, group=self.group)
        shards = [part[: split.length(rank)] for rank, part in enumerate(parts)]
        return split.join(shards, 0).movedim(0, dim)

    def stats(self) -> dict[str, int]:
        """Return call counts since `apply`: "sparse_calls" by rules, "own_pattern_calls" by the model's own pattern."""
        return {"sparse_calls": self.counts["sparse"], "own_pattern_calls": self.counts["own_pattern"]}

    def remove(self) -> None:
        """Restore the model's attention. Further calls do nothing."""
        modules, owner = list(self._modules), self._owner()
        self._modules.clear()
        for module in modules:
            LAYERS.pop(module, None)
        if modules and owner is not None and owner.config._attn_implementation == NAME:
            owner.set_attn_implementation(self.before)

    def __exit__(self, *_: object) -> None:
        """Restore the model."""
        self.remove()

    def _agree(self, batch: int, seqlen: int, device: torch.device) -> bool:
        """Return whether any rank's kill switch is engaged.

        Raises:
            ValueError: the batches of the ranks have different shapes.
        """
        where = device if self._nccl else torch.device("cpu")
        own = torch.tensor([batch, seqlen, self.kill_switch.engaged() is not None], dtype=torch.int64, device=where)
        all_of_them = [torch.empty_like(own) for _ in range(self.ranks)]
        with peer_errors("comparing batches", self.group):
            dist.all_gather(all_of_them, own, group=self.group)
        rows = torch.stack(all_of_them).tolist()
        shapes = {tuple(row[:2]) for row in rows}
        if len(shapes) > 1:
            each = ", ".join(f"rank {rank} {tuple(row[:2])}" for rank, row in enumerate(rows))
            raise ValueError(f"`input_ids` must be the same on all ranks, got shapes {each}")
        return any(row[2] for row in rows)

    def _check(self, split: SequenceSplit, seqlen: int) -> None:
        if (split.seqlen, split.ranks) != (seqlen, self.ranks):
            raise ValueError(
                f"`split` must be for {seqlen} tokens and {self.ranks} ranks, got {split.seqlen} and {split.ranks}"
            )
        split.check_block(self._chunk)
        if min(split.lengths) < 2:
            raise ValueError(
                f"every rank must own at least 2 tokens, got {split.lengths}: {seqlen} tokens in chunks of "
                f"{split.chunk} are too few for {self.ranks} ranks; use fewer ranks or longer sequences"
            )

    def _resolve(self, input_ids: Tensor) -> None:
        """Set the rules of layers that depend on token ids for this sequence."""
        for module in self._modules:
            plan = self._plans.get(LAYERS[module].index)
            if plan is not None and plan.needs_tokens:
                if len(input_ids) != 1:
                    raise ValueError(f"`input_ids` must have one row for rules by content, got {len(input_ids)}")
                LAYERS[module].plan = plan.resolve(input_ids[0])


LAYERS: weakref.WeakKeyDictionary[nn.Module, SplitLayer] = weakref.WeakKeyDictionary()


def attach(model: nn.Module, policy: Policy | None, mesh: Mesh) -> SplitHandle:
    """Split a model's sequence over the ranks of a mesh. `dx.apply(model, policy, mesh=mesh)` calls it.

    Raises:
        ValueError: the model is already split, or is not on a GPU and the mesh is.
        PolicyError: the policy is for another model.
        UnsupportedInputError: the model or the policy cannot be split.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    decoder = Decoder.of(model)
    if any(module in LAYERS for module in decoder.layers.values()):
        raise ValueError("`model` is already split: call remove() on its handle first")
    if policy is not None:
        decoder.check(policy)
    handle = SplitHandle(decoder, policy, mesh)
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _make_mask)
    decoder.owner.set_attn_implementation(NAME)
    escaped = [index for index, module in decoder.layers.items() if implementation(module) != NAME]
    if escaped:
        handle.remove()
        raise UnsupportedInputError(
            decoder.facts.model_type,
            {"transformers": [f"set_attn_implementation does not reach layers {escaped}: their config is a copy"]},
        )
    return handle


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    layer = LAYERS.get(module)
    if layer is None:
        raise RuntimeError(
            f"{type(module).__name__} asks for {NAME!r} attention and has no handle: it is a copy of a split model; "
            "call dynaxx.apply(model, mesh=mesh) on the copy"
        )
    return layer.attend(module, query, key, value, attention_mask, kwargs), None


def _make_mask(**request: Any) -> Tensor | None:
    """Return the rule of a mask. A mask of this rank's tokens alone would be meaningless.

    Raises:
        UnsupportedInputError: the batch has padding, or no rule describes the mask.
    """
    from transformers.masking_utils import causal_mask_function

    rule = read_rule(request.get("mask_function", causal_mask_function))
    padding = request.get("attention_mask")
    if rule is None or (padding is not None and not bool(padding.all())):
        reason = "its mask has no rule" if rule is None else "padding: give every row of the batch the same length"
        raise UnsupportedInputError("a mask with the sequence split over ranks", {"transformers": [reason]})
    return LazyMask.of(rule, request)


def _model_reasons(decoder: Decoder) -> list[str]:
    """Return the reasons why a model cannot run with its sequence split."""
    config, reasons = decoder.config, []
    missing = config.num_hidden_layers - len(decoder.layers)
    if missing:
        reasons.append(f"{missing} of its {config.num_hidden_layers} layers mix tokens without attention")
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {str(each.get("rope_type")) for each in (rope, *rope.values()) if isinstance(each, dict)}
    reasons += [
        f"its rope_type {kind!r} depends on the longest position, which differs between ranks"
        for kind in sorted(kinds & GROWING_ROPE)
    ]
    return reasons


def _policy_reasons(policy: Policy, plans: dict[int, LayerPlan], ranks: int) -> list[str]:
    """Return the reasons why a policy cannot run with the sequence split."""
    reasons = []
    if policy.rollout != Rollout() and (policy.rollout.share < 1 or policy.rollout.flag is not None):
        reasons.append("`rollout` must cover all requests: ranks cannot choose requests apart")
    if policy.guard is not None:
        logger.warning("the policy's guard measures nothing while the sequence is split over ranks")
    for index, plan in plans.items():
        if plan.is_static or is_row_by_row(plan):
            continue
        if plan.q_heads % ranks or (plan.kv_heads % ranks and ranks % plan.kv_heads):
            reasons.append(
                f"layer {index} has rules that need whole heads, and its {plan.q_heads} q heads and {plan.kv_heads} kv "
                f"heads do not divide among {ranks} ranks; rules that choose row by row (TopK, TopP or Threshold with "
                "MeanQuery, MeanPool or MinMax, one for all heads) need not divide"
            )
    return reasons
