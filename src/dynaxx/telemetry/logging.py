# SPDX-License-Identifier: Apache-2.0
"""Write the logger `dynaxx` as lines of JSON, on request.

Facts are numbers and short words, never prompts or tokens.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, TextIO

from dynaxx.telemetry.recorder import harmless


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, facts of an event, error with its traceback."""

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
    """Write what `dynaxx` logs to a stream (stderr by default) as JSON, and only there.

    Called again, it replaces what it did before. `logging.getLogger("dynaxx").removeHandler(...)` with what it returns
    takes it back.
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
