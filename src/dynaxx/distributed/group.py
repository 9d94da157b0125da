# SPDX-License-Identifier: Apache-2.0
"""Process groups: the ranks that share a sequence, and an error for ranks that fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

Mesh: TypeAlias = DeviceMesh | ProcessGroup


class PeerError(RuntimeError):
    """Another rank of the group failed, left, or did not answer within the group's timeout."""


def group_of(mesh: Mesh) -> ProcessGroup:
    """Return the process group of a one-dimensional mesh, or the group itself.

    Raises:
        TypeError: `mesh` is neither a mesh nor a group.
        ValueError: the mesh has several dimensions.
    """
    if isinstance(mesh, DeviceMesh):
        known = _groups.get(mesh)
        group = None if known is None else known()
        if group is not None:
            return group
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names or ()
            raise ValueError(
                f"`mesh` must have one dimension, got {mesh.ndim}; pass the one that splits the sequence, such as "
                f"mesh[{names[-1] if names else 'name'!r}]"
            )
        group = mesh.get_group()
        _groups[mesh] = ref(group)
        return group
    if isinstance(mesh, ProcessGroup):
        return mesh
    raise TypeError(f"`mesh` must be a DeviceMesh or a ProcessGroup, got {type(mesh).__name__}")


_groups: WeakKeyDictionary[DeviceMesh, ref[ProcessGroup]] = WeakKeyDictionary()


@contextmanager
def peer_errors(doing: str, group: ProcessGroup) -> Iterator[None]:
    """Convert errors of the communication library into a `PeerError` that says what this rank was doing.

    Raises:
        PeerError: the body raised a RuntimeError.
    """
    try:
        yield
    except PeerError:
        raise
    except RuntimeError as error:
        raise PeerError(
            f"rank {dist.get_rank(group)} of {dist.get_world_size(group)} failed while {doing}: another rank died, "
            f"left, or did not answer within the group's timeout ({first_line(error)}). Restart the whole group from "
            "the last checkpoint, for example with torchrun."
        ) from error


def first_line(error: Any) -> str:
    """Return the first line of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
