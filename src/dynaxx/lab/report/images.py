# SPDX-License-Identifier: Apache-2.0
"""Images of the report as PNG data URIs: heat maps, written without a library, and patterns, drawn by matplotlib."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

LEVELS = 24  # shades of a heat map; more are invisible and cost bytes
INK = (20, 26, 78)  # colour of a full cell; the page inverts it in dark mode
PALE = (125, 143, 224)  # colour of an almost empty cell
TOKENS = 1024  # tokens that a picture shows
MAX_PICTURES = 3


def pattern_pictures(document: dict[str, Any]) -> list[dict[str, str]]:
    """Draw the first patterns of a policy's prefill rules, dense ones left out.

    Blocks that a selector adds depend on the prompt and are not drawn.

    Returns:
        For each picture its caption and a PNG as a data URI. Empty without matplotlib, or if the document is no policy
        of this version.
    """
    from dynaxx.patterns import Causal, Full, Pattern
    from dynaxx.policy import Policy
    from dynaxx.policy.specs import parts

    try:
        policy = Policy.model_validate(document)
    except ValueError:
        return []
    found: dict[Pattern, bool] = {}  # pattern: whether a selector adds blocks
    for rule in policy.rules:
        pattern, selector = parts(rule.attention.build()) if rule.phase == "prefill" else (None, None)
        if pattern is not None and not isinstance(pattern, (Causal, Full)):
            found.setdefault(pattern, selector is not None)
    try:
        if found:  # the import takes seconds on a busy machine
            from matplotlib.figure import Figure
    except ImportError:
        return []
    pictures = []
    for pattern, adds in list(found.items())[:MAX_PICTURES]:
        figure = Figure(figsize=(4.2, 4.2), layout="constrained")
        pattern.layout(TOKENS, block_size=policy.block_size).plot(ax=figure.subplots())
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=96)
        uri = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        caption = "always visible; the rule adds blocks by content" if adds else "visible keys"
        pictures.append({"uri": uri, "caption": caption})
    return pictures


def heatmap_uri(codes: bytes, size: int, *, low: int = 52, high: int = 240) -> str:
    """Encode a heat map as a PNG data URI, transparent where it is empty.

    Args:
        codes: `size` * `size` bytes: 0 is zero, 1 to 255 are on a log scale.
        size: number of rows and columns.
        low: largest code that is drawn empty; with five decades from 1 to 255, the default is a share of 1e-4.
        high: smallest code that is drawn full; the default is a share of one half.
    """
    ramp = bytes(
        0 if code <= low else min(LEVELS - 1, 1 + (code - low) * (LEVELS - 1) // (high - low)) for code in range(256)
    )
    pixels = codes.translate(ramp)
    lines = b"".join(b"\0" + pixels[start : start + size] for start in range(0, size * size, size))
    palette, alpha = bytearray(), bytearray()
    for level in range(LEVELS):
        t = level / (LEVELS - 1)
        palette += bytes(round(pale + (ink - pale) * t) for pale, ink in zip(PALE, INK, strict=True))
        alpha.append(round(255 * min(1.0, 1.15 * t)))
    png = b"\x89PNG\r\n\x1a\n"
    png += _chunk(b"IHDR", struct.pack(">IIBBBBB", size, size, 8, 3, 0, 0, 0))
    png += _chunk(b"PLTE", bytes(palette)) + _chunk(b"tRNS", bytes(alpha))
    png += _chunk(b"IDAT", zlib.compress(lines, 9)) + _chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
