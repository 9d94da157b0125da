# SPDX-License-Identifier: Apache-2.0
"""Code that all engine adapters share.

The files:

    routing, deployed                       how a sequence runs, and the policy that decides it
    counts, policy_events, statistics_file  what happened
    guarding, measure                       the guard; `background` runs its jobs
    paged, paged_*, in_place                layers of serving engines over paged caches
    summary_updates                         page summaries that the last layer updates for all
    identity                                a weak map by identity
"""
