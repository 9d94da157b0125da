# SPDX-License-Identifier: Apache-2.0
"""Graph tasks over a list of edges: find the parents of a node, and the nodes two steps from it.

The tasks follow OpenAI's GraphWalks: nodes are random hexadecimal names, edges are directed, and the answer is a set of
nodes.
"""

from __future__ import annotations

import random
from itertools import pairwise

from dynaxx.lab.tasks.example import Example, TaskDefinition, in_a_row
from dynaxx.lab.tasks.haystack import NOISE, Haystack, different_letters, hide

DIGITS = 6
OUT = 2  # edges from a node
SOLVED = (
    "Edges:\na1 -> b2\nb2 -> c3\na1 -> d4\nc3 -> d4\n"
    "Question: Which nodes have an edge that leads to d4?\nAnswer: a1, c3\n"
    "Question: Which nodes are exactly two steps from a1?\nAnswer: c3\n\n"
)


def _edges(rng: random.Random, count: int) -> tuple[list[str], list[tuple[str, str]]]:
    nodes = different_letters(rng, max(4, count // OUT), DIGITS, "0123456789abcdef")
    pairs = {(a, b) for a in nodes for b in rng.sample(nodes, OUT) if a != b}
    edges = sorted(pairs)
    rng.shuffle(edges)
    return nodes, edges


def parents(rng: random.Random, haystack: Haystack, size: int, tokens: int) -> Example:
    """Ask for the parents of a node that has some."""
    pick = rng.random()
    _, edges = _edges(rng, size)
    before: dict[str, list[str]] = {}
    for a, b in edges:
        before.setdefault(b, []).append(a)
    some = sorted(node for node, leading in before.items() if len(leading) <= 3)
    node = some[int(pick * len(some))]
    return _asked(edges, f"Which nodes have an edge that leads to {node}?", before[node])


def two_steps(rng: random.Random, haystack: Haystack, size: int, tokens: int) -> Example:
    """Ask for the nodes exactly two steps from a node."""
    pick = rng.random()
    far: dict[str, list[str]] = {}
    while not far:  # a small graph may have no node two steps from another
        nodes, edges = _edges(rng, size)
        far = _two_steps_from(nodes, edges)
    start = sorted(far)[int(pick * len(far))]
    return _asked(edges, f"Which nodes are exactly two steps from {start}?", far[start])


def _two_steps_from(nodes: list[str], edges: list[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the nodes two steps from each node that has some."""
    after: dict[str, list[str]] = {}
    for a, b in edges:
        after.setdefault(a, []).append(b)
    found = {}
    for start in nodes:
        near = after.get(start, [])
        reached = dict.fromkeys(each for node in near for each in after.get(node, ()))
        found[start] = [each for each in reached if each != start and each not in near]
    return {start: reached for start, reached in found.items() if reached}


def _asked(edges: list[tuple[str, str]], question: str, answers: list[str]) -> Example:
    listed = "\n".join(f"{a} -> {b}" for a, b in edges)
    return Example(
        f"The edges of a directed graph are listed, and questions follow.\n\n{SOLVED}Edges:\n{listed}\n",
        f"Question: {question}\nAnswer:",
        tuple(answers),
        in_a_row(answers),
    )


GRAPH_TASKS = (
    TaskDefinition("graph_parents", "nodes with an edge to a node", parents, grade="f1", least=8),
    TaskDefinition("graph_steps", "nodes two steps from a node", two_steps, grade="f1", least=8),
)


HOPS = 4
EXAMPLE_LINES, EXAMPLE_LETTERS = 12, 3  # in the solved example


def variable_tracking(rng: random.Random, haystack: Haystack, size: int, tokens: int) -> Example:
    """Hide one chain of five variables in `size` repeated lines, after a solved example with shorter names."""
    solved = _chain(rng, EXAMPLE_LINES, EXAMPLE_LETTERS)
    asked = _chain(rng, size, 5)
    return Example(
        f"{solved.prompt}{''.join(solved.pieces)}\n\n{asked.context}", asked.question, asked.answers, asked.pieces
    )


def _chain(rng: random.Random, lines: int, length: int) -> Example:
    names = different_letters(rng, HOPS + 1, length)
    value = str(rng.randrange(10_000, 100_000))
    facts = [f"VAR {names[0]} = {value}", *(f"VAR {name} = VAR {before}" for before, name in pairwise(names))]
    context = "\n".join(hide(random.Random(rng.random()), [NOISE] * lines, facts))
    return Example(
        f"The text below hides a chain of variables that are set to each other. Follow it.\n\n{context}\n",
        f"Question: Which variables have the value {value} in the text above?\n"
        f"Answer: By the chain above, {len(names)} variables have the value {value}:",
        tuple(names),
        in_a_row(names),
    )


TRACKING_TASKS = (TaskDefinition("vt", "five variables of one chain in a repeated line", variable_tracking),)
