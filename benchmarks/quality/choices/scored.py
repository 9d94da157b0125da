# SPDX-License-Identifier: Apache-2.0
"""Scorers and rules: mean queries and bounds of keys, by share, mass and multiples of an even spread."""

from dataclasses import replace

from benchmarks.quality.choices.ways import MEAN, TILE

FOUR = replace(MEAN, kv_block=16, scorer="mean 8", local=112)  # the policy of the goal at 8,192 tokens

CHOICES = {
    "mean query, share": (MEAN,),
    "mean query, share, one budget": (MEAN,),
    "mean query, top-p": (replace(MEAN, rule="top_p"),),
    "mean query, even": (replace(MEAN, rule="even"),),
    "mean query, mass 0.8 within half and twice a share": (replace(MEAN, rule="bounded", mass=0.8),),
    "mean query, mass 0.9 within half and twice a share": (replace(MEAN, rule="bounded", mass=0.9),),
    "mean query, mass 0.95 within half and twice a share": (replace(MEAN, rule="bounded", mass=0.95),),
    "mean query, share, 64 local tokens": (replace(MEAN, local=32),),
    "mean query, share, 32 local tokens": (replace(MEAN, local=0),),
    "mean query, share, 128 or 32 local tokens by head": (MEAN, replace(MEAN, local=0)),
    "mean query, share, 16 x 16": (replace(MEAN, scorer="mean 16", **TILE),),
    "mean query, share, 16 x 16, 32 local tokens": (replace(MEAN, scorer="mean 16", **{**TILE, "local": 16}),),
    "mean query, share, 32 x 16": (replace(MEAN, kv_block=16),),
    "mean query, share, 64 x 64": (replace(MEAN, q_block=64, kv_block=64, scorer="mean 64"),),
    "four mean queries, share, 32 x 16": (FOUR,),
    "four mean queries, mass 0.9 within half and twice a share, 32 x 16": (replace(FOUR, rule="bounded", mass=0.9),),
    "four mean queries, mass 0.95 within half and twice a share, 32 x 16": (replace(FOUR, rule="bounded", mass=0.95),),
    "mean queries of 8 tokens, share": (replace(MEAN, scorer="mean 8", sharpness=0.9),),
    "mean query, share, heads together": (replace(MEAN, group=True),),
    "bounds, share": (replace(MEAN, scorer="bound 0.5"),),
    "mean query or bounds by head, share": (MEAN, replace(MEAN, scorer="bound 0.5")),
    "mean query, share or top-p by head": (MEAN, replace(MEAN, rule="top_p")),
}
