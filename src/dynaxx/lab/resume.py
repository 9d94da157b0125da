"""Long work that survives a kill: each finished step is kept on disk, and a new start goes on from there."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dynaxx.lab.files import read_json, write_json

logger = logging.getLogger("dynaxx")


def fingerprint(model: nn.Module | None, ids: Tensor, **settings: Any) -> str:
    """A short hash of a model's configuration and weights (sampled), token ids or numbers, and settings."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    digest.update(ids.cpu().double().numpy().tobytes())
    for name, parameter in model.named_parameters() if model is not None else ():
        some = parameter.detach().flatten()[:: max(1, parameter.numel() // 64)]
        digest.update(name.encode() + some.cpu().double().numpy().tobytes())
    return digest.hexdigest()[:16]


class Steps:
    """Results of finished steps by name, in a JSON file that is always whole.

    A file of another fingerprint (another model, text or setting), or a broken one, is started anew, which is logged.
    """

    def __init__(self, path: Path, key: str, resume: bool = True) -> None:
        self._path, self._key = path, key
        self._results: dict[str, Any] = {}
        self.seconds = 0.0  # that earlier starts took
        self._since = time.monotonic()
        if resume and path.exists():
            self._load()

    def _load(self) -> None:
        try:
            found = read_json(self._path)
            if found["key"] != self._key:
                logger.warning("%s is of another model, text or setting; starting anew", self._path)
                return
            self._results, self.seconds = dict(found["results"]), float(found["seconds"])
        except (ValueError, KeyError, TypeError):
            logger.warning("%s cannot be read; starting anew", self._path)

    def __contains__(self, name: str) -> bool:
        return name in self._results

    def remember(self, name: str, compute: Callable[[], Any]) -> Any:
        """The JSON-able result of a step: from the file, or computed now and kept."""
        if name not in self._results:
            self._results[name] = compute()
            spent = self.seconds + time.monotonic() - self._since
            write_json(self._path, {"key": self._key, "seconds": spent, "results": self._results})
        return self._results[name]
