# SPDX-License-Identifier: Apache-2.0
"""One attention call of one layer.

The files:

    interface       transformers calls its function, which asks the layer
    layer           repeats an equal call, or plans the call, runs it, and counts the outcome
    planning        decides how the call runs; own_planning does so for the model's own pattern, from the border on
    sparse          runs a rule or the model's own pattern, one sequence after another
    decode          runs a decoding step over the cache
    dense_fallback  runs the model's original attention
    arguments       what a call is
    signature       everything that decides how it runs
    call_plan       how it runs
    own_pattern     the model's own pattern as layouts; `border` says from which length they pay
"""
