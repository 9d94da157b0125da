# SPDX-License-Identifier: Apache-2.0
"""One attention call of one layer: `planning` decides how it runs, and `layer` runs it.

arguments, masks --> planning --> layer --> a rule
                        |               --> decode: a decoding step over the cache
                 border, own_pattern    --> own_pattern: the model's own pattern
                                        --> dense_fallback: the model's original attention
"""
