# SPDX-License-Identifier: Apache-2.0
"""Measure what a scorer of blocks can reach, with choices by the true mass of every block."""

from dataclasses import replace

from benchmarks.quality.choices.ways import MASS, TILE

CHOICES = {
    "true mass, share": (MASS,),
    "true mass, top-p": (replace(MASS, rule="top_p"),),
    "true mass, even": (replace(MASS, rule="even"),),
    "true mass, share, 32 local tokens": (replace(MASS, local=0),),
    "true mass, share, 16 x 16": (replace(MASS, **TILE),),
    "true mass, share, 32 x 16": (replace(MASS, kv_block=16),),
    "true mass, share, 64 x 64": (replace(MASS, q_block=64, kv_block=64),),
    "true mass, share, 128 x 128": (replace(MASS, q_block=128, kv_block=128),),
    "true mass, share, columns 32 x 1": (replace(MASS, kv_block=1),),
    "true mass, share, columns 32 x 4": (replace(MASS, kv_block=4),),
    "true mass, share, columns 16 x 4": (replace(MASS, q_block=16, kv_block=4),),
    "true mass by value, share": (replace(MASS, values=True),),
    "true mass, share or top-p by head": (MASS, replace(MASS, rule="top_p")),
}
