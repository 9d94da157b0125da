"""What tests, benchmarks and users check against: the fp64 oracle, derived error budgets, and random inputs."""

from dynaxx.testing.cases import AttentionCase, make_qkv, random_case, random_pattern
from dynaxx.testing.oracle import ErrorReport, check_forward, check_gradients, oracle_attention

__all__ = [
    "AttentionCase",
    "ErrorReport",
    "check_forward",
    "check_gradients",
    "make_qkv",
    "oracle_attention",
    "random_case",
    "random_pattern",
]
