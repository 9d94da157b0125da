# SPDX-License-Identifier: Apache-2.0
"""The C++ core: its sources, how they are compiled, and the library of this process."""
