# SPDX-License-Identifier: Apache-2.0
"""`dynaxx profile`: show where a model spends its time at each length, and whether sparse attention is worth it.

Hooks on modules time projections and MLP. A wrapper in transformers' attention interface times the attention function,
which is the only part that sparse attention can save.
"""

from __future__ import annotations

import errno
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from dynaxx.integrations.transformers.apply_policy import refusals
from dynaxx.integrations.transformers.decoder import cache_of, with_cache
from dynaxx.lab.files import explain_full_disk
from dynaxx.lab.machine import Ceilings, load_average, machine_facts, measure_ceilings, synchronize
from dynaxx.lab.models import longest_prompt
from dynaxx.lab.perplexity import evaluating
from dynaxx.lab.profile.clock import PartClock, find_parts, instrumented
from dynaxx.lab.profile.result import Decode, LengthProfile, ProfileResult, Seconds
from dynaxx.lab.progress import Progress, SilentProgress
from dynaxx.lab.resume import Steps, fingerprint
from dynaxx.lab.texts import encode, ids_of
from dynaxx.lab.time_budget import PASS, TimeBudget
from dynaxx.lab.tune.decode_speed import NO_PLANS
from dynaxx.storage import temporary_folder

RULE_OF_THUMB = 0.20  # below this share of the time, sparse attention is seldom worth its complexity
DECODE_STEPS = 5
BRIEF = 0.3  # seconds per ceiling of the machine under a time budget
WARM_UP = 64  # tokens of the first prompt under a time budget
SHARE_OF_TIME = 0.05  # largest share of the time left for one prefill of a longer prompt


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
    time: TimeBudget | None = None,
    state: Path | None = None,
) -> ProfileResult:
    """Measure prefill and decode at each length, batch 1.

    Args:
        model: a causal language model of transformers; it is not changed.
        tokenizer: the tokenizer of the model.
        text: text of the prompts; repeated if it is shorter than the longest length.
        lengths: prompt lengths in tokens.
        name: name of the model in the result.
        threshold: share of the time from which attention is worth making sparse.
        price_per_hour: price of the machine, to express savings in money.
        trace: file for a profiler trace at the longest length, see `write_trace`.
        progress: reports each length.
        time: the time budget. The shortest length is always measured, and each longer one if it takes little of the
            time that is left.
        state: file that keeps each finished length, from which a stopped run continues; also times of a busy machine.

    Raises:
        ValueError: there are no lengths, or one is below 2 or beyond the model's positions.
        OSError: the trace cannot be written.
    """
    limit = longest_prompt(model)
    lengths = tuple(sorted(set(lengths)))
    if not lengths or lengths[0] < 2 or lengths[-1] > limit:
        raise ValueError(f"`lengths` must be from 2 to the model's {limit:,} tokens, got {list(lengths)}")
    progress, device, load = progress or SilentProgress(), model.device, load_average()
    time = time or TimeBudget()
    slowed, brief = time.clock.watch(), BRIEF if time.seconds is not None else 1.0
    refused = refusals(model)
    ids = _prompt(tokenizer, text, lengths[-1]).to(device)
    steps = Steps(state, "" if state is None else fingerprint(model, ids, machine=machine_facts(), device=device))
    with progress.task("Profiling", total=1 + sum(lengths)) as task, torch.inference_mode(), evaluating(model):
        ceilings = measure_ceilings(device, model.dtype, seconds=brief)
        task.advance(1, f"machine reaches {ceilings.gemm_gflops:,.0f} GFLOP/s")
        measured: list[_Measured] = []
        with instrumented(model) as clock:
            _prefill(model, ids[:, : lengths[0] if time.seconds is None else WARM_UP])  # first calls allocate
            clock.collect()
            for length in lengths:
                if measured and time.expects(PASS, length) > SHARE_OF_TIME * time.left:
                    break
                run = partial(_measure, model, ids[:, :length], clock, time.clock.watch())
                measured.append(steps.remember_as(_Measured, f"{length}", run))
                seconds = measured[-1].seconds
                time.learn(PASS, length, seconds.total)
                task.advance(length, f"{length:,} tokens: attention {seconds.attention / seconds.total:.0%}")
        if time.seconds is None:
            ceilings = ceilings.best_of(measure_ceilings(device, model.dtype))
    if trace is not None:
        write_trace(model, tokenizer, text, lengths[-1], trace)
    found = tuple(run.against(ceilings) for run in measured)
    said, busy = "; ".join(refused), slowed() or any(run.busy for run in measured)
    left_out = tuple(lengths[len(found) :])
    return ProfileResult(machine_facts(), name, ceilings, found, threshold, price_per_hour, load, said, busy, left_out)


def write_trace(model: Any, tokenizer: Any, text: str, seqlen: int, path: Path) -> Path:
    """Write a Chrome trace of one prefill of `seqlen` tokens, from PyTorch's profiler; return its path.

    Raises:
        OSError: it cannot be written.
    """
    ids = _prompt(tokenizer, text, seqlen).to(model.device)
    with torch.inference_mode(), evaluating(model), instrumented(model):
        _prefill(model, ids)  # first calls allocate
        _write_trace(path, partial(_prefill, model, ids))
    return path


def default_lengths(model: Any) -> tuple[int, ...]:
    """Return 512, 2,048, and 8,192 or the model's limit."""
    top = min(8192, longest_prompt(model))
    return tuple(sorted({length for length in (512, 2048) if length < top} | {top}))


class _Measured(NamedTuple):
    """The measurements of one length, before they are compared with the ceilings."""

    seqlen: int
    seconds: Seconds
    repeats: int
    attention_flops: int
    linear_flops: int
    decode_seconds: float
    decode_attention_share: float
    decode_bytes: int  # weights, keys and values, read once per token
    busy: bool  # whether other processes slowed the machine meanwhile

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


def _measure(model: Any, ids: Tensor, clock: PartClock, slowed: Callable[[], bool]) -> _Measured:
    """Run one to three prefills in about six seconds, take the median, then run some decode steps."""
    runs: list[Seconds] = []
    started, cache = perf_counter(), None
    while not runs or (len(runs) < 3 and perf_counter() - started + runs[-1].total < 6):
        clock.attention_flops = clock.attention_calls = 0
        seconds, cache, parts = _timed(model, clock, partial(_prefill, model, ids))
        if not clock.attention_calls:
            name = type(model).__name__
            raise ValueError(f"{name} does not use transformers' attention interface; it cannot be profiled")
        rest = seconds - parts["module"] - parts["mlp"]
        attention, windowed = parts["attention"], parts["windowed"]
        projections = parts["module"] - attention - windowed
        runs.append(Seconds(attention, projections, parts["mlp"], rest, seconds, windowed))
    flops = clock.attention_flops
    decode_seconds, share, read = _measure_decode(model, ids, cache, clock)
    middle = sorted(runs, key=lambda run: run.total)[len(runs) // 2]
    linear = 2 * _linear_weights(model) * ids.shape[1]
    return _Measured(ids.shape[1], middle, len(runs), flops, linear, decode_seconds, share, read, slowed())


def _measure_decode(model: Any, ids: Tensor, cache: Any, clock: PartClock) -> tuple[float, float, int]:
    """Return the median seconds per token on the prefill's cache, the share of attention, and the bytes to read.

    Positions stay within the prompt, so that a model with learned positions can be profiled at its full length.
    """
    totals, shares = [], []
    position = torch.tensor([[ids.shape[1] - 1]], device=ids.device, dtype=torch.int64)
    for _ in range(DECODE_STEPS):
        step = partial(model, ids[:, -1:], position_ids=position, use_cache=True, **with_cache(model, cache))
        with sdpa_kernel(NO_PLANS):  # each step has a new length, as in `generate`
            seconds, _, parts = _timed(model, clock, step)
        totals.append(seconds)
        shares.append(parts["attention"] / seconds)
    weights = {tensor.data_ptr(): tensor.nbytes for tensor in model.parameters()}
    cached = sum(x.nbytes for layer in getattr(cache, "layers", ()) for x in (layer.keys, layer.values))
    return statistics.median(totals[1:]), statistics.median(shares[1:]), sum(weights.values()) + cached


def _timed(model: Any, clock: PartClock, run: Callable[[], Any]) -> tuple[float, Any, dict[str, float]]:
    """Return the seconds, the new cache, and seconds by part."""
    synchronize(model.device)
    started = perf_counter()
    output = run()
    synchronize(model.device)
    return perf_counter() - started, cache_of(output), clock.collect()


def _prefill(model: Any, ids: Tensor) -> Any:
    """Run a prefill as `generate` does: with a cache, and logits of the last token only."""
    return model(ids, use_cache=True, logits_to_keep=1)


def _linear_weights(model: nn.Module) -> int:
    """Return the number of weights in attention modules and MLPs that multiply every token."""
    parts = [module for found in find_parts(model) for module in found]
    return sum(x.weight.numel() for part in parts for x in part.modules() if isinstance(x, nn.Linear))


def _prompt(tokenizer: Any, text: str, tokens: int) -> Tensor:
    """Return a prompt of this many tokens. A short text is repeated, which does not change the times."""
    have = len(ids_of(tokenizer, text))
    return encode(tokenizer, text * (2 * tokens // max(1, have) + 1), tokens)


def _write_trace(path: Path, run: Callable[[], Any]) -> None:
    """Write a Chrome trace (for Perfetto or chrome://tracing) of one run, whole or not at all."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler: AbstractContextManager[Any] = torch.profiler.profile(activities=activities, acc_events=True)
    with profiler as recorded:
        run()
    path.parent.mkdir(parents=True, exist_ok=True)
    with explain_full_disk(path), temporary_folder(path) as folder:
        trace = folder / "trace.json"
        recorded.export_chrome_trace(str(trace))
        if not trace.exists():  # the profiler only logs its errors
            raise OSError(errno.EIO, "the profiler could not write its trace; is the disk full?", str(path))
        trace.replace(path)
