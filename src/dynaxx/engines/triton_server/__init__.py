# SPDX-License-Identifier: Apache-2.0
"""Serve policies with Triton Inference Server, from a model repository for its Python backend."""

from typing import TYPE_CHECKING

from dynaxx.lazy import load_at_first_use

if TYPE_CHECKING:
    from dynaxx.engines.triton_server.repository import RepositorySettings, write_repository

__all__ = ["RepositorySettings", "write_repository"]

__getattr__ = load_at_first_use(__name__, {"repository": __all__})
