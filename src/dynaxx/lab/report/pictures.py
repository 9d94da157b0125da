# SPDX-License-Identifier: Apache-2.0
"""Pictures of the patterns in a policy, drawn by `BlockLayout.plot`."""

from __future__ import annotations

import base64
import io
from typing import Any

TOKENS = 1024  # tokens that a picture shows
MOST_PICTURES = 3


def pattern_pictures(document: dict[str, Any]) -> list[dict[str, str]]:
    """Draw the first patterns of a policy's prefill rules, dense ones left out.

    Blocks that a selector adds depend on the prompt and are not drawn.

    Returns:
        For each picture its caption and a PNG as a data URI. Empty without matplotlib, or if the document is no policy
        of this version.
    """
    from dynaxx.patterns import Causal, Full, Pattern
    from dynaxx.policy import Policy
    from dynaxx.policy.rule_parts import parts

    try:
        from matplotlib.figure import Figure

        policy = Policy.model_validate(document)
    except (ImportError, ValueError):
        return []
    found: dict[Pattern, bool] = {}  # pattern: whether a selector adds blocks
    for rule in policy.rules:
        pattern, selector = parts(rule.attention.build()) if rule.phase == "prefill" else (None, None)
        if pattern is not None and not isinstance(pattern, (Causal, Full)):
            found.setdefault(pattern, selector is not None)
    pictures = []
    for pattern, adds in list(found.items())[:MOST_PICTURES]:
        figure = Figure(figsize=(4.2, 4.2), layout="constrained")
        pattern.layout(TOKENS, block_size=policy.block_size).plot(ax=figure.subplots())
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=96)
        uri = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        caption = "always visible; the rule adds blocks by content" if adds else "visible keys"
        pictures.append({"uri": uri, "caption": caption})
    return pictures
