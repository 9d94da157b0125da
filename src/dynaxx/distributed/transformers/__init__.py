# SPDX-License-Identifier: Apache-2.0
"""Split the sequence of a transformers model over the ranks of a mesh."""

from typing import TYPE_CHECKING

from dynaxx.lazy import load_at_first_use

if TYPE_CHECKING:
    from dynaxx.distributed.transformers.handle import SplitHandle

__all__ = ["SplitHandle"]

__getattr__ = load_at_first_use(__name__, {"handle": __all__})
