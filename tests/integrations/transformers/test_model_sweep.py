# SPDX-License-Identifier: Apache-2.0
"""Random small models, changes, inputs and ways to run them, compared with transformers' own attention.

`DYNAXX_SWEEP_SECONDS=1800 pytest tests/integrations/transformers/test_model_sweep.py` sweeps for half an hour,
`DYNAXX_SWEEP_SEED=123 DYNAXX_SWEEP_SECONDS=0` runs the case of one seed.
"""

from __future__ import annotations

import copy
import os
import pickle
import random
import threading
import time
import warnings
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import nn

import dynaxx as dx
from dynaxx.integrations.transformers import attention_layers, model_facts
from dynaxx.integrations.transformers.calls import own_planning
from dynaxx.integrations.transformers.calls.dense_fallback import attention_of
from dynaxx.integrations.transformers.decoder import window_of, with_cache
from families import family_named

transformers = pytest.importorskip("transformers")

SECONDS = float(os.environ.get("DYNAXX_SWEEP_SECONDS", "6"))
SEED = os.environ.get("DYNAXX_SWEEP_SEED")
DECODERS = (
    "Llama", "Mistral", "Qwen 2", "Qwen 3", "Phi-3", "Gemma", "Gemma 2", "Gemma 3", "OLMo 2", "OLMo 3", "Cohere 2",
    "SmolLM 3", "GLM 4", "Granite", "Phi", "StarCoder 2", "Exaone 4", "GPT-2", "GPT-NeoX", "OPT",
)  # fmt: skip
NARROW, WIDE = 24, 4096  # tokens of the windows of rules


@dataclass
class Case:
    """A model, what happens to it, and how it runs."""

    seed: int
    encoder: bool
    family: str
    implementation: str
    window: int | None  # of the rule, or of the encoder; None without one
    inputs: str
    change: str
    action: str
    dtype: torch.dtype  # the default while it runs
    flipped: tuple[int, ...]  # layers that are not causal, or are, against their class

    @classmethod
    def of(cls, seed: int) -> Case:
        draw = random.Random(seed)
        encoder = draw.random() < 0.2
        family = draw.choice(("bert", "modernbert", "distilbert")) if encoder else draw.choice(DECODERS)
        actions = ["logits", "train", "checkpoint", "weights", "trace", "export", "threads", "dropout"]
        actions += [] if encoder else ["generate", "chunks"]
        inputs = ["whole", "left", "right", "pairs", "added", "holes"] + ["packed"] * (not encoder)
        flips = draw.random() < 0.3
        case = cls(
            seed, encoder, family, draw.choice(("sdpa", "eager")), draw.choice((None, NARROW, WIDE)),
            draw.choice(inputs), draw.choice(("none", "none", "copy", "pickle", "worker", "twin", "drop", "wrap")),
            draw.choice(actions), draw.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16)),
            tuple(i for i in range(2) if flips and not encoder and draw.random() < 0.5),
        )  # fmt: skip
        if family == "Gemma 2" or case.action == "weights":
            case.implementation = "eager"  # SDPA caps no scores and returns no weights
        if case.change in ("twin", "drop", "wrap") and case.action not in ("logits", "train", "dropout"):
            case.action = "logits"
        if case.implementation == "eager" and case.window is not None:
            case.flipped = ()  # eager attention is causal by its masks alone, `in_band` is not
        if case.action in ("generate", "chunks", "trace", "export"):
            case.inputs, case.flipped = "whole", ()
        return case

    @property
    def hides(self) -> bool:
        """Return whether the window must show in the result: not where a rule leaves calls to the original."""
        if self.window is None or self.change == "pickle":
            return False
        if self.encoder:
            return True
        left = self.change == "copy" or self.inputs in ("pairs", "added", "holes")
        left |= self.family == "GPT-2" and self.action in ("train", "checkpoint")  # its configuration has dropout
        return not left and self.action not in ("trace", "export", "weights", "dropout")

    def build(self) -> Any:
        torch.manual_seed(self.seed)
        model = _encoder(self.family) if self.encoder else family_named(self.family).build()
        model.set_attn_implementation(self.implementation)
        for index, module in attention_layers(model).items():
            if index in self.flipped:
                module.is_causal = not module.is_causal
        if self.window and not self.encoder and not rule_layers(model):
            self.window = None
        if self.action == "dropout":
            for module in model.modules():
                for name in ("attention_dropout", "dropout", "attn_dropout", "dropout_prob"):
                    if isinstance(getattr(module, name, None), float):
                        setattr(module, name, 0.2)
        return model

    def arguments(self) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(3, 64, (1 if self.inputs == "packed" else 2, 90), generator=draw)
        found: dict[str, Any] = {"input_ids": ids}
        if not self.encoder:
            found["use_cache"] = False
        mask = torch.ones_like(ids)
        if self.inputs == "left":
            mask[0, :31] = 0
        elif self.inputs == "right":
            mask[1, 60:] = 0
        elif self.inputs == "holes":
            mask[0, 10:40] = 0
        elif self.inputs == "packed":
            found["position_ids"] = torch.cat([torch.arange(n) for n in (50, 1, 39)])[None]
        elif self.inputs in ("pairs", "added"):
            shown = torch.ones(90, 90, dtype=torch.bool)
            shown = (shown if self.encoder else shown.tril())[None, None].expand(2, 1, -1, -1).clone()
            shown[:, :, 20:, 5:9] = False
            added = torch.zeros(shown.shape).masked_fill(~shown, torch.finfo(torch.float32).min)
            found["attention_mask"] = shown if self.inputs == "pairs" and self.implementation == "sdpa" else added
        if self.inputs in ("left", "right", "holes"):
            found["attention_mask"] = mask
        if not self.encoder and self.seed % 3 == 0:
            found |= {"of_the_caller": "anything", "num_items_in_batch": 7}
        return found


def _encoder(family: str) -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    if family == "modernbert":
        config = transformers.ModernBertConfig(
            **sizes, **ids, num_hidden_layers=2, local_attention=32, global_attn_every_n_layers=2, initializer_range=0.2
        )
        return transformers.ModernBertModel(config).eval()
    if family == "distilbert":
        config = transformers.DistilBertConfig(vocab_size=64, dim=32, hidden_dim=32, n_layers=2, n_heads=4, dropout=0.0,
                                               attention_dropout=0.0, initializer_range=0.2)  # fmt: skip
        return transformers.DistilBertModel(config).eval()
    config = transformers.BertConfig(**sizes, num_hidden_layers=2, initializer_range=0.2, hidden_dropout_prob=0.0,
                                     attention_probs_dropout_prob=0.0)  # fmt: skip
    return transformers.BertModel(config).eval()


def rule_layers(model: Any) -> list[int]:
    """Return the layers that a rule concerns: causal ones, without a window of their own."""
    local = getattr(model.config, "sliding_window", None) and not getattr(model.config, "layer_types", None)
    layers = () if local else attention_layers(model).items()
    return [i for i, module in layers if not window_of(module) and getattr(module, "is_causal", True)]


def in_band(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
) -> Any:
    """Attend by transformers' own functions, in the window that the module has as `band`."""
    band, eager = getattr(module, "band", None), module.band_implementation == "eager" or kwargs.get("softcap")
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    apart = torch.arange(seqlen_k - seqlen_q, seqlen_k)[:, None] - torch.arange(seqlen_k)
    causal = getattr(module, "is_causal", True) if kwargs.get("is_causal") is None else kwargs["is_causal"]
    if mask is None and (band is not None or eager) and causal:
        mask = (apart >= 0)[None, None]
    if band is not None and seqlen_q > 1:
        near = (apart < band) & (apart > -band)
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.masked_fill(~near, torch.finfo(mask.dtype).min)
        else:
            mask = near[None, None] if mask is None else mask & near
    if eager and mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
    return attention_of(module, "eager" if eager else "sdpa")(module, q, k, v, mask, **kwargs)


def banded(model: Any, case: Case) -> Any:
    """Let a model attend in the window of the case by transformers' own code."""
    transformers.AttentionInterface.register("in_band", in_band)
    transformers.AttentionMaskInterface.register("in_band", transformers.masking_utils.sdpa_mask)
    layers = attention_layers(model)
    for index, module in layers.items():
        module.band_implementation = case.implementation
        if index in (rule_layers(model) if not case.encoder else [i for i, m in layers.items() if not window_of(m)]):
            module.band = case.window
    model.set_attn_implementation("in_band")
    return model


def applied(model: Any, case: Case) -> Any:
    if case.window is None:
        return dx.apply(model)
    if case.encoder:
        return dx.apply(model, window=case.window)
    rule = dx.Rule.of(dx.SlidingWindow(case.window), layers=rule_layers(model))
    return dx.apply(model, dx.Policy(model=model_facts(model), block_size=16, rules=(rule,)))


class Wrapped(nn.Module):
    """A linear module in an adapter that adds nothing, as peft makes it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.delta = base, nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.delta.to(x.dtype)


def changed(model: Any, case: Case) -> Any:
    """Return the model after its change."""
    blocks = next((each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == 2), None)
    if case.change == "copy":
        return copy.deepcopy(model)
    if case.change in ("pickle", "worker"):
        return pickle.loads(bytes((pickle if case.change == "pickle" else ForkingPickler).dumps(model)))
    if case.change == "twin" and blocks is not None:
        blocks.append(copy.deepcopy(blocks[-1]))
        for module in blocks[-1].modules():
            if not case.encoder:
                vars(module).pop("band", None)  # a copied layer runs without its rule
    elif case.change == "drop" and blocks is not None:
        del blocks[-1]
    elif case.change == "wrap":
        module = next(iter(attention_layers(model).values()))
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Wrapped(child))
    return model


def outcome(model: Any, case: Case) -> list[torch.Tensor]:
    """Return what the action of a case gives."""
    arguments, shown = case.arguments(), None
    mask = arguments.get("attention_mask")
    shown = mask.bool() if mask is not None and mask.ndim == 2 else torch.ones(arguments["input_ids"].shape).bool()
    first = lambda out: out["logits"] if "logits" in out else out["last_hidden_state"]
    torch.manual_seed(5)
    if case.action in ("train", "checkpoint"):
        model.train()
        if case.action == "checkpoint" and model.supports_gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": bool(case.seed % 2)})
            model.enable_input_require_grads()
        out = first(model(**arguments))[shown]
        (out * torch.linspace(-1, 1, out.shape[-1])).sum().backward()
        return [out.detach(), *(p.grad for _, p in sorted(model.named_parameters()) if p.grad is not None)]
    with torch.no_grad():
        if case.action == "dropout":
            return [first(model.train()(**arguments))[shown]]
        if case.action == "weights":
            out = model(**arguments, output_attentions=True)
            return [first(out)[shown], *(out.attentions or ())]
        if case.action == "generate":
            return [model.generate(arguments["input_ids"], max_new_tokens=4, do_sample=False).double()]
        if case.action == "chunks":
            cache, found = transformers.DynamicCache(config=model.config), []
            for part in arguments["input_ids"].split([40, 7, 30, 13], dim=1):
                found.append(first(model(part, use_cache=True, **with_cache(model, cache))))
            return [torch.cat(found, 1)]
        if case.action == "trace":
            model.config.use_cache = False
            traced = torch.jit.trace(model, (arguments["input_ids"],), strict=False, check_trace=False)
            return [first(traced(arguments["input_ids"]))]
        if case.action == "export":
            given = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor | bool)}
            return [first(torch.export.export(model, (), given).module()(**given))]
        return [first(model(**arguments))[shown]]


def in_threads(model: Any, handle: Any, case: Case, want: list[torch.Tensor], dense: list[torch.Tensor]) -> None:
    """Run passes in threads while the handle is removed: each is a whole pass with it, or without."""
    found: list[torch.Tensor] = []
    run = lambda: found.extend([*outcome(model, case), *outcome(model, case)])
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    handle.remove()
    for thread in threads:
        thread.join()
    assert len(found) == 4, case
    assert all(min(apart([x], want), apart([x], dense)) < 1e-3 for x in found), case


def apart(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """Return the largest difference, as a share of the largest value of the result and of all gradients."""
    if len(got) != len(want) or any(a.shape != b.shape for a, b in zip(got, want, strict=True)):
        return float("inf")
    scale = max((float(x.abs().max()) for x in want[1:]), default=0.0)
    sizes = [float(want[0].abs().max()), *[scale] * (len(want) - 1)]
    apart = [float((a - b).abs().max()) / (size + 1e-9) for a, b, size in zip(got, want, sizes, strict=True)]
    return max(each if each == each else float("inf") for each in apart)


def check(case: Case) -> bool:
    """Compare a case with transformers' own attention, under dynaxx and after its removal. False: it has no result."""
    own, reference, model = case.build(), case.build(), case.build()
    before = {id(m.config): m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}
    torch.set_default_dtype(case.dtype)
    try:
        try:
            wanted = outcome(changed(own, case), case)
            want = outcome(changed(banded(reference, case) if case.hides else reference, case), case)
        except Exception:
            return False  # transformers does not serve it
        handle = applied(model, case)
        run = changed(model, case)
        if case.action == "threads":
            in_threads(run, handle, case, want, wanted)
        else:
            got = outcome(run, case)
            assert apart(got, want) < 1e-3, (case, apart(got, want), handle.stats())
        handle.remove()
        for module in model.modules():
            if hasattr(module, "config") and id(module.config) in before:
                assert module.config._attn_implementation == before[id(module.config)], case
        model.zero_grad()
        if run is model:
            assert apart(outcome(model, case), wanted) < 1e-5, case
        return True
    finally:
        torch.set_default_dtype(torch.float32)


def test_random_models(monkeypatch, caplog):
    monkeypatch.setitem(own_planning.BORDERS, "cpu", dict.fromkeys(("causal", "masked", "eager"), 32))
    until, seed, checked = time.monotonic() + SECONDS, int(SEED or 0), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while True:
            case = Case.of(seed)
            try:
                checked += check(case)
            except dx.UnsupportedInputError:
                pass
            except Exception as error:
                raise AssertionError(f"{case} failed") from error
            seed += 1
            if time.monotonic() >= until:
                break
    assert checked or SEED
