# SPDX-License-Identifier: Apache-2.0
"""Policies in engines where no guard can measure."""

from __future__ import annotations

import logging

from dynaxx.policy import Policy

logger = logging.getLogger("dynaxx")


def without_guard(policy: Policy, engine: str) -> Policy:
    """Return the policy without its guard, and warn that nothing measures its errors in this engine.

    Tuned policies have a guard. Refusing them would keep them out of engines whose attention they can run.
    """
    if policy.guard is None:
        return policy
    logger.warning("the policy's guard does not run in %s: nothing measures the policy's errors there", engine)
    return policy.replace(guard=None)
