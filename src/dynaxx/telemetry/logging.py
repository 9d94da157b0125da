# SPDX-License-Identifier: Apache-2.0
"""Write the messages of the logger `dynaxx` as lines of JSON, on request.

Facts are numbers and short words, never prompts or tokens.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, TextIO

from dynaxx.telemetry.recorder import harmless


class JsonFormatter(logging.Formatter):
    """Format a record as one line of JSON: time (UTC), level, logger, message, facts of an event, error, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        facts = getattr(record, "facts", None)
        if isinstance(facts, dict):
            line["facts"] = {str(name): harmless(value) for name, value in facts.items()}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_json(stream: TextIO | None = None, *, level: int | str = logging.INFO) -> logging.Handler:
    """Write the messages of the logger `dynaxx` to a stream (stderr by default) as JSON, and nowhere else.

    A second call replaces the first. To undo it, pass the returned handler to
    `logging.getLogger("dynaxx").removeHandler`.
    """
    logger = logging.getLogger("dynaxx")
    for handler in [h for h in logger.handlers if isinstance(h.formatter, JsonFormatter)]:
        logger.removeHandler(handler)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    return handler
