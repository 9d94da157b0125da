# SPDX-License-Identifier: Apache-2.0
"""Lists in the order in which each warpgroup skips the other's keys, under Triton's interpreter and on a GPU."""

import pytest
import torch

from interpreter import DEVICE, run_interpreted, runs_here, starts_interpreter

pytest.importorskip("triton")


@pytest.mark.slow  # fingerprints show that kernels are those that passed
@starts_interpreter
def test_under_the_interpreter():
    run_interpreted(__file__)


def by_loops(keys, marks, first_alone, second_alone, size):
    first = [i for i, m in enumerate(marks) if not m & ~first_alone]
    second = [i for i, m in enumerate(marks) if not m & ~second_alone]
    turns = min(len(first), len(second)) // size
    order = []
    for i in range(turns):
        order += first[i * size : (i + 1) * size] + second[i * size : (i + 1) * size]
    begun = set(order)
    order += [i for i in range(len(marks)) if i not in begun]
    return [keys[i] for i in order], [marks[i] for i in order], turns


@runs_here
@pytest.mark.parametrize("part", [4, 5, 12, 64])
def test_against_loops(part):
    from dynaxx.trained.tokens.kernels.hopper.grouped_order import KEYS, ordered, queries_apart

    first_alone, second_alone = queries_apart(part)
    queries = min(128 // part, 32)
    assert not first_alone & second_alone
    assert sum((first_alone | second_alone) >> i & 1 for i in range(queries)) == queries - (64 % part != 0)
    torch.manual_seed(part)
    counts = torch.tensor([[0], [1], [130], [700], [5000]], dtype=torch.int32, device=DEVICE)
    lists = torch.arange(5000, dtype=torch.int32, device=DEVICE).expand(5, 1, 5000).contiguous()
    marks = (1 << torch.randint(queries, (5, 1, 5000))) | (1 << torch.randint(queries, (5, 1, 5000)))
    marks = torch.where(marks >= 1 << 31, marks - (1 << 32), marks).int().to(DEVICE)
    new_lists, new_marks, apart = ordered(lists, marks, counts, part)
    for i, count in enumerate(counts[:, 0].tolist()):
        want = by_loops(lists[i, 0, :count].tolist(), marks[i, 0, :count].tolist(), first_alone, second_alone, KEYS)
        got = new_lists[i, 0, :count].tolist(), new_marks[i, 0, :count].tolist(), int(apart[i, 0])
        assert got == want
    assert int(apart[4, 0]) > 0
