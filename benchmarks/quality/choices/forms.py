# SPDX-License-Identifier: Apache-2.0
"""Local tokens, last queries, dense layers, and what stands in for omitted blocks."""

from dataclasses import replace

from benchmarks.quality.choices.ways import MASS, MEAN

CHOICES = {
    "mean query": (MEAN,),
    "mean query, one budget": (MEAN,),
    "mean query, last 32 queries": (replace(MEAN, last=32),),
    "mean query, last 0 queries": (replace(MEAN, last=0),),
    "mean query, 128 or 32 local tokens by head": (MEAN, replace(MEAN, local=0)),
    "mean queries of 8 tokens": (replace(MEAN, scorer="mean 8", sharpness=0.9),),
    "mean query and spread": (replace(MEAN, scorer="spread 32", sharpness=0.75),),
    "mean query, spread or bounds by head": (
        MEAN,
        replace(MEAN, scorer="spread 32"),
        replace(MEAN, scorer="bound 0.5"),
    ),
    "mean query by value": (replace(MEAN, values=True),),
    "mean query, mean keys and values stand in": (replace(MEAN, omitted="means"),),
    "mean query, what it reads stands in": (replace(MEAN, omitted="query"),),
    "mean query, what the middle query reads stands in": (replace(MEAN, omitted="row"),),
    "true mass, mean keys and values stand in": (replace(MASS, omitted="means"),),
    "mean query, first layer dense": (replace(MEAN, dense_layers=(0,)),),
    "mean query, first two layers dense": (replace(MEAN, dense_layers=(0, 1)),),
    "mean query, last layer dense": (replace(MEAN, dense_layers=(-1,)),),
    "mean query, first and last layer dense": (replace(MEAN, dense_layers=(0, -1)),),
}
