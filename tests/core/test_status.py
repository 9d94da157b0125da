# SPDX-License-Identifier: Apache-2.0
"""Exported functions of the core return a status for any argument: no exception crosses into Python."""

import ctypes
from ctypes import c_int64, c_void_p

import pytest
import torch

from dynaxx.core.library import active_library
from dynaxx.core.structures import BAD_INPUT, FAILED, NO_MEMORY, OK, raise_for_status

pytestmark = pytest.mark.skipif(active_library() is None, reason="needs the C++ core")

BIG = 2**62


def static_layout(program, grid=(100, 100, 16, 16, 1)):
    """Build a layout, free it, and return the status."""
    library, built, sizes = active_library(), c_void_p(), (c_int64 * 7)()
    numbers = (c_int64 * len(program))(*program)
    code = library.dynaxx_cpu_static_layout(numbers, len(program), (c_int64 * 5)(*grid), sizes, ctypes.byref(built))
    assert (code == OK) == bool(built.value)
    if built.value:
        assert library.dynaxx_cpu_take_layout(built, None, 0) == OK
    return code


@pytest.mark.parametrize(
    "program",
    [
        [],
        [0],
        [0, 1],
        [9, 1],
        [-1, 1, 1],
        [1, 0],  # multiples of 0
        [1, -3],
        [2, 10**9, 0, 1],  # more keys than the program has numbers
        [2, -1],
        [2, 2, 5, 6, 1, 2],  # not ascending
        [4, 2, 0, 100, 7],
        [4, 3, 0, 50, 20],
        [4, 1, 0],
        [5, 0],
        [6, -1, 0],
        [7, 1],  # "any of" one earlier rule, but there is none
        [0, 0, 5, 7, 2],
        [0, 0, 5, 0, 0, 5],  # two rules that nothing joins
        [0, 0, 2**62 + 1],
        [0, 0, 5] + [7, 1] * 1000,  # nested deeper than recursion should go
    ],
)
def test_a_program_that_is_none_is_refused(program):
    assert static_layout(program) == BAD_INPUT


@pytest.mark.parametrize(
    "grid",
    [(0, 100, 16, 16, 1), (-5, 100, 16, 16, 1), (100, BIG, 16, 16, 1), (2**63 - 1, 100, 16, 16, 0),
     (100, 100, 0, 16, 1), (100, 100, 16, 17, 1), (100, 100, 16, 2**40, 1)],
)  # fmt: skip
def test_a_grid_that_is_none_is_refused(grid):
    assert static_layout([0, 0, BIG], grid) == BAD_INPUT


def test_random_blocks_are_clipped_to_those_there_are():
    assert static_layout([6, BIG, 2**63 - 1]) == OK


def test_a_layout_is_taken_only_into_room_enough():
    library, built, sizes = active_library(), c_void_p(), (c_int64 * 7)()
    program, grid = (c_int64 * 3)(0, 0, 5), (c_int64 * 5)(100, 100, 16, 16, 1)
    assert library.dynaxx_cpu_static_layout(program, 3, grid, sizes, ctypes.byref(built)) == OK
    numbers = torch.zeros(sum(size + -size % 4 for size in sizes), dtype=torch.int32)
    assert library.dynaxx_cpu_take_layout(built, numbers.data_ptr(), len(numbers) - 4) == BAD_INPUT
    assert not numbers.any()


def test_two_layouts_are_built_before_either_is_taken():
    """A signal handler or a finalizer can build a layout between the two calls of another."""
    library = active_library()
    found = []
    for hi in (5, 50):
        built, sizes = c_void_p(), (c_int64 * 7)()
        program, grid = (c_int64 * 3)(0, 0, hi), (c_int64 * 5)(100, 100, 16, 16, 1)
        assert library.dynaxx_cpu_static_layout(program, 3, grid, sizes, ctypes.byref(built)) == OK
        found.append((built, list(sizes)))
    assert found[0][1] != found[1][1]
    for built, sizes in found:
        numbers = torch.full((sum(size + -size % 4 for size in sizes),), -7, dtype=torch.int32)
        assert library.dynaxx_cpu_take_layout(built, numbers.data_ptr(), len(numbers)) == OK
        assert numbers[: sizes[0]].tolist()[-1] == sizes[2]


@pytest.mark.parametrize(
    ("indptr", "num_partial", "indices", "masks"),
    [
        ([0, 2, 1], [0, 0], [0, 1, 2], [-1, -1, -1]),
        ([1, 2, 3], [0, 0], [0, 1, 2], [-1, -1, -1]),
        ([0, 2, 4], [0, 0], [0, 1, 2], [-1, -1, -1]),
        ([0, 2, -(2**31)], [0, 0], [0, 1, 2], [-1, -1, -1]),
        ([0, 2, 2**31 - 1], [0, 0], [0, 1, 2], [-1, -1, -1]),
        ([0, 2, 3], [3, 0], [0, 1, 2], [-1, -1, -1]),
        ([0, 2, 3], [-1, 0], [0, 1, 2], [-1, -1, -1]),
        ([0, 2, 3], [0, 0], [0, 3, 2], [-1, -1, -1]),
        ([0, 2, 3], [0, 0], [0, -1, 2], [-1, -1, -1]),
        ([0, 2, 3], [0, 0], [1, 1, 2], [-1, -1, -1]),
        ([0, 2, 3], [0, 0], [0, 1, 2], [0, -1, -1]),
        ([0, 2, 3], [1, 0], [0, 1, 2], [2, -1, -1]),
        ([0, 2, 3], [1, 0], [0, 1, 2], [-2, -1, -1]),
    ],
)
def test_numbers_of_a_layout_out_of_range_are_found(indptr, num_partial, indices, masks):
    tensors = [torch.tensor(x, dtype=torch.int32) for x in (indptr, num_partial, indices, masks)]
    check = active_library().dynaxx_cpu_plan_check
    assert check(*(x.data_ptr() for x in tensors), 1, 2, 3, 2, 3) == BAD_INPUT
    good = [torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 3], [1, 0], [1, 0, 2], [1, -1, -1])]
    assert check(*(x.data_ptr() for x in good), 1, 2, 3, 2, 3) == OK
    assert check(*(x.data_ptr() for x in good), 2**40, 2**40, 3, 2, 3) == BAD_INPUT


def test_codes_become_exceptions():
    raise_for_status(OK)
    for code, kind in ((NO_MEMORY, MemoryError), (BAD_INPUT, ValueError), (FAILED, RuntimeError), (77, RuntimeError)):
        with pytest.raises(kind, match="core"):
            raise_for_status(code)
