# SPDX-License-Identifier: Apache-2.0
"""`dynaxx profile`: show where the time goes, and whether sparse attention is worth it."""
