# SPDX-License-Identifier: Apache-2.0
"""Random problems of trained sparse attention, checked against fp64."""
