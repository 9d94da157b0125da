# SPDX-License-Identifier: Apache-2.0
"""Convert xFormers' masks to layouts without importing xFormers."""

from typing import TYPE_CHECKING

from dynaxx.lazy import load_at_first_use

if TYPE_CHECKING:
    from dynaxx.integrations.xformers.masks import layout_of_mask

__all__ = ["layout_of_mask"]

__getattr__ = load_at_first_use(__name__, {"masks": __all__})
