# SPDX-License-Identifier: Apache-2.0
"""Long-context tasks: RULER's thirteen, multi-round reference and graph walking, made offline from real text."""
