"""What telemetry costs a prefill: SmolLM2 with a policy, counted and measured as in service, or not at all.

    OMP_NUM_THREADS=1 python benchmarks/telemetry_overhead.py --tokens 8192 --runs 5

Two figures. "within": the time spent in telemetry's own functions during a prefill, over the prefill's. "between":
prefills with telemetry against prefills without, interleaved in one process, medians of CPU time; it says no more than
how much such prefills differ anyway, which is printed beside it. --sample-rate 1 measures every call, which service
never does.
"""

import argparse
import statistics
import time
from contextlib import ExitStack, contextmanager
from functools import wraps
from unittest.mock import patch

import torch

import dynaxx as dx
from dynaxx.integrations.transformers import model_facts
from dynaxx.lab.models import load_model
from dynaxx.lab.texts import encode, pydoc_text
from dynaxx.policy import Policy, Rule
from dynaxx.telemetry import Recorder, probe
from dynaxx.telemetry.probe import Call, MeasuredCall, Probe, RequestTimer

ENTRIES = {
    Probe: ("start", "dense", "fallback", "request"),
    Call: ("selected", "done"),
    MeasuredCall: ("selected", "done"),
    RequestTimer: ("done",),
    Recorder: ("add", "set", "observe", "info", "event"),
}


class Nothing:
    """Telemetry that is not there."""

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
def counted_telemetry(spent):
    """Add the time in telemetry's outermost functions, and their number, to `spent`."""
    depth = [0]

    def timed(function):
        @wraps(function)
        def call(*args, **kwargs):
            depth[0] += 1
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                depth[0] -= 1
                if not depth[0]:
                    spent[0] += time.perf_counter() - start
                    spent[1] += 1

        return call

    with ExitStack() as stack:
        for owner, names in ENTRIES.items():
            for name in names:
                stack.enter_context(patch.object(owner, name, timed(getattr(owner, name))))
        yield


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tokens", type=int, default=8192)
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--sample-rate", type=float, default=probe.SAMPLE_RATE)
    options = options.parse_args()
    model, tokenizer = load_model("smollm2", dtype=torch.float32, device="cpu")
    ids = encode(tokenizer, pydoc_text(), options.tokens)
    rule = Rule.of(dx.Sink(4) | dx.SlidingWindow(256) | dx.TopK(0.05))
    policy = Policy(model=model_facts(model), rules=(rule,), block_size=32, dense_below=512)
    with dx.apply(model, policy) as handle, torch.no_grad():
        handle.counts.probe.sample_rate = options.sample_rate

        def prefill():
            start = time.process_time()
            model(ids, logits_to_keep=1)
            return time.process_time() - start

        prefill()
        times, shares = {"with": [], "without": []}, []
        for _ in range(options.runs):
            times["with"].append(prefill())
            with without_telemetry():
                times["without"].append(prefill())
            spent = [0.0, 0]
            with counted_telemetry(spent):
                start = time.perf_counter()
                model(ids, logits_to_keep=1)
                shares.append(spent[0] / (time.perf_counter() - start))
    medians = {name: statistics.median(found) for name, found in times.items()}
    spread = (max(times["without"]) - min(times["without"])) / medians["without"]
    print(f"{options.tokens} tokens, sample rate {options.sample_rate:g}: {medians['without']:.2f} s of CPU time")
    print(
        f"within:  {statistics.median(shares):.4%} (worst {max(shares):.4%}), {spent[1]} calls of telemetry a prefill"
    )
    print(f"between: {medians['with'] / medians['without'] - 1:+.2%}; runs without differ by {spread:.2%}")


if __name__ == "__main__":
    main()
