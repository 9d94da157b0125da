# SPDX-License-Identifier: Apache-2.0
"""Products over the columns of a head that exist, in parts whose widths are powers of two.

Tiles in shared memory are 64, 128 or 256 columns wide, and wgmma's operands are powers of two. A head of 80 columns
lies in a tile of 128; multiplying its parts of 64 and 16 columns leaves out the 48 columns of zeros.

    scores = a b.T     sum over the parts of both tiles
    result += p b      one accumulator per part; together they are the columns of the result
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

WIDTHS = (64, 80, 96, 128, 192, 256)  # of one or two parts; parts of 128 and 32 columns are slower than 256


def columns_of(head_dim: int) -> int:
    """Return the columns that are multiplied: `head_dim`, rounded up to one of `WIDTHS`."""
    return next(width for width in WIDTHS if head_dim <= width)


@gluon.constexpr_function
def part_count(columns):
    """Return the number of parts."""
    return bin(columns).count("1")


@gluon.constexpr_function
def part_width(columns, i_part):
    """Return the columns of a part, the widest one first."""
    return [1 << i for i in range(12, -1, -1) if columns >> i & 1][i_part]


@gluon.constexpr_function
def part_first(columns, i_part):
    """Return the first column of a part."""
    return sum([1 << i for i in range(12, -1, -1) if columns >> i & 1][:i_part])


@gluon.jit
def columns_of_part(tile, COLUMNS: gl.constexpr, PART: gl.constexpr):
    """Return a part of a tile in shared memory."""
    if tile.shape[1] == COLUMNS:
        return tile
    else:
        return tile.slice(part_first(COLUMNS, PART), part_width(COLUMNS, PART), dim=1)


@gluon.jit
def _zeros(ROWS: gl.constexpr, WIDTH: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    return gl.zeros([ROWS, WIDTH], gl.float32, layout)


@gluon.jit
def zero_parts(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Return an accumulator per part, zeroed."""
    parts = ()
    for u in gl.static_range(part_count(COLUMNS)):
        parts += (_zeros(ROWS, part_width(COLUMNS, u)),)  # type: ignore[assignment]
    return parts


@gluon.jit
def start_scores(a, b, zero, COLUMNS: gl.constexpr):
    """Start a b.T over the columns of both tiles; return its token."""
    token = zero
    for u in gl.static_range(part_count(COLUMNS)):
        some_a, some_b = columns_of_part(a, COLUMNS, u), columns_of_part(b, COLUMNS, u)
        token = warpgroup_mma(some_a, some_b.permute((1, 0)), token, use_acc=u > 0, is_async=True)
    return token


@gluon.jit
def start_sums(p, tile, parts, COLUMNS: gl.constexpr):
    """Start parts += p tile; return the tokens."""
    tokens = ()
    for u in gl.static_range(part_count(COLUMNS)):
        some = columns_of_part(tile, COLUMNS, u)
        tokens += (warpgroup_mma(p, some, parts[u], is_async=True),)  # type: ignore[assignment]
    return tokens


@gluon.jit
def wait_for(tokens, PENDING: gl.constexpr):
    """Wait until at most PENDING products that were started later run; return the parts."""
    found = warpgroup_mma_wait(PENDING, deps=tokens)
    if len(tokens) == 1:
        found = (found,)
    return found


@gluon.jit
def wait_for_both(tokens, others, PENDING: gl.constexpr):
    """Wait like `wait_for` for the products of two results; return both."""
    found = warpgroup_mma_wait(PENDING, deps=tokens + others)
    return found[: len(tokens)], found[len(tokens) :]


@gluon.jit
def times(parts, factor):
    """Multiply all parts by a number."""
    found = ()
    for u in gl.static_range(len(parts)):
        found += (parts[u] * factor,)  # type: ignore[assignment]
    return found


@gluon.jit
def times_rows(parts, factors):
    """Multiply each row of all parts by its factor."""
    found = ()
    for u in gl.static_range(len(parts)):
        of_rows = gl.convert_layout(factors, gl.SliceLayout(1, parts[u].type.layout))
        found += (parts[u] * of_rows[:, None],)  # type: ignore[assignment]
    return found


@gluon.jit
def store_parts(tile, parts, dtype: gl.constexpr, COLUMNS: gl.constexpr):
    """Store all parts to a tile in shared memory. Its other columns keep what they are."""
    for u in gl.static_range(len(parts)):
        columns_of_part(tile, COLUMNS, u).store(parts[u].to(dtype))
