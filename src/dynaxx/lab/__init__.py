# SPDX-License-Identifier: Apache-2.0
"""The tools: doctor, profile, analyze, tune, validate, report, bench. The runtime never imports them.

Each tool is a module with one function that does the work and returns a frozen result with `.to_dict()`; `dynaxx.cli`
gives each a command. Their dependencies are the extras `[cli]` and `[transformers]`, imported where they are used.
"""
