# SPDX-License-Identifier: Apache-2.0
"""`dynaxx analyze`: show where each head attends, and which rule preserves it."""
