# SPDX-License-Identifier: Apache-2.0
"""The C++ core: its sources, their compilation, and the library that this process has loaded."""
