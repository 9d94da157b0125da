"""Run a policy in a Hugging Face model: prefill sparse by the rules, all else exactly as before.

Through transformers' `AttentionInterface` and `AttentionMaskInterface`. Masks are transformers' own, and they are the
truth: a sparse layer shows what the mask shows and its layout keeps. What a rule does not cover goes to the attention
that the model had, with the same arguments, and is counted by reason.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dynaxx.errors import PolicyError, UnsupportedInputError
from dynaxx.integrations.decoder import DENSE, NAME, Decoder, implementation, window_of
from dynaxx.integrations.masks import Run, read_mask
from dynaxx.integrations.request import ARGUMENT, UNKNOWN, RequestTokens, TokenReader
from dynaxx.layout import BlockLayout
from dynaxx.ops import sparse_attention
from dynaxx.policy import LayerPlan, LengthSwitch, ModelFacts, Policy, resolve

# Arguments of attention calls that do not change what is computed, or are handled here.
_HARMLESS = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "is_causal",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "seq_idx",
        "sliding_window",
        "use_cache",
    }
)

logger = logging.getLogger("dynaxx")
Watcher = Callable[[int, BlockLayout], None]


class Handle:
    """A policy at work in a model. Also a context manager that removes it.

    Attributes:
        policy: the policy.
        plans: by layer, what its heads do; layers that are not in it are dense.
    """

    def __init__(self, policy: Policy, plans: dict[int, LayerPlan], owner: Any, layers: dict[int, nn.Module]) -> None:
        self.policy = policy
        self.plans = plans
        self._owner = weakref.ref(owner)  # the registry of layers must not keep a model alive
        self._dense: dict[str, int] = {}
        self._parts: Counter[str] = Counter()
        self._sparse = 0
        self._watchers: list[Watcher] = []
        self._masks = _MaskReader()
        self._layers = weakref.WeakKeyDictionary({m: _Layer(self, index, m) for index, m in layers.items()})
        _LAYERS.update(self._layers)
        self._tokens: TokenReader | None = None

    @property
    def active(self) -> bool:
        """Whether the policy is still applied."""
        return any(m in _LAYERS and implementation(m) == NAME for m in self._layers)

    def remove(self) -> None:
        """Give the model back exactly the attention it had. More calls do nothing."""
        configs = {id(module.config) for module in self._layers}
        for module in self._layers:
            _LAYERS.pop(module, None)
        if self._tokens is not None:
            self._tokens.remove()
        shared = any(id(module.config) in configs for module in _LAYERS)  # two models of one config object
        owner = self._owner()
        if owner is not None and owner.config._attn_implementation == NAME and not shared:
            owner.set_attn_implementation(DENSE)

    def stats(self) -> dict[str, Any]:
        """Count layer calls since `apply` or `reset_stats`.

        Returns:
            "sparse_calls": calls with at least one sparse sequence; "dense_calls": the others, by reason;
            "dense_sequences": sequences that ran dense beside sparse ones of the same call, by reason.
        """
        return {
            "sparse_calls": self._sparse,
            "dense_calls": dict(self._dense),
            "dense_sequences": dict(self._parts),
        }

    def reset_stats(self) -> None:
        """Start counting from zero, and forget which side of the length border the last sequence was on."""
        self._sparse = 0
        self._dense.clear()
        self._parts.clear()
        for layer in self._layers.values():
            layer.switch.reset()

    @contextmanager
    def watch(self, watcher: Watcher) -> Iterator[None]:
        """Call `watcher(layer, layout)` for every layout that runs within the block: to measure density or recall."""
        self._watchers.append(watcher)
        try:
            yield
        finally:
            self._watchers.remove(watcher)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        facts = self.policy.model
        state = "active" if self.active else "removed"
        return f"<dynaxx policy on {facts.model_type}: {len(self.plans)} of {facts.layers} layers sparse, {state}>"


def apply(model: nn.Module, policy: Policy) -> Handle:
    """Run a policy in a transformers model, in place.

    Args:
        model: a decoder of transformers >= 5.16 whose attention is "sdpa", in eval or training mode.
        policy: for a model of this shape; see `load_policy`.

    Returns:
        A handle; `handle.remove()` restores the model exactly. It is a context manager too.

    Raises:
        TypeError: not a policy, or nothing that can be a model.
        ValueError: a policy is applied to the model already.
        PolicyError: the policy was made for another model.
        UnsupportedInputError: a model that cannot be served rightly; with the reasons.
    """
    if not isinstance(policy, Policy):
        raise TypeError(f"`policy` must be a Policy, got {type(policy).__name__}; read a file with load_policy")
    interface, masks = _interfaces()
    found = Decoder.of(model)
    if any(module in _LAYERS for module in found.layers.values()):
        raise ValueError("`model` has a policy already; call remove() on its handle first")
    _check_same_model(policy.model, found.facts)
    plans = resolve(policy)
    reasons = found.refusals(plans)
    if reasons:
        raise UnsupportedInputError(f"{found.facts.model_type} with a policy", {"transformers": reasons})
    _warn_if_measured_elsewhere(policy, model)
    interface.register(NAME, _attention)
    masks.register(NAME, masks()[DENSE])
    handle = Handle(policy, plans, found.owner, found.layers)
    try:
        if any(plan.needs_tokens for plan in plans.values()):
            handle._tokens = TokenReader(found.body)
        found.owner.set_attn_implementation(NAME)
        escaped = [i for i, m in found.layers.items() if implementation(m) != NAME]
        if escaped:
            raise UnsupportedInputError(
                f"{found.facts.model_type} with a policy",
                {"transformers": [f"set_attn_implementation does not reach layers {escaped}: their config is a copy"]},
            )
    except BaseException:
        handle.remove()
        raise
    return handle


def model_facts(model: nn.Module) -> ModelFacts:
    """What a policy for this model has to say about it.

    Raises:
        UnsupportedInputError: no decoder attention of transformers was found in it.
    """
    return Decoder.of(model).facts


def attention_layers(model: nn.Module) -> dict[int, nn.Module]:
    """The decoder's attention modules by layer index. Raises as `model_facts`."""
    return dict(Decoder.of(model).layers)


def full_attention_layers(model: nn.Module) -> list[int]:
    """Layers that see the whole sequence, which a policy can make sparse; not those with a window of their own."""
    return [index for index, module in Decoder.of(model).layers.items() if not window_of(module)]


class _Layer:
    """What one attention module does, and its length switch."""

    __slots__ = ("__weakref__", "dense", "handle", "index", "plan", "switch")

    def __init__(self, handle: Handle, index: int, module: nn.Module) -> None:
        self.handle = handle
        self.index = index
        self.plan = handle.plans.get(index)
        self.switch = LengthSwitch(handle.policy.dense_below, handle.policy.sparse_from)
        self.dense = _dense_attention(module)

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        tokens = kwargs.pop(ARGUMENT, UNKNOWN)
        work = self._work(module, q, k, mask, tokens, kwargs)
        if isinstance(work, str):
            self.handle._dense[work] = self.handle._dense.get(work, 0) + 1
            return self.dense(module, q, k, v, mask, **kwargs)
        self.handle._sparse += 1
        return self._run(q, k, v, mask, kwargs.get("scaling"), tokens, *work), None

    def _work(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        mask: Tensor | None,
        tokens: RequestTokens,
        kwargs: dict[str, Any],
    ) -> str | tuple[list[list[Run]], list[list[bool]]]:
        """Why the whole call is dense; or the runs of each batch entry, and which of them are sparse."""
        if self.plan is None:
            return "no rule"
        seqlen_q, seqlen_k = q.shape[2], k.shape[2]
        if seqlen_q == 1:
            return "decode"
        if seqlen_q < self.plan.block_size[0]:
            return "fewer queries than one block"
        if q.shape[1] != self.plan.q_heads:
            return "heads are sharded"
        if seqlen_k < self.switch.dense_below:
            self.switch.sparse(seqlen_k)
            return "below dense_below"
        reason = _dense_reason(module, q, k, mask, kwargs)
        if reason is not None:
            return reason
        if mask is None:
            stop = min(seqlen_q, seqlen_k)  # a static cache is longer than what is in it
            runs = [[Run(0, seqlen_q, 0, stop, True)]] * q.shape[0]
        else:
            found = self.handle._masks.read(mask, self.index, q.shape[0])
            if found is None:
                return "mask is not causal sequences"
            runs = found
        q_block = self.plan.block_size[0]
        sparse = [
            [run.causal and run.seqlen_q >= q_block and self.switch.sparse(run.seqlen_k) for run in entry]
            for entry in runs
        ]
        if not any(map(any, sparse)):
            return "below dense_below"
        if self.plan.needs_tokens and (missing := tokens.missing(q.shape[0], seqlen_k, runs)):
            return missing
        return runs, sparse

    def _run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scale: float | None,
        tokens: RequestTokens,
        runs: list[list[Run]],
        sparse: list[list[bool]],
    ) -> Tensor:
        """(B, Lq, Hq, D) from q (B, Hq, Lq, D) and k, v (B, Hk, Lk, D), each sequence with its own layout."""
        assert self.plan is not None
        alike = all(entry == runs[0] for entry in runs) and all(entry == sparse[0] for entry in sparse)
        plans = [[self.plan] * len(entry) for entry in runs]
        if self.plan.needs_tokens:
            plans = [
                [
                    tokens.resolve(self.plan, b, run) if is_sparse else self.plan
                    for run, is_sparse in zip(*entry, strict=True)
                ]
                for b, entry in enumerate(zip(runs, sparse, strict=True))
            ]
            alike = alike and all(entry == plans[0] for entry in plans)
        if alike:
            return self._run_entry(q, k, v, mask, scale, runs[0], sparse[0], plans[0])
        at = lambda x, b: x[b : b + 1]
        return torch.cat(
            [
                self._run_entry(at(q, b), at(k, b), at(v, b), None if mask is None else at(mask, b), scale, *entry)
                for b, entry in enumerate(zip(runs, sparse, plans, strict=True))
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
                pieces.append(_dense_piece(*part, None if mask is None else mask[:, :, rows, keys], scale, run))
                self.handle._parts["padding or prefix" if not run.causal else "below dense_below"] += q.shape[0]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def _sparse_piece(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, plan: LayerPlan) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        layout = plan.layout(q, k, scale=scale)
        for watcher in self.handle._watchers:
            watcher(self.index, layout)
        out = sparse_attention(q, k, v, layout, scale=scale)
        assert isinstance(out, Tensor), "without return_lse there is one result"
        return out


def _dense_piece(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, run: Run) -> Tensor:
    """One run of a call, exactly as dense: (B, n, Hq, D)."""
    if run.seqlen_k == 0:
        return q.new_zeros(q.shape[0], run.seqlen_q, q.shape[1], v.shape[-1])
    square = run.causal and run.seqlen_q == run.seqlen_k
    out = nn.functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if square or not run.causal else mask,
        is_causal=square,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2)


def _dense_reason(module: nn.Module, q: Tensor, k: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> str | None:
    """Why a call must go the old way; None if it may be sparse.

    Raises:
        UnsupportedInputError: arguments that the old way would drop without a word.
    """
    if kwargs.get("s_aux") is not None or kwargs.get("sinks") is not None:
        raise UnsupportedInputError(
            "attention with learned sinks", {"transformers": ["`s_aux` has no equal here", "sdpa ignores it"]}
        )
    if kwargs.get("sliding_window"):
        return "layer has its own window"
    if kwargs.get("dropout"):
        return "attention dropout"
    for name, value in kwargs.items():
        if value is not None and value is not False and name not in _HARMLESS and name not in ("scaling", "dropout"):
            return f"argument {name}"
    if k.shape[0] != q.shape[0] or q.shape[1] % k.shape[1]:
        return "q and k of other shapes"
    if mask is None:
        is_causal = kwargs.get("is_causal")
        if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            return "not causal"
        return "more queries than keys" if q.shape[2] > k.shape[2] else None
    if mask.dtype != torch.bool:
        return "mask is not boolean"
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[0] not in (1, q.shape[0]):
        return "mask differs by head"
    if mask.shape[2] != q.shape[2] or mask.shape[3] != k.shape[2]:
        return "mask of other lengths"
    return None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What `AttentionInterface` calls for every layer of every model with a policy."""
    if torch.compiler.is_compiling():
        if torch.compiler.is_dynamo_compiling() and (compiled := _LAYERS.get(module)) is not None:
            dense = compiled.handle._dense
            dense["torch.compile"] = dense.get("torch.compile", 0) + 1
        return _dense_attention(module)(module, query, key, value, attention_mask, **kwargs)
    layer = _LAYERS.get(module)
    if layer is None:  # a copy of a model with a policy, or one that shares its config
        _warn_once(f"{type(module).__name__} asks for dynaxx attention but has no policy: it runs dense")
        kwargs.pop(ARGUMENT, None)
        return _dense_attention(module)(module, query, key, value, attention_mask, **kwargs)
    return layer(module, query, key, value, attention_mask, **kwargs)


_LAYERS: weakref.WeakKeyDictionary[nn.Module, _Layer] = weakref.WeakKeyDictionary()
_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)


class _MaskReader:
    """Reads each mask once per forward pass: the layers of a pass get the same tensor, in ascending order."""

    def __init__(self) -> None:
        self._mask: weakref.ref[Tensor] | None = None
        self._version = self._layer = -1
        self._runs: list[list[Run]] | None = None

    def read(self, mask: Tensor, layer: int, batch: int) -> list[list[Run]] | None:
        version = 0 if mask.is_inference() else mask._version
        known = self._mask is not None and self._mask() is mask and version == self._version and layer > self._layer
        if not known:
            self._runs = read_mask(mask[:, 0])
            if self._runs is not None and len(self._runs) != batch:
                self._runs = self._runs * batch
            self._mask, self._version = weakref.ref(mask), version
        self._layer = layer
        return self._runs


def _dense_attention(module: nn.Module) -> Callable[..., tuple[Tensor, None]]:
    """The dense attention this module's own file would look up."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    registry = getattr(sys.modules.get(type(module).__module__), "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    return registry[DENSE]


def _interfaces() -> tuple[Any, Any]:
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise UnsupportedInputError(
            "a transformers model",
            {"transformers": [f"{error}; install transformers >= 5.16, which has AttentionMaskInterface"]},
        ) from error
    taken = AttentionInterface().get(NAME)
    if taken is not None and taken is not _attention:
        raise UnsupportedInputError(
            "a transformers model", {"transformers": [f"{taken!r} is registered under our name {NAME!r}"]}
        )
    return AttentionInterface, AttentionMaskInterface


def _check_same_model(wanted: ModelFacts, found: ModelFacts) -> None:
    for name in ModelFacts.model_fields:
        if getattr(wanted, name) != getattr(found, name):
            raise PolicyError(
                f"`model.{name}` is {getattr(wanted, name)!r} in the policy and {getattr(found, name)!r} in the model: "
                "the policy was made for another model; tune one for this"
            )


def _warn_if_measured_elsewhere(policy: Policy, model: nn.Module) -> None:
    device = next((parameter.device.type for parameter in model.parameters()), None)
    if policy.measured_on is not None and device not in (None, policy.measured_on.device):
        logger.warning(
            "the policy's dense_below = %d tokens was measured on %s; the model is on %s: measure it again",
            policy.dense_below,
            policy.measured_on.device,
            device,
        )
