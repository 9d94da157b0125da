# SPDX-License-Identifier: Apache-2.0
"""Which density passes: candidates are tried in the model, on texts of several kinds and on tasks.

candidates    budgets of heads for any density, and the loss that they are predicted to cost
rises         predict the rise of perplexity of a candidate from the rises that trials measured
guide         try candidates until the sparsest one that passes is known closely enough
trials        measure a candidate, with more text where the result is undecided
search_texts  the texts for costs and for trials
held_tasks    tasks that must pass
"""
