# SPDX-License-Identifier: Apache-2.0
"""Run the command line in this process, with stand-ins in place of slow tools."""

import sys
from types import ModuleType, SimpleNamespace

from typer.testing import CliRunner

import dynaxx
from dynaxx import cli

COMMANDS = ("doctor", "profile", "analyze", "tune", "validate", "report", "bench")


def dynaxx_(*args):
    return CliRunner().invoke(cli.app, [str(arg) for arg in args])


class Result(SimpleNamespace):
    def to_dict(self):
        return {key: value for key, value in vars(self).items() if key != "policy"}


class Analysis(Result):
    def summary(self):
        return "heads: 8"


class Validation(Result):
    def summary(self):
        return "some checks"

    def later_border(self, lengths):
        return None


FACTS = {"model_type": "llama", "layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 16}
POLICY = dynaxx.Policy(model=FACTS, dense_below=512, rules=(dynaxx.Rule.of(dynaxx.SlidingWindow(16)),))
CHECKED = {"TOKENS": 4096, "check_sparse": lambda policy: None}  # of the module that validates


def stand_in(monkeypatch, name, **functions):
    module = ModuleType(f"dynaxx.lab.{name}")
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, f"dynaxx.lab.{name}", module)
