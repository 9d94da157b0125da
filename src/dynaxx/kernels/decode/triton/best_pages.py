# SPDX-License-Identifier: Apache-2.0
"""Select the best pages of a list without sorting: search for a threshold that the wanted number of scores reach."""

import triton
import triton.language as tl

from dynaxx.kernels.primitives.numbers import from_ordered_bits, ordered_bits

PASSES_BY_VALUE = tl.constexpr(6)
MAX_KEY = tl.constexpr(0xFFFFFFF0)  # above all keys but those of some NaN; adding a search step does not wrap around


@triton.jit
def _add3(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _between(low, high, share):
    """Return a key in (low, high], interpolated by value: `share` of the way from low's score to high's."""
    a, b = from_ordered_bits(low), from_ordered_bits(high)
    return tl.minimum(tl.maximum(ordered_bits(a + (b - a) * share), low + 1), high)


@triton.jit
def _count_and_range(n, m, least, most, n2, m2, least2, most2):
    return n + n2, m + m2, tl.minimum(least, least2), tl.maximum(most, most2)


@triton.jit
def _last_wanted(keys, low, high, reached, wanted):
    """Return a key that `wanted` of the keys reach (or more, if the last ones are equal), and how many reach it.

    All `reached` keys are in [low, high). Each pass narrows that range to about a quarter: first by value, because
    values are spread more evenly than their bits, then, to guarantee progress, by bits. The search stops when the count
    is right, usually after a few passes.
    """
    passes = 0
    while (high - low > 1) & (reached != wanted):
        step = tl.maximum((high - low) // 4, 1)
        by_value = passes < PASSES_BY_VALUE
        first = tl.where(by_value, _between(low, high, 0.25), low + step)
        second = tl.where(by_value, _between(low, high, 0.5), low + 2 * step)
        third = tl.where(by_value, _between(low, high, 0.75), low + 3 * step)
        counts = ((keys >= first).to(tl.int32), (keys >= second).to(tl.int32), (keys >= third).to(tl.int32))
        at_first, at_second, at_third = tl.reduce(counts, 0, _add3)
        above_first, above_second, above_third = at_first >= wanted, at_second >= wanted, at_third >= wanted
        high = tl.where(above_third, high, tl.where(above_second, third, tl.where(above_first, second, first)))
        low = tl.where(above_third, third, tl.where(above_second, second, tl.where(above_first, first, low)))
        reached = tl.where(above_second, at_second, tl.where(above_first, at_first, reached))
        reached = tl.where(above_third, at_third, reached)
        passes += 1
    return low, reached


@triton.jit
def best_pages(scores, forced, optional, wanted):
    """Return the forced pages and the `wanted` best optional ones (ties: the earlier page), and how many they are."""
    keys = tl.where(optional, tl.minimum(ordered_bits(scores + 0.0), MAX_KEY), 0)
    facts = (optional.to(tl.int32), forced.to(tl.int32), tl.where(optional, keys, MAX_KEY), keys)
    num_optional, num_forced, low, high = tl.reduce(facts, 0, _count_and_range)
    wanted = tl.minimum(wanted, num_optional)
    least, reached = _last_wanted(keys, low, high + 1, num_optional, wanted)
    chosen = optional & (keys >= least)
    if reached != wanted:  # the last ones are equal, and there are too many of them
        equal = optional & (keys == least)
        behind = tl.sum(equal.to(tl.int32), 0) - tl.cumsum(equal.to(tl.int32), 0)
        chosen = chosen & ((equal == 0) | (behind >= reached - wanted))
    return forced | chosen, num_forced + wanted
