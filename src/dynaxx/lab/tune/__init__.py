# SPDX-License-Identifier: Apache-2.0
"""`dynaxx tune` and `dynaxx retune`: find the sparsest policy that keeps quality, and renew it.

The files:

    pipeline/, run, options          `dynaxx tune` as one command, and the search of a policy
    sensitivity, costs, page_costs   the loss of each head at each budget
    search, finding, costing, density/  the run, what heads cost in it, and which density passes
    outcome                          what the search found out
    crossover, decode, decode_speed  from which length it is faster
    evidence, result, retune         what is written, and renewed
"""
