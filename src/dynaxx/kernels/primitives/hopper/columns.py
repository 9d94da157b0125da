# SPDX-License-Identifier: Apache-2.0
"""A tile's columns apart, for inline assembly that works in place on all numbers of a thread.

A thread has columns 2 t and 2 t + 1 of every eight, where t is its index among the four threads that share a row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def columns_of_threads(tile):
    """Split a tile [rows, columns] into columns / 4 tiles [rows, 4], one per column of a thread, in order."""
    ROWS: gl.constexpr = tile.shape[0]
    EIGHTS: gl.constexpr = tile.shape[1] // 8
    tile = gl.permute(gl.reshape(tile, [ROWS, EIGHTS, 4, 2]), (0, 2, 1, 3))
    return _halves((gl.reshape(tile, [ROWS, 4, EIGHTS * 2]),), EIGHTS * 2)


@gluon.jit
def _halves(tiles, COLUMNS: gl.constexpr):
    """Split tiles [rows, 4, COLUMNS] into tiles [rows, 4] of their columns."""
    if COLUMNS == 1:
        return tiles
    else:
        out = ()
        for u in gl.static_range(len(tiles)):
            tile = gl.reshape(tiles[u], [tiles[u].shape[0], 4, 2, COLUMNS // 2])
            left, right = gl.split(gl.permute(tile, (0, 1, 3, 2)))
            if COLUMNS == 2:
                left, right = gl.reshape(left, [left.shape[0], 4]), gl.reshape(right, [right.shape[0], 4])
            out += (left, right)  # type: ignore[assignment]
        return _halves(out, COLUMNS // 2)


@gluon.jit
def tile_of_columns(columns, FIRST: gl.constexpr, COUNT: gl.constexpr, layout: gl.constexpr):
    """Invert `columns_of_threads` for COUNT of `columns`, starting at FIRST."""
    tiles = ()
    for u in gl.static_range(FIRST, FIRST + COUNT, 2):
        tiles += (gl.join(columns[u], columns[u + 1]),)  # type: ignore[assignment]
    tile = _joined(tiles)
    tile = gl.permute(gl.reshape(tile, [tile.shape[0], 4, COUNT // 2, 2]), (0, 2, 1, 3))
    return gl.convert_layout(gl.reshape(tile, [tile.shape[0], COUNT * 4]), layout)


@gluon.jit
def _joined(tiles):
    """Join tiles [rows, 4, columns] side by side."""
    if len(tiles) == 1:
        return tiles[0]
    else:
        out = ()
        for u in gl.static_range(len(tiles) // 2):
            tile = gl.permute(gl.join(tiles[2 * u], tiles[2 * u + 1]), (0, 1, 3, 2))
            out += (gl.reshape(tile, [tile.shape[0], 4, tile.shape[2] * tile.shape[3]]),)  # type: ignore[assignment]
        return _joined(out)
