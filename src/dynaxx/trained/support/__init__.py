# SPDX-License-Identifier: Apache-2.0
"""The problems of trained sparse attention that each GPU backend serves, answered without loading a compiler."""
