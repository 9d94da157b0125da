# SPDX-License-Identifier: Apache-2.0
"""The tools: doctor, profile, analyze, tune, validate, report, bench. The runtime never imports them.

Each tool is a function that returns a frozen result with `.to_dict()`, and `dynaxx.cli` has a command for it. Their
dependencies are the extras `[cli]` and `[transformers]`, which are imported where they are used.
"""
