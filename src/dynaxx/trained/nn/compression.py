# SPDX-License-Identifier: Apache-2.0
"""Modules that compress a window of keys or values to one: a mean, a weighted sum, an MLP with positions.

Each maps windows (windows, cmp_block, heads, dim) to (windows, heads, dim) and starts as the mean.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dynaxx.arguments import typed


@typed
class MeanCompression(nn.Module):
    """The mean of the window, without parameters."""

    def __init__(self, cmp_block: int, heads: int, dim: int) -> None:
        super().__init__()
        self.weight = None

    def reset_parameters(self) -> None:
        """Do nothing: there are no parameters."""

    @property
    def pooling(self) -> None:
        """Return the argument for `compress_pages`; None means the mean."""

    def forward(self, windows: Tensor) -> Tensor:
        """Return (windows, heads, head_dim): the mean of each window."""
        return windows.mean(1)


@typed
class WeightedCompression(nn.Module):
    """A sum with a learned weight per position in the window and head."""

    def __init__(self, cmp_block: int, heads: int, dim: int) -> None:
        super().__init__()
        _check(cmp_block, heads, dim)
        self.weight = nn.Parameter(torch.empty(cmp_block, heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set equal weights, so that the sum is the mean."""
        nn.init.constant_(self.weight, 1.0 / len(self.weight))

    @property
    def pooling(self) -> Tensor:
        """Return the weights for `compress_pages`."""
        return self.weight

    def forward(self, windows: Tensor) -> Tensor:
        """Return (windows, heads, head_dim): a weighted sum of each window."""
        return torch.einsum("wlhd,lh->whd", windows, self.weight.to(windows.dtype))


@typed
class MlpCompression(nn.Module):
    """The mean plus the output of an MLP over the window with learned positions (arXiv 2502.11089, 3.3.1).

    All heads share the MLP. Its last layer starts at zero, so that the module starts as the mean. Its input is divided
    by `cmp_block` and its initial weights are multiplied by it: Adam changes every weight at the same rate, which would
    change a sum over that many tokens too much per step.

    Args:
        cmp_block: tokens per window.
        heads: number of heads.
        dim: head_dim of the keys or values.
        width: size of the hidden layer, 2 * dim by default.
    """

    def __init__(self, cmp_block: int, heads: int, dim: int, width: int | None = None) -> None:
        super().__init__()
        _check(cmp_block, heads, dim, width or 2 * dim)
        self.position = nn.Parameter(torch.empty(cmp_block, heads, dim))
        self.up = nn.Linear(cmp_block * dim, width or 2 * dim)
        self.down = nn.Linear(width or 2 * dim, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters."""
        nn.init.normal_(self.position, std=0.02)
        self.up.reset_parameters()
        with torch.no_grad():
            self.up.weight.mul_(len(self.position))
        nn.init.zeros_(self.down.weight)

    @property
    def pooling(self) -> MlpCompression:
        """Return the module for `compress_pages`."""
        return self

    def forward(self, windows: Tensor) -> Tensor:
        """Return (windows, heads, head_dim): an MLP of each window."""
        whole = (windows + self.position.to(windows.dtype)).transpose(1, 2).flatten(2)  # (windows, heads, l * dim)
        return windows.mean(1) + self.down(nn.functional.gelu(self.up(whole / len(self.position))))


def _check(*sizes: int) -> None:
    if min(sizes) < 1:
        raise ValueError(f"`cmp_block`, `heads`, `dim` and `width` must be >= 1, got {sizes}")


Compression = MeanCompression | WeightedCompression | MlpCompression
COMPRESSIONS: dict[str, type[Compression]] = {
    "mean": MeanCompression,
    "weighted": WeightedCompression,
    "mlp": MlpCompression,
}
