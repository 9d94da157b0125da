# SPDX-License-Identifier: Apache-2.0
"""Count the passes of a tuning search, guided by predicted costs and by halving, on curves of perplexity.

    python benchmarks/quality/search_steps.py --json

The curves are powers of the density through what SmolLM2 lost at two densities (docs/benchmarks/models.md), steep and
flat ones; predictions have other exponents than the curves. A pass is one text of the search. No model is run.
"""

import argparse
import itertools
import json
import math
import statistics

from dynaxx.lab.tune.density.candidates import Candidate
from dynaxx.lab.tune.density.guide import Guide
from dynaxx.lab.tune.density.rises import Rises
from dynaxx.lab.tune.density.trials import CLEAR, ERRORS
from dynaxx.lab.tune.finding import FINE_ENOUGH, SCORER_DENSITY, SEARCH_STEPS, UNIFORM_FINE, UNIFORM_STEPS
from dynaxx.lab.tune.result import Trial

TOLERANCE, LEAST, TEXTS = 0.01, 0.07, 2
TUNED, UNIFORM = (0.297, 0.0050, 0.0015), (0.595, 0.0053, 0.0013)  # density, rise of perplexity, its standard error
TUNED_POWERS, UNIFORM_POWERS, PREDICTED_POWERS = (2.5, 3.5, 4.5), (1.6, 2.2, 3.0), (1.5, 2.5, 3.5, 4.5)


def curve(point, power):
    """Return the rise of perplexity by density: through one point, and nothing at full density."""
    density, rise, _ = point
    return lambda d: rise * (density / d) ** power * (1 - d) / (1 - density)


def trial_of(density, rise, error):
    passed = math.log1p(rise) + ERRORS * error <= math.log1p(TOLERANCE)
    return Trial(density, 1.0, 1 + rise, error, passed)


def bounds(trials):
    """Return the densest density that failed, or None, and the sparsest that passed."""
    passed = min((each.density for each in trials if each.passed), default=1.0)
    below = [each.density for each in trials if not each.passed and each.density < passed]
    return max(below, default=None), passed


def halving(rise, error, known):
    """Search from 50 % down by geometric means, every budget on every text; return passes and the density."""
    trials, passes, target = [*known], 0, 0.5
    for _ in range(5):
        trials.append(trial_of(target, rise(target), error))
        passes += TEXTS
        failed, passed = bounds(trials)
        if passed / (failed or LEAST) < 1.1:
            break
        target = math.sqrt((failed or LEAST) * passed)
    return passes, bounds(trials)[1]


class Predicted:
    """Candidates whose predicted loss is a curve over the density."""

    least = LEAST

    def __init__(self, predicted):
        self.predicted = predicted

    def at(self, density):
        return Candidate(density, [[density]], {"sample": self.predicted(density)})


def guided(rise, error, predicted, rises, fine, steps):
    """Search as `dynaxx tune` does; return passes and the density."""
    passes = []

    def evaluate(candidate):
        trial = trial_of(candidate.aim, rise(candidate.aim), error)
        fails_at_once = math.log(trial.ratio) - CLEAR * error * TEXTS**0.5 > math.log1p(TOLERANCE)
        passes.append(1 if fails_at_once else TEXTS)
        return trial

    guide = Guide(Predicted(predicted), rises, fine)
    guide.run(evaluate, steps)
    return sum(passes), guide.bounds()[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = {"halving": [], "guided": []}
    for tuned_power, uniform_power, power in itertools.product(TUNED_POWERS, UNIFORM_POWERS, PREDICTED_POWERS):
        tuned, uniform = curve(TUNED, tuned_power), curve(UNIFORM, uniform_power)
        known = [trial_of(SCORER_DENSITY, tuned(SCORER_DENSITY), TUNED[2])]
        first, second = halving(tuned, TUNED[2], known), halving(uniform, UNIFORM[2], [])
        found["halving"].append((2 * TEXTS + first[0] + second[0], first[1], second[1]))
        rises, predicted = Rises(TOLERANCE, ERRORS, {"sample": 1}), curve((0.297, 0.004, 0), power)
        rises.learn({"sample": predicted(SCORER_DENSITY)}, known[0].rows)
        first = guided(tuned, TUNED[2], predicted, rises, FINE_ENOUGH, SEARCH_STEPS)
        predicted = curve((0.595, 0.006, 0), 0.7 * power)
        second = guided(uniform, UNIFORM[2], predicted, rises.again(), UNIFORM_FINE, UNIFORM_STEPS)
        found["guided"].append((2 + first[0] + second[0], first[1], second[1]))
    rows = []
    for name, each in found.items():
        passes, tuned, uniform = zip(*each, strict=True)
        rows.append(
            {
                "search": name,
                "passes on average": statistics.mean(passes),
                "fewest": min(passes),
                "most": max(passes),
                "tuned density": statistics.mean(tuned),
                "uniform density": statistics.mean(uniform),
            }
        )
    print(json.dumps({"rows": rows}) if options.json else "\n".join(map(str, rows)))


if __name__ == "__main__":
    main()
