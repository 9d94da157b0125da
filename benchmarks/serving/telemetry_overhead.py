# SPDX-License-Identifier: Apache-2.0
"""Time telemetry in a prefill: counted and measured as in service, or not at all.

    OMP_NUM_THREADS=1 python benchmarks/serving/telemetry_overhead.py --tokens 8192 --runs 5
    python benchmarks/serving/telemetry_overhead.py --device cuda --tokens 16384

On a CPU a prefill is SmolLM2's under a policy, in CPU time of one thread, which neighbours on the machine hardly
disturb. On a GPU it is that of a model of Llama 3 8B's shape with random weights (--layers of its 32), and then the
attention of its layers alone, selection included; there it is what passes until the GPU is done.

"within" is the time in telemetry's own functions over the prefill's. "between" compares medians of prefills with and
without telemetry, interleaved in one process; it says no more than how much such prefills differ anyway, which is
printed beside it. --sample-rate 1 measures as many calls as it may, which service never does. The prefill that warms up
measures every call: the first ones of a process load kernels, for a tenth of a second on a GPU.
"""

import argparse
import statistics
import time
from contextlib import ExitStack, contextmanager
from functools import wraps
from unittest.mock import patch

import torch

import dynaxx as dx
from dynaxx.integrations.transformers.loading import from_config
from dynaxx.telemetry import Recorder, recorder
from dynaxx.telemetry.probe import SAMPLE_RATE, Call, MeasuredCall, Probe, RequestTimer

ENTRIES = {
    Probe: ("start", "dense", "fallback", "request"),
    Call: ("selected", "done"),
    MeasuredCall: ("selected", "done"),
    RequestTimer: ("done",),
    Recorder: ("add", "set", "observe", "info", "event"),
}


class Nothing:
    """A recorder that records nothing."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: self


@contextmanager
def without_telemetry():
    with ExitStack() as stack:
        for owner, names in ENTRIES.items():
            for name in names:
                stack.enter_context(patch.object(owner, name, lambda self, *args, **kwargs: Nothing()))
        yield


@contextmanager
def counted_telemetry(spent, clock):
    """Add the time in telemetry's outermost functions, and their number, to `spent`."""
    depth = [0]

    def timed(function):
        @wraps(function)
        def call(*args, **kwargs):
            depth[0] += 1
            start = clock()
            try:
                return function(*args, **kwargs)
            finally:
                depth[0] -= 1
                if not depth[0]:
                    spent[0] += clock() - start
                    spent[1] += 1

        return call

    with ExitStack() as stack:
        for owner, names in ENTRIES.items():
            for name in names:
                stack.enter_context(patch.object(owner, name, timed(getattr(owner, name))))
        yield


RULE = dx.Sink(4) | dx.SlidingWindow(256) | dx.TopK(0.05)


def under_a_policy(model, ids, block_size, sample_rate):
    """Return a prefill of a model under a policy."""
    from dynaxx.integrations.transformers.apply_policy import model_facts
    from dynaxx.policy import Policy, Rule

    policy = Policy(model=model_facts(model), rules=(Rule.of(RULE),), block_size=block_size, dense_below=512)
    probe = dx.apply(model, policy).counts.probe
    wait = torch.cuda.synchronize if ids.is_cuda else lambda: None

    def prefill():
        model(ids, logits_to_keep=1)
        wait()

    return warmed_up(prefill, probe, sample_rate)


@torch.no_grad()
def warmed_up(prefill, probe, sample_rate):
    """Return the prefill, after one run in which every call was measured."""
    probe.sample_rate, spacing, probe.spacing = 1.0, probe.spacing, 0.0
    prefill()
    prefill()
    probe.sample_rate, probe.spacing = sample_rate, spacing
    return prefill


def smollm2_prefill(tokens, sample_rate):
    """Return a prefill of SmolLM2 on a CPU."""
    from dynaxx.lab.models import load_model
    from dynaxx.lab.texts import encode, pydoc_text

    model, tokenizer = load_model("smollm2", dtype=torch.float32, device="cpu")
    return under_a_policy(model, encode(tokenizer, pydoc_text(), tokens), 32, sample_rate)


def llama_prefill(tokens, layers, sample_rate):
    """Return the prefill of a model of Llama 3 8B's shape on a GPU."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=tokens,
    )
    with torch.device("cuda"):
        model = from_config(transformers.AutoModelForCausalLM, config, dtype=torch.bfloat16).eval()
    return under_a_policy(model, torch.randint(0, 1024, (1, tokens), device="cuda"), 64, sample_rate)


def attention_prefill(tokens, layers, sample_rate):
    """Return the attention of that model's layers alone, as an integration calls it."""
    q = torch.randn(1, tokens, 32, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, tokens, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    probe = Probe(recorder())

    def prefill():
        for layer in range(layers):
            call = probe.start(layer, q)
            layout = dx.select_blocks(q, k, RULE, block_size=64)
            call.selected(layout)
            dx.sparse_attention(q, k, v, layout)
            call.done(k, v)
        torch.cuda.synchronize()

    return warmed_up(prefill, probe, sample_rate)


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tokens", type=int, default=8192)
    options.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options.add_argument("--layers", type=int, default=32, help="on a GPU")
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--sample-rate", type=float, default=SAMPLE_RATE)
    options = options.parse_args()
    if options.device == "cpu":
        compare("smollm2", smollm2_prefill(options.tokens, options.sample_rate), time.thread_time, options)
    else:
        for name, make in (("llama 8b", llama_prefill), ("attention alone", attention_prefill)):
            run = make(options.tokens, options.layers, options.sample_rate)
            compare(f"{name}, {options.layers} layers", run, time.perf_counter, options)


def compare(name, run, clock, options):
    """Print what telemetry takes of a prefill."""

    def prefill():
        start = clock()
        run()
        return clock() - start

    times, shares = {"with": [], "without": []}, []
    with torch.no_grad():
        prefill()
        for _ in range(options.runs):
            times["with"].append(prefill())
            with without_telemetry():
                times["without"].append(prefill())
            spent = [0.0, 0]
            with counted_telemetry(spent, clock):
                seconds = prefill()
            shares.append(spent[0] / seconds)
    medians = {name: statistics.median(found) for name, found in times.items()}
    spread = (max(times["without"]) - min(times["without"])) / medians["without"]
    print(f"{name}, {options.tokens} tokens, sample rate {options.sample_rate:g}: {medians['without']:.3f} s")
    print(
        f"within:  {statistics.median(shares):.3%} (worst {max(shares):.3%}), {spent[1]} calls of telemetry a prefill"
    )
    print(f"between: {medians['with'] / medians['without'] - 1:+.2%}; runs without differ by {spread:.2%}")


if __name__ == "__main__":
    main()
