# SPDX-License-Identifier: Apache-2.0
"""Times and rates of a machine that tests give to the tools of the lab, instead of measuring them for seconds."""

from dynaxx.lab import machine
from dynaxx.lab.tune.crossover import LengthTiming


def give_prefill_times(monkeypatch, times):
    """Let `tune` find these times of prompts."""
    monkeypatch.setattr("dynaxx.lab.tune.search.time_lengths", lambda *_, **__: times)


def give_step_times(monkeypatch, times):
    """Let `tune` find these times of decoding steps."""
    monkeypatch.setattr("dynaxx.lab.tune.decode.time_steps", lambda *_: times)


def give_ceilings(monkeypatch):
    """Let `profile` find 100 GFLOP/s and 10 GB/s."""
    ceilings = machine.Ceilings(100.0, 10.0, "float32", "cpu", 2)
    monkeypatch.setattr("dynaxx.lab.profile.run.measure_ceilings", lambda device, dtype, **_: ceilings)


def twice_as_fast(*lengths):
    """Return times at which sparse prompts or steps take half as long as dense ones."""
    return [LengthTiming(length, 2.0, 1.0) for length in lengths]
