# SPDX-License-Identifier: Apache-2.0
"""A model's own attention: transformers' SDPA or eager beside `dynaxx.apply(model)`, same process, random weights.

Layers of real models are timed as their attention calls arrive, captured from a forward pass of a model of one layer.
Whole models have the real shape of a layer, and as many layers as `--layers` says. Times are medians of turns.

python benchmarks/models/own_patterns.py [--parts layers,models,border] [--device cuda] [--quick] [--json FILE]
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

import dynaxx as dx
from dynaxx.integrations.transformers.calls import layer as ours
from dynaxx.integrations.transformers.calls import own_planning

SLIDING, FULL = "sliding_attention", "full_attention"
BUSY_CYCLES = 4_000_000  # 2 ms of other work on the GPU before a timed call, so that the host is ahead, as in a model


class Shape(NamedTuple):
    """A model's shape, from its config on the hub."""

    name: str
    config: str
    model: str
    q_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    window: int
    full_every: int  # one layer in so many sees everything; 0: none
    extra: dict = {}  # noqa: RUF012

    def build(self, layers, kind=None, *, device="cuda", dtype=torch.bfloat16, vocab=32_000):
        """Build a model with random weights. `kind` makes all layers of one kind."""
        kinds = [FULL if self.full_every and (i + 1) % self.full_every == 0 else SLIDING for i in range(layers)]
        types = {} if self.full_every == 0 else {"layer_types": kinds if kind is None else [kind] * layers}
        config = getattr(transformers, self.config)(
            vocab_size=vocab, hidden_size=self.hidden, intermediate_size=self.intermediate, num_hidden_layers=layers,
            num_attention_heads=self.q_heads, num_key_value_heads=self.kv_heads, head_dim=self.head_dim,
            sliding_window=self.window, max_position_embeddings=1 << 17, **types, **self.extra,
        )  # fmt: skip
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                return getattr(transformers, self.model)(config).eval()
        finally:
            torch.set_default_dtype(torch.float32)


EXPERTS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
}
GEMMA3 = ("Gemma3TextConfig", "Gemma3ForCausalLM")
SHAPES = {
    "Gemma 3 27B": Shape("Gemma 3 27B", *GEMMA3, 32, 16, 128, 5376, 21504, 1024, 6),
    "Gemma 3 12B": Shape("Gemma 3 12B", *GEMMA3, 16, 8, 256, 3840, 15360, 1024, 6),
    "Gemma 2 9B": Shape("Gemma 2 9B", "Gemma2Config", "Gemma2ForCausalLM", 16, 8, 256, 3584, 14336, 4096, 2),
    "gpt-oss 20B": Shape("gpt-oss 20B", "GptOssConfig", "GptOssForCausalLM", 64, 8, 64, 2880, 2880, 128, 2, EXPERTS),
    "Mistral 7B": Shape("Mistral 7B", "MistralConfig", "MistralForCausalLM", 32, 8, 128, 4096, 14336, 4096, 0),
}
LAYERS = (
    ("Gemma 3 27B", SLIDING, 8192), ("Gemma 3 27B", SLIDING, 32768), ("Gemma 3 12B", SLIDING, 32768),
    ("Gemma 2 9B", SLIDING, 8192), ("Gemma 2 9B", FULL, 8192), ("gpt-oss 20B", SLIDING, 8192),
    ("gpt-oss 20B", FULL, 8192), ("Mistral 7B", SLIDING, 32768), ("Gemma 3 12B", FULL, 8192),
)  # fmt: skip
MODELS = (  # shape, layers, tokens, whether a training step
    ("Gemma 3 12B", 12, 32768, False), ("Gemma 3 12B", 6, 8192, True),
    ("gpt-oss 20B", 4, 8192, False), ("Mistral 7B", 8, 32768, False),
)  # fmt: skip
BORDER = ("Mistral 7B", "Gemma 3 12B", "gpt-oss 20B")
SHORT = (256, 512, 1024, 2048, 4096, 8192)


def timed(run, device):
    """Return milliseconds of one run."""
    if device == "cpu":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(BUSY_CYCLES)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def in_turns(runs, device, turns):
    """Return the median milliseconds of each, one after the other in every turn; the first turn warms up."""
    taken = {name: [] for name in runs}
    for turn in range(turns + 1):
        for name, run in runs.items():
            milliseconds = timed(run, device)
            if turn:
                taken[name].append(milliseconds)
    return {name: round(statistics.median(values), 4) for name, values in taken.items()}


class Captured(NamedTuple):
    """The inputs of an attention call, captured twice: without and with dynaxx."""

    dense: tuple
    own_pattern: tuple


def capture(model, ids):
    """Capture the last attention call of a pass, of the model's own attention and of dynaxx."""
    calls = {}
    own = model.config._attn_implementation
    registry = transformers.AttentionInterface()
    function = registry[own] if own in registry else sys.modules[type(model).__module__].eager_attention_forward

    def spy(module, *args, **kwargs):
        calls["dense"] = (function, module, args, kwargs)
        return function(module, *args, **kwargs)

    transformers.AttentionInterface.register("spy", spy)
    transformers.AttentionMaskInterface.register("spy", transformers.AttentionMaskInterface()[own])
    model.set_attn_implementation("spy")
    with torch.no_grad():
        model(ids, logits_to_keep=1, use_cache=False)
    model.set_attn_implementation(own)
    with dx.apply(model) as handle, torch.no_grad():
        attend = ours.Layer.attend

        def see(layer, current, call):
            calls["own_pattern"] = (layer, current, call)
            return attend(layer, current, call)

        ours.Layer.attend = see
        try:
            model(ids, logits_to_keep=1, use_cache=False)
        finally:
            ours.Layer.attend = attend
        stats = handle.stats()
    return Captured(calls["dense"], calls["own_pattern"]), own, stats


def layer_row(name, kind, seqlen, device, turns):
    """Time one attention layer, forward and backward, as the model calls it, and the operation alone."""
    model = SHAPES[name].build(1, kind, device=device, vocab=1024)
    ids = torch.randint(0, 1024, (1, seqlen), device=device)
    captured, own, stats = capture(model, ids)
    function, module, (q, k, v, mask), kwargs = captured.dense
    layer, current, own_call = captured.own_pattern
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    do = torch.randn(q.shape[0], q.shape[2], q.shape[1], v.shape[3], device=device, dtype=q.dtype)
    calls = {
        own: lambda: function(module, q, k, v, mask, **kwargs)[0],
        "dynaxx": lambda: layer.attend(current, own_call._replace(q=q, k=k, v=v))[0],
    }
    work = next(iter(current.call_plans.values()))[0]
    if len(work.parts) == 1:
        (part,), scores = work.parts, {"softcap": own_call.kwargs.get("softcap"), "sinks": own_call.kwargs.get("s_aux")}
        views = [x.transpose(1, 2) for x in (q, k, v)]
        calls["op"] = lambda: dx.sparse_attention(*views, part.layout, scale=own_call.kwargs.get("scaling"), **scores)

    def forward(call):
        with torch.no_grad():
            call()

    def both(call):
        torch.autograd.grad(call(), (q, k, v), do)

    row = {"layer": name, "kind": kind, "tokens": seqlen, "stats": stats}
    row["forward_ms"] = in_turns({n: lambda c=c: forward(c) for n, c in calls.items()}, device, turns)
    try:
        row["step_ms"] = in_turns({n: lambda c=c: both(c) for n, c in calls.items()}, device, turns)
    except torch.cuda.OutOfMemoryError:
        row["step_ms"] = {}  # the scores of eager attention
    timed_parts = [part for part in ("forward_ms", "step_ms") if row[part]]
    row["speedup"] = {part: round(row[part][own] / row[part]["dynaxx"], 2) for part in timed_parts}
    return row


def no_attention(module, query, key, value, mask, **_):
    """Return each query plus its own key and value, so that only the rest of the model takes time."""
    own = (key + value).repeat_interleave(query.shape[1] // key.shape[1], 1)
    return (query + own).transpose(1, 2), None


def model_row(name, layers, seqlen, trains, device, turns):
    """Time a whole model: prefill, or forward and backward of a training step.

    The same model with `no_attention` bounds what any attention could gain.
    """
    transformers.AttentionInterface.register("none", no_attention)
    transformers.AttentionMaskInterface.register("none", lambda **_: None)
    model = SHAPES[name].build(layers, device=device)
    ids, times, peaks = torch.randint(0, 32_000, (1, seqlen), device=device), {}, {}
    own = model.config._attn_implementation

    def run():
        if trains:
            model.zero_grad(set_to_none=True)
            model(ids, logits_to_keep=256, use_cache=False).logits.float().logsumexp(-1).mean().backward()
            return
        with torch.inference_mode():
            model(ids, logits_to_keep=1, use_cache=False)

    def turn(kind):
        model.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        run()  # warms up
        times.setdefault(kind, []).append(timed(run, device))
        if device == "cuda":
            peaks[kind] = round((torch.cuda.max_memory_allocated() - before) / 2**20)

    for _ in range(turns):
        turn(own)
        with dx.apply(model) as handle:
            turn("dynaxx")
            stats = handle.stats()
        model.set_attn_implementation("none")
        turn("none")
        model.set_attn_implementation(own)
    row = {"model": name, "layers": layers, "tokens": seqlen, "step": "training" if trains else "prefill"}
    row |= {"ms": {kind: round(statistics.median(taken), 2) for kind, taken in times.items()}, "peak_mib": peaks}
    row["speedup"], row["most"] = (round(row["ms"][own] / row["ms"][kind], 2) for kind in ("dynaxx", "none"))
    return {**row, "stats": stats}


def border_rows(name, device, turns):
    """Time short prompts of a model of two layers without dynaxx, with the border, and with dynaxx at every length."""
    model, rows = SHAPES[name].build(2, SLIDING, device=device), []
    own, table = model.config._attn_implementation, own_planning.BORDERS[device]
    for kind in ("window", "full") if SHAPES[name].full_every else ("window",):
        for seqlen in SHORT if device == "cuda" else SHORT[:3]:
            ids = torch.randint(0, 32_000, (1, seqlen), device=device)
            taken = {}

            def run(ids=ids, model=model):
                with torch.inference_mode():
                    model(ids, logits_to_keep=1, use_cache=False)

            for _ in range(turns):
                for how, least in ((own, None), ("border", table), ("always", dict.fromkeys(table, 1))):
                    own_planning.BORDERS[device] = least or table
                    handle = dx.apply(model) if least else None
                    run()
                    taken.setdefault(how, []).append(min(timed(run, device) for _ in range(3)))
                    if handle is not None:
                        handle.remove()
            own_planning.BORDERS[device] = table
            rows.append({"model": name, "layers": kind, "tokens": seqlen,
                         "ms": {how: round(statistics.median(t), 4) for how, t in taken.items()}})  # fmt: skip
        if SHAPES[name].full_every:
            model = SHAPES[name].build(2, FULL, device=device)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="layers,models,border")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="short lengths and two turns")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device, turns = options.device, 2 if options.quick else options.turns
    short = lambda tokens: min(tokens, 512) if options.quick else tokens
    jobs = {
        "layers": [lambda row=row: layer_row(*row[:2], short(row[2]), device, turns) for row in LAYERS],
        "models": [
            lambda row=row: model_row(
                row[0], 1 if options.quick else row[1], short(row[2]), row[3], device, min(turns, 3)
            )
            for row in MODELS
        ],
        "border": [lambda name=name: border_rows(name, device, turns) for name in BORDER],
    }
    found = {part: [] for part in options.parts.split(",")}
    facts = {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None, "torch": torch.__version__,
        "transformers": transformers.__version__, "dynaxx": dx.__version__, "commit": commit(),
    }  # fmt: skip
    for part in found:
        for job in jobs[part]:
            try:
                rows = job()
            except (torch.cuda.OutOfMemoryError, RuntimeError) as error:
                rows = {"failed": str(error)[:200]}
            for row in rows if isinstance(rows, list) else [rows]:
                found[part].append(row)
                print(json.dumps(row), flush=True)
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
            if options.json:
                options.json.write_text(json.dumps({**facts, **found}, indent=1) + "\n", encoding="utf-8")


def commit():
    """Return the commit that ran, if git knows it."""
    said = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return said.stdout.strip() or None


if __name__ == "__main__":
    main()
