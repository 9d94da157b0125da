# SPDX-License-Identifier: Apache-2.0
"""Shapes of blocks: tiles of queries and columns of keys that a tile shares."""

from dataclasses import replace

from benchmarks.quality.choices.ways import MASS, MEAN, TILE

CHOICES = {
    "true mass, columns 32 x 1": (replace(MASS, kv_block=1),),
    "true mass, columns 32 x 4": (replace(MASS, kv_block=4),),
    "true mass, columns 32 x 8": (replace(MASS, kv_block=8),),
    "true mass, columns 32 x 16": (replace(MASS, kv_block=16),),
    "true mass, columns 16 x 4": (replace(MASS, **{**TILE, "kv_block": 4}),),
    "true mass, columns 64 x 1": (replace(MASS, q_block=64, kv_block=1),),
    "true mass, 16 x 16": (replace(MASS, **TILE),),
    "mean query, 32 x 32": (MEAN,),
    "mean query, 32 x 32, all kinds": (MEAN,),
    "mean query, columns 32 x 1": (replace(MEAN, kv_block=1),),
    "mean query, columns 32 x 4": (replace(MEAN, kv_block=4),),
    "mean query, columns 32 x 8": (replace(MEAN, kv_block=8),),
    "mean query, columns 32 x 16": (replace(MEAN, kv_block=16),),
    "mean query, columns 32 x 16, all kinds": (replace(MEAN, kv_block=16),),
    "mean query, columns 64 x 16": (replace(MEAN, scorer="mean 64", q_block=64, kv_block=16),),
    "mean query, columns 16 x 4": (replace(MEAN, scorer="mean 16", **{**TILE, "kv_block": 4}),),
    "mean query, columns 16 x 1": (replace(MEAN, scorer="mean 16", **{**TILE, "kv_block": 1}),),
    "mean query, columns 16 x 8": (replace(MEAN, scorer="mean 16", **{**TILE, "kv_block": 8}),),
    "mean query, columns 64 x 1": (replace(MEAN, scorer="mean 64", q_block=64, kv_block=1),),
    "mean query, 16 x 16": (replace(MEAN, scorer="mean 16", **TILE),),
    "mean query, 16 x 16, all kinds": (replace(MEAN, scorer="mean 16", **TILE),),
    "mean query, 64 x 64": (replace(MEAN, q_block=64, kv_block=64, scorer="mean 64"),),
    "mean query, 64 x 32": (replace(MEAN, q_block=64, scorer="mean 64"),),
    "mean queries of 32 tokens, 64 x 32": (replace(MEAN, q_block=64),),
}
