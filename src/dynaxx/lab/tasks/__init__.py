# SPDX-License-Identifier: Apache-2.0
"""Long-context tasks, generated offline from real text: RULER's thirteen, multi-round reference and graph walking."""
