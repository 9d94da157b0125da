# SPDX-License-Identifier: Apache-2.0
"""Scorers of the field, and heads that choose by one of several scorers, whichever costs them least."""

from dataclasses import replace

from benchmarks.quality.choices.ways import MEAN, TILE

ANTI = replace(MEAN, scorer="anti 16")
BOUND = replace(MEAN, scorer="bound 0.5")
PROBE = replace(MEAN, scorer="probe 64")
SMALL = replace(MEAN, scorer="mean 16", **TILE)
NARROW = replace(SMALL, kv_block=4)
CHOICES = {
    "mean query": (MEAN,),
    "anti-diagonals of 16": (ANTI,),
    "mean query or anti-diagonals by head": (MEAN, ANTI),
    "mean of both": (replace(MEAN, scorer="mean 32 + anti 16"),),
    "mean query, anti-diagonals, bounds or lines by head": (MEAN, ANTI, BOUND, PROBE),
    "mean query or anti-diagonals by head, 16 x 16": (SMALL, replace(SMALL, scorer="anti 16")),
    "mean of both, 16 x 16": (replace(SMALL, scorer="mean 16 + anti 16"),),
    "anti-diagonals of 8, 16 x 16": (replace(SMALL, scorer="anti 8"),),
    "anti-diagonals of 8": (replace(MEAN, scorer="anti 8"),),
    "bounds of half the range": (BOUND,),
    "lines of the last 64 queries": (PROBE,),
    "mean query or anti-diagonals by head, 16 x 4": (NARROW, replace(NARROW, scorer="anti 4")),
}
