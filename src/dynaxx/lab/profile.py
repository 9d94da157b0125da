"""`dynaxx profile`: where a model's time goes at each length, and whether sparse attention is worth it.

Timed through front doors only: hooks on modules for projections and MLP, transformers' attention interface for the
attention core, which is all that sparsity can save.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dynaxx.lab.attention_route import evaluating
from dynaxx.lab.files import explain_full_disk
from dynaxx.lab.machine import Ceilings, Machine, load_average, machine_facts, measure_ceilings, synchronize
from dynaxx.lab.progress import Progress, SilentProgress
from dynaxx.lab.texts import encode

RULE_OF_THUMB = 0.20  # below this share of the time, sparse attention is seldom worth its complexity
ATTENTION_NAME = "dynaxx_profile"  # in transformers' attention interface, while we measure
DENSITIES = (0.5, 0.25, 0.1)  # that savings are estimated for
DECODE_STEPS = 5
BUSY = 0.7  # load from which others disturb a measurement


@dataclass(frozen=True)
class Seconds:
    """The parts of one prefill; they add up to `total`."""

    attention: float  # the core: scores, softmax, values
    projections: float  # the rest of the attention modules: q, k, v, out, rotary embedding, cache
    mlp: float
    rest: float  # embeddings, norms, logits of the last token
    total: float


@dataclass(frozen=True)
class Decode:
    """One token after a prefill of this length."""

    seconds_per_token: float
    attention_share: float
    gbs: float  # weights and keys and values read once, over the time
    of_copy_ceiling: float


@dataclass(frozen=True)
class LengthProfile:
    """Medians at one prompt length, batch 1."""

    seqlen: int
    seconds: Seconds
    repeats: int
    attention_gflops_per_s: float  # useful FLOPs: visible pairs only
    of_gemm_ceiling: float
    linear_gflops_per_s: float  # of projections and MLP, where they are plain linear layers
    decode: Decode

    @property
    def attention_share(self) -> float:
        return self.seconds.attention / self.seconds.total

    @property
    def max_speedup(self) -> float:
        """Of the whole prefill, if attention took no time at all."""
        return self.seconds.total / max(self.seconds.total - self.seconds.attention, 1e-9)


@dataclass(frozen=True)
class Saving:
    """What a density would save at a length, if attention's time is proportional to it."""

    seqlen: int
    density: float
    speedup: float
    seconds_saved: float  # per prompt
    money_saved_per_1000_prompts: float | None  # in the currency of the price per hour


@dataclass(frozen=True)
class ProfileResult:
    """Where the time goes, and what that means."""

    machine: Machine
    model: str
    ceilings: Ceilings
    lengths: tuple[LengthProfile, ...]
    threshold: float
    price_per_hour: float | None
    load: float | None = None  # of the machine before we began

    @property
    def worth_it(self) -> bool:
        return any(length.attention_share >= self.threshold for length in self.lengths)

    @property
    def savings(self) -> tuple[Saving, ...]:
        return tuple(_saving(length, density, self.price_per_hour) for length in self.lengths for density in DENSITIES)

    @property
    def verdict(self) -> str:
        """In one sentence, from the shortest length to the longest."""
        said = []
        for length in self.lengths:
            share = f"{length.attention_share:.0%} at {length.seqlen:,}"
            worth = length.attention_share >= self.threshold
            said.append(f"{share}: " + (f"up to {length.max_speedup:.1f}x" if worth else "not worth it"))
        return f"attention's share of prefill is {'; '.join(said)} (rule of thumb: from {self.threshold:.0%})"

    def to_dict(self) -> dict[str, Any]:
        return {
            "machine": self.machine.to_dict(),
            "load": self.load,
            "model": self.model,
            "ceilings": self.ceilings.to_dict(),
            "lengths": [
                {**asdict(x), "attention_share": x.attention_share, "max_speedup": x.max_speedup} for x in self.lengths
            ],
            "threshold": self.threshold,
            "verdict": self.verdict,
            "worth_it": self.worth_it,
            "price_per_hour": self.price_per_hour,
            "savings": [asdict(saving) for saving in self.savings],
        }

    def summary(self) -> str:
        """What the command prints."""
        c = self.ceilings
        lines = [
            f"{self.model} on {self.machine.cpu}" + "".join(f", {gpu}" for gpu in self.machine.gpus),
            f"ceilings measured on {c.device} in {c.dtype}, {c.threads} threads: "
            f"{c.gemm_gflops:,.0f} GFLOP/s, {c.copy_gbs:.1f} GB/s",
            *([f"the machine was busy (load {self.load}): times are too long"] if (self.load or 0) > BUSY else []),
            "",
            "  prompt   prefill  attention  projections     mlp    rest  attention GFLOP/s    decode/token",
        ]
        for x in self.lengths:
            s = x.seconds
            lines.append(
                f"{x.seqlen:8,} {s.total:8.2f}s {s.attention / s.total:9.0%} {s.projections / s.total:12.0%} "
                f"{s.mlp / s.total:7.0%} {s.rest / s.total:7.0%} {x.attention_gflops_per_s:8,.0f} "
                f"({x.of_gemm_ceiling:4.0%} of gemm) {x.decode.seconds_per_token * 1e3:7.1f} ms, "
                f"attention {x.decode.attention_share:.0%}"
            )
        lines += ["", self.verdict, "", "if attention's time is proportional to its density:"]
        for saving in self.savings[-len(DENSITIES) :]:
            money = saving.money_saved_per_1000_prompts
            lines.append(
                f"  {saving.seqlen:,} tokens at {saving.density:.0%}: {saving.speedup:.2f}x, saves "
                f"{saving.seconds_saved:.2f} s a prompt" + ("" if money is None else f", {money:.2f} per 1,000 prompts")
            )
        return "\n".join(lines)


def profile(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    lengths: Sequence[int],
    name: str = "model",
    threshold: float = RULE_OF_THUMB,
    price_per_hour: float | None = None,
    trace: Path | None = None,
    progress: Progress | None = None,
) -> ProfileResult:
    """Measure prefill and decode at each length, batch 1.

    Args:
        model: a transformers causal language model. It is left as it was.
        text: what the prompts are made of; repeated if it is shorter than the longest length.
        lengths: prompt lengths in tokens.
        threshold: the share of the time from which attention counts as worth making sparse.
        price_per_hour: of the machine, to put savings into money.
        trace: where to write a Chrome trace of one prefill at the longest length, from PyTorch's profiler.

    Raises:
        ValueError: no lengths, or one below 2 or beyond the model's positions.
    """
    limit = _longest_prompt(model)
    lengths = tuple(sorted(set(lengths)))
    if not lengths or lengths[0] < 2 or lengths[-1] > limit:
        raise ValueError(f"`lengths` must be from 2 to the model's {limit:,} tokens, got {list(lengths)}")
    progress, device, load = progress or SilentProgress(), model.device, load_average()
    ids = _prompt(tokenizer, text, lengths[-1]).to(device)
    with progress.task("Profiling", total=1 + sum(lengths)) as task, torch.inference_mode(), evaluating(model):
        ceilings = measure_ceilings(device, model.dtype)
        task.advance(1, f"machine reaches {ceilings.gemm_gflops:,.0f} GFLOP/s")
        measured = []
        with _instrumented(model) as clock:
            _prefill(model, ids[:, : lengths[0]])  # first calls allocate
            clock.collect()
            for length in lengths:
                measured.append(_measure(model, ids[:, :length], clock))
                seconds = measured[-1].seconds
                task.advance(length, f"{length:,} tokens: attention {seconds.attention / seconds.total:.0%}")
            if trace is not None:
                _write_trace(trace, partial(_prefill, model, ids))
        ceilings = ceilings.best_of(measure_ceilings(device, model.dtype))
    found = tuple(run.against(ceilings) for run in measured)
    return ProfileResult(machine_facts(), name, ceilings, found, threshold, price_per_hour, load)


def default_lengths(model: Any, longest: int = 8192) -> tuple[int, ...]:
    """512, 2,048, and `longest` or the model's own limit."""
    top = min(longest, _longest_prompt(model))
    return tuple(sorted({length for length in (512, 2048) if length < top} | {top}))


def _longest_prompt(model: Any) -> int:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31


class _Clock:
    """Adds up time by part. On a GPU it records events and waits once, at the end of a run."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._spans: list[tuple[str, Any, Any]] = []
        self.attention_flops = 0
        self.attention_calls = 0

    @contextmanager
    def span(self, part: str, label: str) -> Iterator[None]:
        started = self.enter(label)
        yield
        self.leave(part, started)

    def enter(self, label: str) -> tuple[Any, Any]:
        """Start a span, named for PyTorch's profiler and, on a GPU, for Nsight."""
        record = torch.profiler.record_function(f"dynaxx.{label}")
        record.__enter__()
        if self._gpu:
            torch.cuda.nvtx.range_push(f"dynaxx.{label}")
        return self._now(), record

    def leave(self, part: str, started: tuple[Any, Any]) -> None:
        self._spans.append((part, started[0], self._now()))
        if self._gpu:
            torch.cuda.nvtx.range_pop()
        started[1].__exit__(None, None, None)

    def collect(self) -> dict[str, float]:
        """Seconds by part since the last call; forgets them."""
        if self._gpu:
            torch.cuda.synchronize()
        seconds = dict.fromkeys(("attention", "module", "mlp"), 0.0)
        for part, start, end in self._spans:
            seconds[part] += start.elapsed_time(end) / 1e3 if self._gpu else end - start
        self._spans.clear()
        return seconds

    def _now(self) -> Any:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@contextmanager
def _instrumented(model: Any) -> Iterator[_Clock]:
    """Time a model's attention core, attention modules and MLPs; afterwards it is as before."""
    clock = _Clock(model.device)
    attention, mlps = _find_parts(model)
    with ExitStack() as stack:
        for index, module in enumerate(attention):
            _hook(stack, clock, module, "module", f"attention_module.{getattr(module, 'layer_idx', index)}")
        for index, module in enumerate(mlps):
            _hook(stack, clock, module, "mlp", f"mlp.{index}")
        stack.enter_context(_timed_core(model, clock))
        yield clock


def _find_parts(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Outermost attention modules and MLPs (or mixtures of experts), by what transformers calls them."""

    def outermost(words: tuple[str, ...], module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            kind = type(child).__name__.lower()
            if not isinstance(child, nn.ModuleList) and any(word in kind for word in words):
                yield child
            else:
                yield from outermost(words, child)

    attention = list(outermost(("attention",), model))
    mlps = list(outermost(("mlp", "feedforward", "ffn", "moe", "experts"), model))
    if not attention:
        raise ValueError(f"no attention module found in {type(model).__name__}")
    return attention, mlps


def _hook(stack: ExitStack, clock: _Clock, module: nn.Module, part: str, label: str) -> None:
    started: list[tuple[Any, Any]] = []
    before = module.register_forward_pre_hook(lambda *_: started.append(clock.enter(label)))
    after = module.register_forward_hook(lambda *_: clock.leave(part, started.pop()))
    stack.callback(before.remove)
    stack.callback(after.remove)


@contextmanager
def _timed_core(model: Any, clock: _Clock) -> Iterator[None]:
    """Route attention through a wrapper that times the model's own implementation.

    Raises:
        ValueError: the model does not call transformers' attention interface, so its core cannot be told apart.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    used = model.config._attn_implementation
    if used not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        raise ValueError(
            f"attention implementation must be one of transformers' interface, such as 'sdpa', got {used!r}"
        )
    attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[used]

    def timed(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        pairs = _visible_pairs(query.shape[2], key.shape[2], kwargs.get("sliding_window"))
        clock.attention_flops += 2 * pairs * query.shape[0] * query.shape[1] * (query.shape[3] + value.shape[3])
        clock.attention_calls += 1
        with clock.span("attention", f"attention.{getattr(module, 'layer_idx', '')}"):
            return attend(module, query, key, value, *args, **kwargs)

    AttentionInterface.register(ATTENTION_NAME, timed)
    AttentionMaskInterface.register(ATTENTION_NAME, ALL_MASK_ATTENTION_FUNCTIONS[used])
    model.set_attn_implementation(ATTENTION_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(used)


def _visible_pairs(seqlen_q: int, seqlen_k: int, window: int | None) -> int:
    """(query, key) pairs that a causal layer shows, with queries at the end of the keys."""
    sees = min(window or seqlen_k, seqlen_k)
    first = seqlen_k - seqlen_q + 1  # keys that the first query sees
    growing = max(0, min(sees, seqlen_k) - first)  # queries that see fewer than `sees`
    return growing * first + growing * (growing - 1) // 2 + (seqlen_q - growing) * sees


class _Measured(NamedTuple):
    """One length, before it is held against the ceilings."""

    seqlen: int
    seconds: Seconds
    repeats: int
    attention_flops: int
    linear_flops: int
    decode_seconds: float
    decode_attention_share: float
    decode_bytes: int  # weights, keys and values, read once per token

    def against(self, ceilings: Ceilings) -> LengthProfile:
        attention = self.attention_flops / max(self.seconds.attention, 1e-9) / 1e9
        gbs = self.decode_bytes / self.decode_seconds / 1e9
        return LengthProfile(
            seqlen=self.seqlen,
            seconds=self.seconds,
            repeats=self.repeats,
            attention_gflops_per_s=attention,
            of_gemm_ceiling=attention / ceilings.gemm_gflops,
            linear_gflops_per_s=self.linear_flops / max(self.seconds.projections + self.seconds.mlp, 1e-9) / 1e9,
            decode=Decode(self.decode_seconds, self.decode_attention_share, gbs, gbs / ceilings.copy_gbs),
        )


def _measure(model: Any, ids: Tensor, clock: _Clock) -> _Measured:
    """Up to three prefills in about six seconds, at least one, and take the middle one; then some decode steps."""
    runs: list[Seconds] = []
    started, cache = time.perf_counter(), None
    while not runs or (len(runs) < 3 and time.perf_counter() - started + runs[-1].total < 6):
        clock.attention_flops = clock.attention_calls = 0
        seconds, cache, parts = _timed(model, clock, partial(_prefill, model, ids))
        if not clock.attention_calls:
            name = type(model).__name__
            raise ValueError(f"{name} does not use transformers' attention interface; it cannot be profiled")
        rest = seconds - parts["module"] - parts["mlp"]
        runs.append(Seconds(parts["attention"], parts["module"] - parts["attention"], parts["mlp"], rest, seconds))
    flops = clock.attention_flops
    decode_seconds, share, read = _measure_decode(model, ids, cache, clock)
    middle = sorted(runs, key=lambda run: run.total)[len(runs) // 2]
    linear = 2 * _linear_weights(model) * ids.shape[1]
    return _Measured(ids.shape[1], middle, len(runs), flops, linear, decode_seconds, share, read)


def _measure_decode(model: Any, ids: Tensor, cache: Any, clock: _Clock) -> tuple[float, float, int]:
    """Median seconds of a token on top of the prefill's cache, attention's share of it, and bytes it must read.

    The position stays within the prompt, so that a model with learned positions can be profiled at its full length.
    """
    totals, shares = [], []
    position = torch.tensor([[ids.shape[1] - 1]], device=ids.device)
    for _ in range(DECODE_STEPS):
        step = partial(model, ids[:, -1:], past_key_values=cache, position_ids=position, use_cache=True)
        seconds, _, parts = _timed(model, clock, step)
        totals.append(seconds)
        shares.append(parts["attention"] / seconds)
    weights = {tensor.data_ptr(): tensor.nbytes for tensor in model.parameters()}
    cached = sum(x.nbytes for layer in getattr(cache, "layers", ()) for x in (layer.keys, layer.values))
    return statistics.median(totals[1:]), statistics.median(shares[1:]), sum(weights.values()) + cached


def _timed(model: Any, clock: _Clock, run: Callable[[], Any]) -> tuple[float, Any, dict[str, float]]:
    """Seconds, the new cache, and seconds by part."""
    synchronize(model.device)
    started = time.perf_counter()
    output = run()
    synchronize(model.device)
    return time.perf_counter() - started, output.past_key_values, clock.collect()


def _prefill(model: Any, ids: Tensor) -> Any:
    """As `generate` does it: with a cache, and logits of the last token only."""
    return model(ids, use_cache=True, logits_to_keep=1)


def _linear_weights(model: nn.Module) -> int:
    """Weights that every token is multiplied with in attention modules and MLPs."""
    parts = [module for found in _find_parts(model) for module in found]
    return sum(x.weight.numel() for part in parts for x in part.modules() if isinstance(x, nn.Linear))


def _saving(length: LengthProfile, density: float, price_per_hour: float | None) -> Saving:
    saved = length.seconds.attention * (1 - density)
    money = None if price_per_hour is None else saved * 1000 * price_per_hour / 3600
    return Saving(length.seqlen, density, length.seconds.total / (length.seconds.total - saved), saved, money)


def _prompt(tokenizer: Any, text: str, tokens: int) -> Tensor:
    """A prompt of this many tokens; a short text is repeated, which changes no timing."""
    have = len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return encode(tokenizer, text * (2 * tokens // max(1, have) + 1), tokens)


def _write_trace(path: Path, run: Callable[[], Any]) -> None:
    """A Chrome trace (for Perfetto or chrome://tracing) of one run, whole or not at all."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler: AbstractContextManager[Any] = torch.profiler.profile(activities=activities)
    with profiler as recorded:
        run()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with explain_full_disk(path):
            recorded.export_chrome_trace(str(temporary))
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
