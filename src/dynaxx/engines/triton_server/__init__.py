# SPDX-License-Identifier: Apache-2.0
"""Serve policies with Triton Inference Server, from a model repository for its Python backend."""

from dynaxx.engines.triton_server.repository import RepositorySettings, write_repository

__all__ = ["RepositorySettings", "write_repository"]
