# SPDX-License-Identifier: Apache-2.0
"""Exports to engines that run or serve models outside of torch, a folder per engine; `exporting` is what they share.

The core never imports this wing: it loads an engine by name when a user asks for one.
"""
