# SPDX-License-Identifier: Apache-2.0
"""A clock on which declared work takes as long as on a machine of a given speed, and all other code no time."""

import random
from contextlib import contextmanager

from dynaxx.lab.time_budget import Clock

PASS = 4.0  # seconds of a forward pass over 256 tokens at speed 1
SECONDS = {  # of work on 256 tokens, see the kinds of work in the package
    "pass": PASS,
    "gradient": 0.0,  # its passes are counted below, its layers by themselves
    "costs of layers": 1.0,
    "attention": 0.02,
    "crossover": 0.0,
}


class SlowClock(Clock):
    """A simulated clock.

    Args:
        slowness: factor on all work.
        noise: relative spread of the seconds of work; disturbances only add time.
        busy: whether the machine reports that others slowed it.
        stop_at: seconds at which the user presses Ctrl-C.
        choosing: seconds of choosing blocks, as a share of those of dense attention.
    """

    def __init__(self, slowness=1.0, noise=0.0, seed=0, busy=False, stop_at=None, choosing=0.1):
        self.choosing = choosing
        self.seconds, self.slowness, self.noise, self.busy = 0.0, slowness, noise, busy
        self.stop_at, self.random, self.done = stop_at, random.Random(seed), []

    def now(self):
        return self.seconds

    @contextmanager
    def work(self, kind, tokens, share=1.0):
        if kind == "gradient":
            self.spend(3 * PASS * tokens / 256)
        yield
        each = SECONDS.get(kind, PASS) * tokens / 256
        if kind == "attention":
            each *= tokens / 256 * (share if share == 1.0 else self.choosing + 0.9 * share)
        self.done.append((kind, tokens))
        self.spend(each)

    def spend(self, seconds):
        self.seconds += seconds * self.slowness * (1 + self.noise * self.random.expovariate(1.0))
        if self.stop_at is not None and self.seconds >= self.stop_at:
            self.stop_at = None
            raise KeyboardInterrupt

    def watch(self):
        return lambda: self.busy
