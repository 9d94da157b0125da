# SPDX-License-Identifier: Apache-2.0
"""Tools for checking attention: an fp64 oracle, derived error budgets and random inputs."""

from dynaxx.testing.cases import AttentionCase, make_qkv, random_case, random_pattern, random_selector
from dynaxx.testing.drawing import random_memory
from dynaxx.testing.expected import Expected
from dynaxx.testing.oracle import ErrorReport, check_forward, check_gradients, oracle_attention
from dynaxx.testing.patterns import check_pattern
from dynaxx.testing.problems import Problem, random_problem

__all__ = [
    "AttentionCase",
    "ErrorReport",
    "Expected",
    "Problem",
    "check_forward",
    "check_gradients",
    "check_pattern",
    "make_qkv",
    "oracle_attention",
    "random_case",
    "random_memory",
    "random_pattern",
    "random_problem",
    "random_selector",
]
