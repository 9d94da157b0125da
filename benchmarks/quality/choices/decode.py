# SPDX-License-Identifier: Apache-2.0
"""Pages of a decode step: bounds of keys, by share and by mass."""

from dataclasses import replace

from benchmarks.quality.choices.ways import Choice

PAGE = Choice(q_block=1, kv_block=32, scorer="bound 1.0", sharpness=1.0, local=255, group=True, last=0, decode=True)
CHOICES = {
    "bounds, share, one budget": (PAGE,),
    "bounds, share": (PAGE,),
    "bounds, top-p, one mass": (replace(PAGE, rule="top_p"),),
    "bounds, top-p": (replace(PAGE, rule="top_p"),),
    "bounds of half the range, top-p": (replace(PAGE, rule="top_p", scorer="bound 0.5"),),
    "bounds of half the range, share": (replace(PAGE, scorer="bound 0.5"),),
    "true mass, share": (replace(PAGE, scorer="mass"),),
    "true mass, top-p": (replace(PAGE, scorer="mass", rule="top_p"),),
    "bounds of half the range, top-p, 64 recent tokens": (replace(PAGE, rule="top_p", scorer="bound 0.5", local=64),),
    "bounds of half the range, share, pages of 16": (replace(PAGE, scorer="bound 0.5", kv_block=16),),
    "bounds of half the range, share, pages of 16, 64 recent tokens": (
        replace(PAGE, scorer="bound 0.5", kv_block=16, local=63),
    ),
    "bounds, share, pages of 16, all kinds": (replace(PAGE, kv_block=16),),
    "bounds of half the range, share, pages of 16, all kinds": (replace(PAGE, scorer="bound 0.5", kv_block=16),),
    "bounds, share, all kinds": (PAGE,),
    "bounds of half the range about its middle, share, pages of 16": (replace(PAGE, scorer="middle 0.5", kv_block=16),),
    "mean and variance, share": (replace(PAGE, scorer="moments"),),
    "mean and variance, share, pages of 16": (replace(PAGE, scorer="moments", kv_block=16),),
    "logits of bounds, share, pages of 16": (replace(PAGE, kv_block=16, logits=True),),
    "logits of bounds, share, one budget": (replace(PAGE, logits=True),),
    "logits of bounds of half the range, share, pages of 16": (
        replace(PAGE, kv_block=16, logits=True, scorer="bound 0.5"),
    ),
    "bounds, share, pages of 8": (replace(PAGE, kv_block=8),),
    "logits of bounds, share, pages of 8": (replace(PAGE, kv_block=8, logits=True),),
    "logits of bounds of half the range, share, pages of 8": (
        replace(PAGE, kv_block=8, logits=True, scorer="bound 0.5"),
    ),
    "logits of bounds of half the range, share, pages of 8, 128 recent tokens": (
        replace(PAGE, kv_block=8, logits=True, scorer="bound 0.5", local=127),
    ),
    "bounds of three quarters of the range, share, pages of 16": (replace(PAGE, kv_block=16, scorer="bound 0.75"),),
    "bounds of half the range, share, pages of 8": (replace(PAGE, kv_block=8, scorer="bound 0.5"),),
    "bounds, share, pages of 16, 128 recent tokens": (replace(PAGE, kv_block=16, local=127),),
    "bounds, share, pages of 8, 128 recent tokens": (replace(PAGE, kv_block=8, local=127),),
    "mean and a logit's deviation, share, pages of 16": (replace(PAGE, kv_block=16, scorer="root 2.0"),),
    "farthest key and mean of the others, share, pages of 16": (replace(PAGE, kv_block=16, scorer="rest"),),
    "mean and widest direction, share, pages of 16": (replace(PAGE, kv_block=16, scorer="axis"),),
    "8 numbers per key, share, pages of 16": (replace(PAGE, kv_block=16, scorer="tokens 8"),),
    "16 numbers per key, share, pages of 16": (replace(PAGE, kv_block=16, scorer="tokens 16"),),
    "true mass, share, pages of 8": (replace(PAGE, kv_block=8, scorer="mass"),),
    "bounds, share, 64 recent tokens": (replace(PAGE, local=63),),
    "bounds, share, pages of 16": (replace(PAGE, kv_block=16),),
    "true mass, share, pages of 16": (replace(PAGE, scorer="mass", kv_block=16),),
    "bounds, top-p, pages of 16": (replace(PAGE, rule="top_p", scorer="bound 0.5", kv_block=16),),
    "bounds, top-p, pages of 64": (replace(PAGE, rule="top_p", scorer="bound 0.5", kv_block=64),),
}
